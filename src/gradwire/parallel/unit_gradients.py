"""The gradients of sharded units in one backward: weighted, summed over the ranks beside compute, delivered in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradwire.comm.lane import Lane
from gradwire.core.group import Group
from gradwire.errors import GradwireError, MismatchError
from gradwire.parallel.collectives import Sent, scatter_sum

IN_FLIGHT = 2  # reduce-scatters at a time: one on the wire, one ready; each keeps a unit's whole gradients in memory


@dataclass(eq=False, kw_only=True)
class Unit:
    """Modules whose parameters are gathered and whose gradients are reduced together.

    name: of its first module in the model. params: all ranks' parameters, this rank's rows. calls: how often it ran in
    the last forward. views: whether its gradients were seen to be views of the reduce-scatter's output. whole: the rows of
    its last reduce-scatter (numel, dtype, device).
    """

    name: str
    modules: tuple[nn.Module, ...]
    params: list[nn.Parameter] = field(default_factory=list[nn.Parameter])
    calls: int = 0
    views: bool = False
    whole: tuple[int, torch.dtype, torch.device] | None = None

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Those that get a gradient."""
        return [param for param in self.params if param.requires_grad]


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Who is told of gradients: see `FullShard.hooks`."""

    before: Callable[[nn.Parameter], None]
    after: Callable[[nn.Parameter], None]
    scale: Callable[[], float]


SILENT = Listener(before=lambda _: None, after=lambda _: None, scale=lambda: 1.0)


class UnitGradients:
    """What a backward has reduced so far, and for whom.

    plain: parameters that every rank holds whole (scalars); their gradients are summed at the end of backward, with the word
    on who has a gradient at all: FSDP2 reduces zeros where a parameter has none.
    """

    def __init__(self, units: list[Unit], plain: list[nn.Parameter], group: Group, lane: Lane) -> None:
        self._units = units
        self._plain = plain
        self._group = group
        self._lane = lane
        self.listener = SILENT
        self._flying: deque[tuple[Unit, Sent, Tensor]] = deque()
        self._late: list[tuple[Unit, Sent, Tensor]] = []
        self._used: set[nn.Parameter] = set()
        self._added: set[nn.Parameter] = set()  # had a gradient before, which torch adds to
        self._told: set[nn.Parameter] = set()
        self._held: dict[nn.Parameter, Tensor | None] = {}
        self.order: list[Unit] = []
        self.planned: list[Unit] = []

    def used(self, param: nn.Parameter) -> None:
        """This rank has a gradient for it in this backward."""
        self._used.add(param)

    def hold(self, param: nn.Parameter) -> None:
        """A plain parameter gets its gradient now: what it had is put aside until the end."""
        if param not in self._held:
            self._held[param], param.grad = param.grad, None

    # --- a unit ------------------------------------------------------------------------------------------------------

    def reduce(self, unit: Unit, output: Tensor, rows: Tensor) -> None:
        """Give a unit's reduce-scatter to the lane; deliver an earlier one. Waits where torch reads ``output`` at once."""
        again = unit in self.order
        self.order.append(unit)
        unit.whole = (rows.numel(), rows.dtype, rows.device)
        if not again:
            for param in unit.trainable:
                self._begin(param)
        elif not self._told.isdisjoint(unit.params):
            raise GradwireError(
                f"{unit.name} got a second gradient in one backward after the first was delivered; for reentrant checkpoints: "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        while len(self._flying) >= IN_FLIGHT:
            self._deliver(*self._flying.popleft())
        scale = self.listener.scale()
        sent = Sent(self._lane, lambda: scatter_sum(self._group, output, rows, scale))
        if again or not unit.views or not self._added.isdisjoint(unit.params):
            sent.wait()
        if again:
            return
        (self._late if unit.calls > 1 else self._flying).append((unit, sent, output))

    def _begin(self, param: nn.Parameter) -> None:
        self.listener.before(param)
        if param.grad is not None:
            self._added.add(param)

    def _deliver(self, unit: Unit, sent: Sent, output: Tensor) -> None:
        sent.wait()
        if self._added.isdisjoint(unit.params):
            unit.views = all(_is_view(param.grad, output) for param in unit.trainable)
        for param in unit.trainable:
            if param in self._used:
                self._tell(param)

    def _tell(self, param: nn.Parameter) -> None:
        self._told.add(param)
        self.listener.after(param)

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(self, *, failed: bool = False) -> bool:
        """Deliver what is left. Returns whether every rank came this far, without an exception on its way.

        Raises MismatchError on all ranks if they reduced different units.
        """
        trainable = [param for unit in self._units for param in unit.trainable]
        fresh = {} if failed else self._take_plain()
        message = self._message(trainable, fresh, failed=failed)
        mine = message.clone()
        Sent(self._lane, lambda: self._group.all_reduce(message)).wait()
        going_well = not float(message[0])
        if going_well and float(message[1]) != float(mine[1]) * self._group.size:
            words = ", ".join(unit.name or "the rest" for unit in self.order) or "none"
            self.forget()
            raise MismatchError(
                f"rank {self._group.rank} of {self._group.name} ran the parts {words} of the model backward, another rank "
                "others; the ranks along shard must run the same modules in the same order"
            )
        if going_well:
            for flying in (*self._flying, *self._late):
                self._deliver(*flying)
            self._finish_units(trainable, message[2:])
            self._finish_plain(message[2 + len(trainable) :])
            self.planned = self.order
        self.forget()
        return going_well

    def _take_plain(self) -> dict[nn.Parameter, Tensor]:
        fresh: dict[nn.Parameter, Tensor] = {}
        for param, held in self._held.items():
            if param.grad is not None:
                fresh[param] = param.grad
            param.grad = held
            self._begin(param)
        return fresh

    def _message(self, trainable: list[nn.Parameter], fresh: dict[nn.Parameter, Tensor], *, failed: bool) -> Tensor:
        """[failed, order, has a gradient for each of ``trainable``, for each plain one, their gradients] (float64)."""
        order = float(crc32(",".join(str(self._units.index(unit)) for unit in self.order).encode()))
        flags = [param in self._used for param in trainable] + [param in fresh for param in self._plain]
        scale = self.listener.scale() if fresh else 0.0
        values = [float(fresh[param]) * scale if scale and param in fresh else 0.0 for param in self._plain]
        device = trainable[0].device if trainable else torch.device("cpu")
        return torch.tensor([float(failed), order, *map(float, flags), *values], dtype=torch.float64, device=device)

    def _finish_units(self, trainable: list[nn.Parameter], counts: Tensor) -> None:
        for param, count in zip(trainable, counts.tolist(), strict=False):
            if count and param not in self._told:
                self._tell(param)
            elif not count and param not in self._added:
                param.grad = None  # zeros that FSDP2 reduced for a parameter nobody used

    def _finish_plain(self, rest: Tensor) -> None:
        counts, totals = rest.view(2, len(self._plain))
        for param, count, total in zip(self._plain, counts, totals, strict=True):
            if not float(count):
                continue
            if param not in self._held:
                self._begin(param)
            grad = total.to(param.dtype).view_as(param).clone()
            param.grad = grad if param.grad is None else param.grad + grad
            self._tell(param)

    def forget(self) -> None:
        """The next backward begins anew."""
        self._flying.clear()
        self._late.clear()
        self._used.clear()
        self._added.clear()
        self._told.clear()
        self._held.clear()
        self.order = []

    def lose(self) -> None:
        """Nobody has a gradient any more."""
        self.forget()
        for param in (*(param for unit in self._units for param in unit.params), *self._plain):
            param.grad = None

    # --- an exception ------------------------------------------------------------------------------------------------

    def make_up(self) -> bool:
        """Give the lane the reduce-scatters that the others still wait for, with zeros: as in the last backward.

        Returns whether this backward began like that one.
        """
        rest = self.planned[len(self.order) :]
        if self.planned[: len(self.order)] != self.order or any(unit.whole is None for unit in rest):
            return False
        for unit in rest:
            self._lane.submit(partial(self._reduce_zeros, unit))
        self.order = self.planned
        return True

    def _reduce_zeros(self, unit: Unit) -> None:
        if unit.whole is not None:
            numel, dtype, device = unit.whole
            self._group.reduce_scatter(torch.zeros(numel, dtype=dtype, device=device).view(self._group.size, -1))


def _is_view(grad: Tensor | None, output: Tensor) -> bool:
    if not isinstance(grad, DTensor):
        return False
    mine = grad.to_local()
    return not mine.numel() or mine.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
