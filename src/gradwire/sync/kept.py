"""`Distributed`: what `distribute` set up, to be kept and given back; the form it is kept in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn

from gradwire.comm.dtensor import local_of
from gradwire.errors import MismatchError, UsageError

if TYPE_CHECKING:
    from gradwire.comm.world import World
    from gradwire.sync.gradients import GradientSync
    from gradwire.sync.loading import Loading
    from gradwire.sync.parameters import ParameterSync
    from gradwire.sync.steps import StepHooks


class PendingState(TypedDict):
    """An agreed gradient that no step has used yet."""

    used: list[bool]
    rows: dict[int, Tensor]
    flats: list[Tensor]


class WindowState(TypedDict):
    """What one rank has put into a window that is still open; by parameter index."""

    count: float
    unit: float
    relative: bool
    closed: bool
    dense: dict[int, Tensor]
    rows: dict[int, Tensor]


class GradientState(TypedDict):
    """What one rank keeps of its `GradientSync`."""

    steps: int
    exchanges: int
    bucket_bytes: int
    exchange_step: int
    reducers: list[dict[str, Tensor]]
    pending: list[PendingState]
    window: WindowState


class FragmentState(TypedDict):
    """What one rank keeps of one fragment of its `ParameterSync`."""

    anchors: list[Tensor]
    velocities: list[Tensor]
    own: list[Tensor]
    count: float
    step: int
    reducers: list[dict[str, Tensor]]


class SyncState(TypedDict):
    """What one rank keeps of how it was synchronised. Tensors, numbers and texts only: ``torch.load`` reads it safely."""

    sync: str
    parameters: list[str]
    rank: int
    world_size: int
    gradients: GradientState
    fragments: list[FragmentState]


@torch.no_grad()
def take_mean(params: Sequence[Tensor], owns: Sequence[Sequence[Tensor]]) -> None:
    """The parameters become the mean of the ranks' own."""
    for index, param in enumerate(params):
        param.copy_(torch.stack([own[index].double() for own in owns]).mean(0))


class Distributed:
    """A distributed model, as ``gw.distribute`` returns it. Only needed to save, to resume, and to agree before the time.

    The model's and the optimizer's own ``state_dict`` hold the weights and moments. What a lossy or a local plan remembers
    besides (residuals, outer momentum, the parameters agreed last) is here.
    """

    def __init__(
        self,
        world: World,
        *,
        params: Sequence[tuple[str, nn.Parameter]],
        sync: str,
        gradients: GradientSync,
        parameters: ParameterSync | None,
        steps: StepHooks,
        loading: Loading,
    ) -> None:
        self._world = world
        self._names = [name for name, _ in params]
        self._params = [param for _, param in params]
        self._sync = sync
        self._gradients = gradients
        self._parameters = parameters
        self._steps = steps
        self._loading = loading

    def agree(self) -> None:
        """Agree on parameters and buffers now, so that all ranks hold the same: before the weights are saved or tested.

        Call it on all ranks, between ``optimizer.step()`` and the next backward. Under ``local`` it is one more agreement, early;
        elsewhere parameters are the same already. It does not average the optimizers' states.

        >>> import torch
        >>> import gradwire as gw
        >>> with gw.init():
        ...     model = torch.nn.Linear(2, 1)
        ...     gw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), sync="local:every=8").agree()
        """
        self._steps.agree()

    def state_dict(self) -> SyncState:
        """This rank's part; save each rank's. Call it on all ranks, between ``optimizer.step()`` and the next backward.

        What is on its way under ``late`` is taken now, which moves the parameters: save the model's own state after it.

        >>> import torch
        >>> import gradwire as gw
        >>> with gw.init():
        ...     model = torch.nn.Linear(2, 1)
        ...     training = gw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ...     training.load_state_dict(training.state_dict())
        """
        self._steps.finish()
        return SyncState(
            sync=self._sync,
            parameters=self._names,
            rank=self._world.reader_rank,
            world_size=self._world.num_readers,
            gradients=self._gradients.state_dict(),
            fragments=self._parameters.state_dict() if self._parameters else [],
        )

    def load_state_dict(self, *states: SyncState) -> None:
        """Go on from there: after ``gw.distribute`` and after the model's and the optimizer's own ``load_state_dict``.

        states: this rank's own, where the world has the size that it had: it then goes on with the same bits. Or the states of
        all ranks of an earlier world, of any size, in any order: what had still to be sent is shared out. One rank alone has
        nobody to send to: residuals, outer momentum and a delayed gradient end there; ``local`` goes on from the ranks' mean.
        Raises MismatchError for another model or another ``sync``, UsageError if states are missing.
        """
        worlds = self._checked(states)
        size = self._world.num_readers
        same = None
        if worlds[0]["world_size"] == size:
            same = next((place for place, each in enumerate(worlds) if each["rank"] == self._world.reader_rank), None)
            if same is None:
                raise UsageError(
                    f"load_state_dict: rank {self._world.reader_rank}'s own state is not among those given"
                )
        self._gradients.load([each["gradients"] for each in worlds], same=same)
        fragments = [each["fragments"] for each in worlds]
        if self._parameters is not None:
            self._parameters.load(fragments, same=same)
        elif same is None and any(fragments):  # registration order: a fragment is consecutive parameters
            take_mean(
                [local_of(param) for param in self._params],
                [[own for fragment in rank for own in fragment["own"]] for rank in fragments],
            )
        self._loading.resumed()

    def _checked(self, states: Sequence[SyncState]) -> list[SyncState]:
        if not states:
            raise UsageError("load_state_dict: no state given; give this rank's own, or those of all ranks")
        for state in states:
            _require_state(state)
            if state["sync"] != self._sync:
                raise MismatchError(f"the state was kept under sync {state['sync']}, this plan says {self._sync}")
            if state["parameters"] != self._names:
                raise MismatchError("the state was kept for a model with other parameters; give the same model")
        worlds = sorted(states, key=lambda state: state["rank"])
        size = worlds[0]["world_size"]
        if size != self._world.num_readers and [each["rank"] for each in worlds] != list(range(size)):
            raise UsageError(
                f"load_state_dict: {len(worlds)} states of a world of {size} given, this one has "
                f"{self._world.num_readers} ranks; give the states of all {size} ranks"
            )
        return worlds


def _require_state(state: object) -> None:
    names = set(SyncState.__annotations__)
    found = set(state) if isinstance(state, Mapping) else set[str]()
    if not names <= found:
        missing = ", ".join(sorted(names - found))
        raise UsageError(
            f"load_state_dict: this is not what state_dict() of gw.distribute's result gave (it lacks {missing}); the "
            "model's and the optimizer's states go to their own load_state_dict"
        )
