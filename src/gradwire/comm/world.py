"""`World`: this process among its peers; `init()` opens it, `current()` finds it."""

from __future__ import annotations

import atexit
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gradwire.comm.gloo import SoloGroup, TorchGroup, open_group
from gradwire.comm.hosts import Hosts, Place, find_hosts, open_on_hosts, within
from gradwire.comm.lane import Lane
from gradwire.comm.meeting import Meeting, meet
from gradwire.comm.torch_mesh import open_torch_mesh
from gradwire.comm.traced import TracedGroup, blame
from gradwire.core.clock import StepAccount, StepClock
from gradwire.core.group import Group
from gradwire.core.mesh import AXES, BATCH_AXES, Mesh
from gradwire.core.microbatch import MicrobatchSource
from gradwire.core.plan import Plan
from gradwire.errors import PeerError, PlanError, UsageError
from gradwire.launch.environment import read_environment

Number = TypeVar("Number", int, float, Tensor)

_LANES_END_S = 2.0  # for all together: a broken pipeline has several that wait for a peer

_CURRENT: ContextVar[World | None] = ContextVar("gradwire_world", default=None)


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """A distributed model. detach: removes the hooks. groups: opened for it alone, by name. whole_batch: around its backwards.

    owners: its optimizers and the modules with its parameters; once none of them lives, nobody can train it any more.
    """

    detach: Callable[[], None]
    whole_batch: Callable[[], AbstractContextManager[None]]
    groups: tuple[str, ...]
    owners: tuple[ref[object], ...]

    @property
    def abandoned(self) -> bool:
        """Whether it can be let go of."""
        return not any(owner() is not None for owner in self.owners)


class World:
    """This process among its peers. Made by ``gw.init()``; a context manager.

    rank, size: this process, 0 <= rank < size. local_rank, local_size: among those of this host. node_rank: the host.
    device: where tensors of this rank live. plan: what the launcher was told, else the default. mesh: its axes.
    """

    def __init__(self, meeting: Meeting, *, device: torch.device, plan: Plan) -> None:
        self.rank = meeting.rank
        self.size = meeting.size
        self.local_rank = meeting.local_rank
        self.local_size = meeting.local_size
        self.node_rank = meeting.node_rank
        self.host = socket.gethostname()
        self.device = device
        self.plan = plan
        self.mesh = Mesh.of(plan.mesh, self.size)
        self._meshed = bool(plan.mesh)
        self.clock = StepClock()
        self.reading: MicrobatchSource | None = None
        self.local_only = 0
        self.weight = 1.0
        self.weight_serial = 0
        self.step = 0
        self._meeting = meeting
        self._groups: dict[str, Group] = {}
        self._hosts: Hosts | None = None
        self._torch_mesh: DeviceMesh | None = None
        self._lanes: dict[str, Lane] = {}
        self._attachments: dict[int, Attachment] = {}
        self._turn_hooks: dict[object, Callable[[], None]] = {}
        self._serial = 0
        self._closed = False

    @property
    def reader_rank(self) -> int:
        """This rank's place among those that read samples of their own: along `BATCH_AXES`."""
        return self.mesh.ranks_along(BATCH_AXES, self.rank).index(self.rank)

    @property
    def num_readers(self) -> int:
        """How many ranks read samples of their own."""
        return self.mesh.length(BATCH_AXES)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh as a plan spells it; empty if nobody has said anything but the number of ranks."""
        return (
            {axis: size for axis, size in zip(AXES, self.mesh.sizes, strict=True) if size > 1} if self._meshed else {}
        )

    def take_mesh(self, plan: Plan) -> None:
        """The plan's mesh becomes this world's, unless that has another one. Raises PlanError."""
        wanted = Mesh.of(plan.mesh, self.size)
        if wanted == self.mesh:
            return
        if self._meshed:
            raise PlanError(
                f"mesh {wanted.words()} is wanted, but this world's is {self.mesh.words()}; all models of a world share one "
                "mesh: give it once, by gw.init(plan=...) or gradwire run --mesh"
            )
        self.mesh, self._meshed = wanted, True

    def group(self, *axes: str, channel: str = "main") -> Group:
        """The ranks along these mesh axes together; by default those that read samples of their own.

        A channel is a group of its own on the same ranks, for one issuing thread. The group is named after the axes that are
        longer than one, and holds its ranks in the name where they are not all of the job.
        """
        axes = axes or BATCH_AXES
        if unknown := [axis for axis in axes if axis not in AXES]:
            raise UsageError(f"unknown mesh axis {unknown[0]!r}; allowed: {', '.join(AXES)}")
        ranks = self.mesh.ranks_along(axes, self.rank)
        long = [axis for axis in AXES if axis in axes and self.mesh.length((axis,)) > 1]
        whose = "" if len(ranks) == self.size else f"[{','.join(map(str, ranks))}]"
        name = f"{'+'.join(long or axes[:1])}{whose}/{channel}"
        if name not in self._groups:
            self._groups[name] = self._open(name, ranks)
        return self._groups[name]

    def among(self, axis: str, places: Sequence[int], *, channel: str) -> Group:
        """Some of the ranks along ``axis``, by their places on it: the two ends of a pipeline's link. Only those call it."""
        line = self.mesh.ranks_along((axis,), self.rank)
        ranks = tuple(line[place] for place in sorted(places))
        name = f"{axis}[{','.join(map(str, ranks))}]/{channel}"
        if name not in self._groups:
            self._groups[name] = self._open(name, ranks, through_hosts=False)
        return self._groups[name]

    def _open(self, name: str, ranks: tuple[int, ...], *, through_hosts: bool = True) -> Group:
        """through_hosts: by shared memory inside each host; finding the hosts takes all ranks of the job, the first time."""
        watch = self._meeting.watch
        try:
            opened: Group = self._open_ranks(name, ranks)
            if through_hosts and isinstance(opened, TorchGroup) and self.device.type == "cpu":
                opened = self._on_hosts(opened, ranks)
        except RuntimeError as error:  # the store's and Gloo's errors
            raise blame(error, watch, f"{self._where} was opening {name}") from error
        return opened if len(ranks) == 1 else self._traced(opened, ranks)

    @property
    def _where(self) -> str:
        return f"rank {self.rank} on {self.host}"

    def _traced(self, group: Group, ranks: Sequence[int]) -> TracedGroup:
        some = None if len(ranks) == self.size else tuple(ranks)
        return TracedGroup(group, self._meeting.watch, where=self._where, ranks=some)

    def _open_ranks(self, name: str, ranks: Sequence[int]) -> TorchGroup | SoloGroup:
        meeting, place = self._meeting, ranks.index(self.rank)
        return open_group(
            meeting.store, name=name, rank=place, size=len(ranks), device=self.device, timeout_s=meeting.timeout_s
        )

    def _on_hosts(self, group: TorchGroup, ranks: tuple[int, ...]) -> Group:
        def of(places: Sequence[int]) -> tuple[int, ...]:
            return tuple(ranks[place] for place in places)

        return open_on_hosts(
            group,
            within(self._known_hosts(), ranks),
            open_inner=lambda name, places: self._open_ranks(name, of(places)),
            dress=lambda inner, places: self._traced(inner, of(places)),
            timeout_s=self._meeting.timeout_s,
        )

    def _known_hosts(self) -> Hosts:
        """Of all ranks of the job, found by the first group that is opened: all ranks open their first ones alike."""
        if self._hosts is None:
            here = Place(
                node_rank=self.node_rank, host=self.host, local_rank=self.local_rank, local_size=self.local_size
            )
            everybody = self._traced(self._open_ranks("hosts", range(self.size)), range(self.size))
            self._hosts = find_hosts(everybody, here)
            everybody.close()
        return self._hosts

    def torch_mesh(self) -> DeviceMesh:
        """The mesh as torch knows it, with dimensions `AXES`, for FSDP2 and DTensor. One thread issues its collectives."""
        if self._torch_mesh is None:
            self._torch_mesh = open_torch_mesh(
                self.mesh, self.rank, lambda axis: self.group(axis, channel="torch"), self.device
            )
        return self._torch_mesh

    def lane(self, name: str) -> Lane:
        """The communication thread of the group ``name``."""
        return self._lanes.setdefault(name, Lane(f"gradwire {name}"))

    def next_serial(self) -> int:
        """0, 1, 2, ...: the same sequence on all ranks, for channel names."""
        self._serial += 1
        return self._serial - 1

    def set_weight(self, count: float) -> None:
        """See ``gw.weight``."""
        self.weight = count
        self.weight_serial += 1

    def stepped(self) -> None:
        """An optimizer step ended."""
        self.step += 1
        self._meeting.at_step(self.step, self.clock.usual_step_s())

    def at_turn_end(self, hook: Callable[[], None]) -> Callable[[], None]:
        """Call ``hook`` whenever a loop asks its loader for more, or has read it to the end. Returns how to stop that."""
        key = object()
        self._turn_hooks[key] = hook

        def stop() -> None:
            self._turn_hooks.pop(key, None)

        return stop

    def turn_ended(self) -> None:
        """A loop is done with what its loader yielded."""
        for hook in list(self._turn_hooks.values()):
            hook()

    def settle(self) -> None:
        """Wait until the lanes are idle: nothing of this rank is on its way."""
        for lane in self._lanes.values():
            lane.settle()

    def replace_attachment(self, key: int, attachment: Attachment) -> None:
        """Remember a distributed model; lets go of what the key held before, and of those that nobody can train any more.

        All ranks must have settled. What a rank lets go of it closes alone: the others may find a model gone at another
        time, and names are never used again.
        """
        for each, held in list(self._attachments.items()):
            if each == key or held.abandoned:
                del self._attachments[each]
                held.detach()
                self._close_groups(held.groups)
        self._attachments[key] = attachment

    def whole_batch(self, key: int) -> AbstractContextManager[None]:
        """Around all backwards of one batch of a model (by its id): at the end this rank has taken part in their exchange."""
        held = self._attachments.get(key)
        return nullcontext() if held is None else held.whole_batch()

    def _close_groups(self, names: Sequence[str]) -> None:
        for name in names:
            lane, group = self._lanes.pop(name, None), self._groups.pop(name, None)
            if lane is not None:
                lane.close()
            if isinstance(group, TracedGroup):
                group.close()

    def log(self, *words: object) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(*words, flush=True)

    def note(self, text: str) -> None:
        """Say something that only this rank knows, where the user sees it: on the launcher's console."""
        self._meeting.note(text)

    def account(self) -> StepAccount:
        """Where this rank's steps spent their time so far."""
        return self.clock.account()

    def sum(self, value: Number) -> Number:
        """``value`` summed over the ranks that read samples of their own: a number, or a tensor (a new one is returned)."""
        if isinstance(value, Tensor):
            total = self.group().all_reduce(value.detach().to(self.device, copy=True).contiguous())
            return total.to(value.device)
        if not isinstance(value, int | float):
            raise UsageError(f"gw.sum takes a number or a tensor, not {type(value).__name__}")
        dtype = torch.float64 if isinstance(value, float) else torch.int64
        return self.group().all_reduce(torch.tensor(value, dtype=dtype, device=self.device)).item()  # pyright: ignore[reportReturnType]  # of the kind that went in

    def close(self, reason: str | None = None, *, exit_code: int = 0) -> None:
        """Leave: wait for the others to be done too, then free groups, threads and sockets. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for attachment in self._attachments.values():
            attachment.detach()
        self._meeting.leave(reason, exit_code)
        self._release()

    def _fail(self, error: BaseException) -> None:
        self._closed = True
        text = "".join(traceback.format_exception(error))
        self._meeting.fail(text, victim=isinstance(error, PeerError))
        self._release()

    def _release(self) -> None:
        until_s = time.monotonic() + _LANES_END_S
        for lane in self._lanes.values():
            lane.close(max(0.0, until_s - time.monotonic()))
        self._groups.clear()
        self._torch_mesh = None
        self.reading = None  # a loader's workers must not linger in the cycle world -> loader -> world
        self._meeting.close()
        if _CURRENT.get() is self:
            _CURRENT.set(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            self.close(f"it called sys.exit({error.code!r})", exit_code=code)
        elif isinstance(error, KeyboardInterrupt):
            self._closed = True  # the launcher got the signal too and says so
            self._release()
        elif not self._closed:
            self._fail(error)


def init(*, device: str | torch.device | None = None, plan: Plan | None = None) -> World:
    """Open this process's world: find rank and peers from the launcher's variables, or be a world of one.

    plan: beats ``gradwire run --plan``, which beats the default; a mesh must be known before loaders are made, so it is best
    given here or to the launcher.
    device: default ``cuda:<local_rank>`` where CUDA is present, else ``cpu``. Use as a context manager, or plainly (it then
    closes when the process ends). Raises LaunchError when the peers cannot be met, PlanError for a bad plan.

    >>> import gradwire as gw
    >>> with gw.init() as world:
    ...     world.rank, world.size
    (0, 1)
    """
    if _CURRENT.get() is not None:
        raise UsageError("gw.init() was called twice; close the first world or call it once")
    environment = read_environment()
    if plan is None:
        plan = Plan.from_toml(environment.plan_text, where="the plan file") if environment.plan_text else Plan()
    plan.check(environment.world_size)
    chosen = _device(device, environment.local_rank)
    world = World(meet(environment, chosen), device=chosen, plan=plan)
    _CURRENT.set(world)
    atexit.register(world.close)
    return world


def adopt(meeting: Meeting, *, plan: Plan | None = None, device: str = "cpu") -> World:
    """A world on a meeting made by hand, current in this thread: for ranks that are threads."""
    world = World(meeting, device=_device(device, meeting.local_rank), plan=plan or Plan())
    _CURRENT.set(world)
    return world


def opened() -> World | None:
    """The world that ``gw.init()`` opened in this thread, if it did."""
    return _CURRENT.get()


def current() -> World:
    """The world that ``gw.init()`` opened in this thread."""
    world = _CURRENT.get()
    if world is None:
        raise UsageError("no world is open; call gw.init() first")
    return world


def _device(device: str | torch.device | None, local_rank: int) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and torch.cuda.is_available():
        device = f"cuda:{local_rank % torch.cuda.device_count()}"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"gw.init(device={device!r}): {str(error).splitlines()[0]}") from None
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"gw.init(device={device!r}): this torch sees no CUDA device; use device='cpu'")
        torch.cuda.set_device(chosen)
    elif chosen.type != "cpu":
        raise UsageError(f"gw.init(device={device!r}): allowed: cpu, cuda, cuda:N")
    return chosen
