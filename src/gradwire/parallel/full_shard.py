"""`FullShard`: parameters and gradients sharded by FSDP2, with collectives that run beside compute.

Each rank keeps 1/n of every parameter, by rows. A *unit* (a block of the model, see `units.py`) is gathered before it runs and
freed after it; its gradients are summed straight into the rows' owners. What that sends in a step, a rank: (n-1)/n of the
parameters' bytes for each of two gathers and one reduce-scatter; one gather less with ``reshard_after_forward=False``.

FSDP2 prefetches backward by itself, in the reverse of the forward order; forward it must be told whom to prefetch, and is,
by the order of the forward before. `collectives.py` says which of torch's habits this stands on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.hooks import RemovableHandle

from gradwire.comm.dtensor import local_of
from gradwire.comm.world import World
from gradwire.core.autograd import at_end_of_backward
from gradwire.errors import GradwireError, UsageError
from gradwire.parallel.collectives import Gather, Scatter
from gradwire.parallel.moved import Replaced
from gradwire.parallel.unit_gradients import SILENT, Listener, Unit, UnitGradients
from gradwire.parallel.units import UNIT_BYTES, choose_units, owned

AHEAD = 2  # units gathered before they run; each keeps a unit's whole parameters in memory

Slot = tuple[nn.Module, str, nn.Parameter]


class FullShard:
    """A model whose parameters are sharded by rows over the ranks along ``shard``, in place.

    reshard_after_forward: whether a unit is freed between forward and backward, and gathered twice. bucket_bytes: at least so
    many bytes of parameters a unit. Scalar parameters stay whole on every rank.
    Names in ``state_dict()`` stay; values are ``DTensor``s. Forward must go through ``model(...)``; between forward and
    backward the modules hold whole parameters. Until ``hooks``, a backward leaves the *sum* over the ranks in ``.grad``.
    Raises UsageError for one rank, sparse gradients, or a unit with parameters of several dtypes.
    """

    def __init__(
        self, model: nn.Module, world: World, *, reshard_after_forward: bool, bucket_bytes: int | None = None
    ) -> None:
        serial = world.next_serial()
        channels = [world.group("shard", channel=f"{what}{serial}") for what in ("gather", "scatter")]
        self.groups = tuple(group.name for group in channels)
        if channels[0].size == 1:
            raise UsageError(
                "sharding needs 2 ranks or more along shard, this mesh has 1; use --mesh shard=2, or no sharding"
            )
        names = {id(module): name for name, module in model.named_modules()}
        _refuse(model, names)
        self._model = model
        self._phase = "idle"
        self._reshard = reshard_after_forward
        self._order: list[Unit] = []
        self._kept: Unit | None = None
        self._gathered: list[Unit] = []
        self._planned: list[Unit] = []
        self._unsharded: dict[nn.Parameter, nn.Parameter] = {}
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Node] = []
        plain = [param for param in model.parameters() if not param.ndim]
        self._slots, self.replaced, witness = self._shard(model, world, names, plain, bucket_bytes or UNIT_BYTES)
        self._units = list(self._slots)
        self._gradients = UnitGradients(self._units, plain, channels[1], world.lane(channels[1].name))
        self._gathers = {
            unit: Gather(channels[0], world.lane(channels[0].name), partial(self._begins, unit)) for unit in self._units
        }
        self._install(plain)
        self._check(witness)

    # --- making ------------------------------------------------------------------------------------------------------

    def _shard(
        self, model: nn.Module, world: World, names: Mapping[int, str], plain: list[nn.Parameter], unit_bytes: int
    ) -> tuple[dict[Unit, list[Slot]], Replaced, tuple[Unit, int, Tensor]]:
        """Returns the units with their sharded parameters, old id -> new parameter, and one small old value to check by."""
        mesh, taken = world.torch_mesh()["shard"], frozenset[int]()
        slots: dict[Unit, list[Slot]] = {}
        replaced = Replaced()
        witness: tuple[Unit, int, Tensor] | None = None
        for modules in (*choose_units(model, unit_bytes), (model,)):
            unit = Unit(name=names[id(modules[0])], modules=modules)
            old = [slot for slot in owned(modules, taken) if slot[2].ndim]
            _refuse_mixed(unit.name, old)
            for _, _, param in old:
                param.data = param.data.contiguous()  # FSDP2 takes no other
            for place, (_, _, param) in enumerate(old):
                if param.numel() and (witness is None or param.numel() < witness[2].numel()):
                    witness = (unit, place, local_of(param).detach().clone())
            fully_shard(
                list(modules) if len(modules) > 1 else modules[0],  # pyright: ignore[reportGeneralTypeIssues]
                mesh=mesh,
                reshard_after_forward=self._reshard and modules != (model,),
                ignored_params=set(plain),
            )
            slots[unit] = [(module, name, getattr(module, name)) for module, name, _ in old]
            unit.params = [param for _, _, param in slots[unit]]
            for (_, _, before), after in zip(old, unit.params, strict=True):
                replaced.note(before, after)
            taken |= {id(module) for module in modules}
        if witness is None:
            raise UsageError("the model has no parameters to shard")
        return slots, replaced, witness

    def _install(self, plain: list[nn.Parameter]) -> None:
        for unit in self._units:
            lead = _fsdp(unit.modules[0])
            lead.set_custom_all_gather(cast("Any", self._gathers[unit]))
            lead.set_custom_reduce_scatter(cast("Any", Scatter(partial(self._reduce, unit))))
            lead.set_gradient_divide_factor(1.0)
            lead.set_reduce_scatter_unused_params(True, recurse=False)
            for module in unit.modules:
                self._handles.append(module.register_forward_pre_hook(partial(self._enters, unit)))
        self._handles.append(self._model.register_forward_pre_hook(self._forward_begins, prepend=True))
        self._handles.append(self._model.register_forward_hook(self._forward_ended))
        for param in plain:
            if param.requires_grad:
                node = get_gradient_edge(param).node
                self._nodes.append(node)  # autograd holds it weakly, and would make a new one without the hook
                self._handles.append(node.register_prehook(partial(self._plain_begins, param)))

    def _check(self, witness: tuple[Unit, int, Tensor]) -> None:
        """Gather one unit and compare: a torch that uses a gather in another way than 2.13 is found here."""
        unit, place, true = witness
        lead = _fsdp(unit.modules[0])
        lead.unshard()
        module, name, _ = self._slots[unit][place]
        same = torch.equal(local_of(getattr(module, name)).detach(), true)
        lead.reshard()
        self._gathered.clear()
        if not same:
            raise GradwireError(
                f"torch {torch.__version__} uses FSDP2's collectives in another way than 2.13 does, so that parameters would be "
                "wrong; use torch 2.13, or shard the optimizer only"
            )

    # --- forward -----------------------------------------------------------------------------------------------------

    def _forward_begins(self, *_: object) -> None:
        if _in_backward():
            return  # a checkpoint's
        self.recover()
        self._free()  # an earlier forward's, which had no backward: the optimizer may have stepped since
        self._phase = "forward"
        self._order = []

    def _enters(self, unit: Unit, *_: object) -> None:
        if self._phase == "forward":
            self._order.append(unit)
        for module, name, sharded in self._slots[unit]:
            whole = cast("nn.Parameter", getattr(module, name))
            if whole.requires_grad and whole is not self._unsharded.get(sharded) and whole is not sharded:
                self._unsharded[sharded] = whole
                whole.register_post_accumulate_grad_hook(lambda _, param=sharded: self._gradients.used(param))

    def _forward_ended(self, _module: nn.Module, _args: object, output: object) -> None:
        if self._phase != "forward":
            return
        self._phase = "idle"
        self._gathered.clear()
        for unit in self._units:
            unit.calls = self._order.count(unit)
            if self._gathers[
                unit
            ].underway:  # prefetched, and then it did not run: by the next time it may have changed
                _fsdp(unit.modules[0]).unshard()
                _fsdp(unit.modules[0]).reshard()
        if not torch.is_grad_enabled():
            self._free()
        self._prefetch()
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._backward_begins)

    def _free(self) -> None:
        for unit in self._units:
            _fsdp(unit.modules[0]).reshard()

    def _prefetch(self) -> None:
        """For the next forward, by the order of this one; a unit that ran twice or not at all prefetches nobody."""
        order = [unit for unit in self._order if unit.calls == 1 and unit.modules != (self._model,)]
        self._kept = order[-1] if order else None  # backward begins with it: freeing it would gather it twice in a row
        for unit in self._units:
            ahead: list[Unit] = []
            if unit in order:
                place = order.index(unit)
                ahead = order[place + 1 : place + 1 + AHEAD]
            elif unit.modules == (self._model,):
                ahead = order[:AHEAD]
            if self._reshard and unit.modules != (self._model,):
                _fsdp(unit.modules[0]).set_reshard_after_forward(unit is not self._kept, recurse=False)
            _fsdp(unit.modules[0]).set_modules_to_forward_prefetch([_fsdp(each.modules[0]) for each in ahead])

    # --- backward ----------------------------------------------------------------------------------------------------

    def _backward_begins(self, *_: object) -> None:
        if self._phase != "backward":
            self._phase = "backward"
            at_end_of_backward(lambda: at_end_of_backward(self.settle))  # FSDP2's own callback comes before

    def _begins(self, unit: Unit) -> None:
        self._gathered.append(unit)

    def _reduce(self, unit: Unit, output: Tensor, rows: Tensor) -> None:
        self._backward_begins()
        self._gradients.reduce(unit, output, rows)

    def _plain_begins(self, param: nn.Parameter, *_: object) -> None:
        self._backward_begins()
        self._gradients.hold(param)

    def settle(self) -> None:
        """Deliver what is left of a backward; at its end, before anybody looks at a gradient. Else it does nothing."""
        if self._phase != "backward":
            return
        self._phase = "idle"
        if self._gradients.finish():
            self._planned = [unit for unit in self._gathered if unit is not self._kept]
        else:
            self._lose()
        self._gathered.clear()

    def recover(self) -> None:
        """Make up for a forward or backward that ended in an exception which the script caught.

        After a backward's, the others get what they still wait for, zeros, and every rank loses the gradients of that
        backward (``.grad`` is None). Does nothing where none did. Raises GradwireError if no earlier backward says what to
        make up.
        """
        phase, self._phase = self._phase, "idle"
        if phase == "idle":
            return
        like_before = self._gathered == self._planned[: len(self._gathered)]
        made_up = phase == "backward" and like_before and self._gradients.make_up()
        rest = self._planned[len(self._gathered) :] if made_up else []
        _fsdp(self._model).reset_iter_state()
        for unit in rest:
            _fsdp(unit.modules[0]).unshard()
            _fsdp(unit.modules[0]).reshard()
        if made_up:
            self._gradients.finish(failed=True)
        self._gathered.clear()
        self._lose()

    def _lose(self) -> None:
        self._gradients.lose()
        for whole in self._unsharded.values():
            whole.grad = None  # FSDP2 forgets these when it is reset, and would add to them

    # --- who is told -------------------------------------------------------------------------------------------------

    def hooks(
        self,
        params: Sequence[nn.Parameter],
        *,
        before: Callable[[int], None],
        after: Callable[[int], None],
        scale: Callable[[], float],
    ) -> Hooks:
        """Tell of gradients as `sync/autograd.py` does, by their index in ``params``.

        In every backward ``before(index)`` comes for each parameter of a unit right before its reduce-scatter begins; the unit's
        gradient is multiplied by ``scale()`` (0 makes zeros, also of NaN) and summed over the ranks; ``after(index)`` when
        ``param.grad`` is that sum, of this rank's rows, deferred so that the next unit's backward runs beside it. A parameter
        that has a gradient on no rank gets no ``after``. Both are called on the thread that runs backward.
        """
        index = {param: number for number, param in enumerate(params)}
        missing = [unit.name for unit in self._units if not set(unit.trainable) <= index.keys()]
        if missing:
            raise UsageError(
                f"hooks got not all trainable parameters of {missing[0] or 'the model'}; give the sharded ones"
            )
        self._gradients.listener = Listener(
            before=lambda param: before(index[param]), after=lambda param: after(index[param]), scale=scale
        )
        return Hooks(self, frozenset(range(len(params))))

    def unhook(self) -> None:
        """Nobody is told any more."""
        self._gradients.listener = SILENT

    def close(self) -> None:
        """Tell nobody, and stop noticing exceptions. The model stays sharded: FSDP2 cannot be undone."""
        self.unhook()
        for handle in self._handles:
            handle.remove()


class Hooks:
    """What `GradientSync` holds of a sharded model. weighed: all, since scalars too are summed here."""

    def __init__(self, shard: FullShard, weighed: frozenset[int]) -> None:
        self._shard = shard
        self.weighed = weighed

    def settle(self) -> None:
        """See `FullShard.settle`."""
        self._shard.settle()

    def abandon(self) -> None:
        """See `FullShard.recover`."""
        self._shard.recover()

    def close(self) -> None:
        """Nobody is told any more."""
        self._shard.unhook()


def _fsdp(module: nn.Module) -> FSDPModule:
    return cast("FSDPModule", module)


def _tensors(output: object) -> Iterable[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from (found for each in cast("Mapping[Any, object]", output).values() for found in _tensors(each))
    elif isinstance(output, list | tuple):
        yield from (found for each in cast("Sequence[object]", output) for found in _tensors(each))


def _refuse(model: nn.Module, names: Mapping[int, str]) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            raise UsageError(
                f"{names[id(module)] or 'the model'} is sharded already; build the model anew to shard it again"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(f"{names[id(module)]} has sparse gradients, which cannot be sharded; use sparse=False")


def _refuse_mixed(unit: str, slots: Sequence[Slot]) -> None:
    dtypes = {param.dtype: f"{unit}.{name}" for _, name, param in slots if param.requires_grad}
    if len(dtypes) > 1:
        words = " and ".join(f"{name} ({dtype})" for dtype, name in dtypes.items())
        raise UsageError(f"{words} would be sharded together; give the model one dtype, model.to(torch.float32)")


def _in_backward() -> bool:
    """Whether this runs inside autograd, as a checkpoint's second forward does; FSDP2 asks in the same way."""
    task = getattr(torch._C, "_current_graph_task_id", None)  # pyright: ignore  # no public name
    return task is not None and task() != -1
