"""FSDP2's all-gather and reduce-scatter on our lanes, so that they run beside compute.

On CPU torch waits for every collective of FSDP2. Its ``set_custom_all_gather`` and ``set_custom_reduce_scatter`` are public,
and this file relies on how torch 2.13 uses them:

1. The all-gather may return a ``dist.Work``, which FSDP2 waits for only when it needs the parameters; the output is the very
   tensor that it passed. `FullShard` gathers one unit at start and compares.
2. The reduce-scatter's return value is ignored, and without a division or a cast the sharded gradients are *views* of its
   output, so it may be filled later - except where a gradient is added to one that is there already.
   `Scatter` waits for the first one of every unit and looks whether the gradients are views of it; if not, it always waits.
3. ``allocate`` is called for outputs and inputs, and may give any memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm.lane import Lane
from gradwire.core.group import Group


class Sent:
    """A task that a lane runs beside this thread."""

    def __init__(self, lane: Lane, task: Callable[[], object]) -> None:
        lane.submit(task)
        self._wait: Callable[[], None] | None = lane.marker()

    def wait(self) -> None:
        """Return when it has ended; raises what it raised."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


class _Work(dist.Work):
    """What FSDP2 waits for."""

    def __init__(self, sent: Sent, waited: Callable[[], None]) -> None:
        super().__init__()
        self._sent = sent
        self._waited = waited

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._sent.wait()
        self._waited()
        return True


class _Allocates:
    """torch's interface for where a collective's tensors are made."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Allocates):
    """One unit's all-gather: begun when FSDP2 asks for it, waited for when the unit runs.

    began: called with every one that begins. ``underway``: whether one has begun that nobody has waited for.
    """

    def __init__(self, group: Group, lane: Lane, began: Callable[[], None]) -> None:
        self._group = group
        self._lane = lane
        self._began = began
        self.underway = False

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work:
        self._began()
        self.underway = True
        return _Work(Sent(self._lane, lambda: _gather(self._group, output_tensor, input_tensor)), self._ended)

    def _ended(self) -> None:
        self.underway = False


class Scatter(_Allocates):
    """One unit's reduce-scatter: hands (output, rows) to ``reduce``. Always the sum, whatever torch asks for.

    output: (numel,). rows: (size * numel,), row r is for rank r.
    """

    def __init__(self, reduce: Callable[[Tensor, Tensor], None]) -> None:
        self._reduce = reduce

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        self._reduce(output_tensor, input_tensor)


def _gather(group: Group, output: Tensor, mine: Tensor) -> None:
    with torch.inference_mode() if output.is_inference() else nullcontext():
        output.set_(group.all_gather(mine).view(-1))  # takes the gathered memory over; a copy would be a pass more  # pyright: ignore[reportArgumentType]  # the stub knows storages only


def scatter_sum(group: Group, output: Tensor, rows: Tensor, scale: float) -> None:
    """``output`` (numel,) becomes this rank's row of the sum over the ranks of ``scale`` times ``rows`` (size * numel,)."""
    if scale == 0.0:
        rows.zero_()  # 0 times NaN is NaN
    elif scale != 1.0:
        rows.mul_(scale)
    output.copy_(group.reduce_scatter(rows.view(group.size, -1)))
