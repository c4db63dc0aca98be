"""`Stage`: memory of a fixed size through which the ranks of a host show one another tensors, a piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

from gradwire.comm.arrivals import Arrivals
from gradwire.core.group import Op

STAGE_BYTES = 512 << 10  # of one rank and turn: what was written is still in a second-level cache when it is read
_WHOLE_BYTES = 64 << 10  # up to here every rank sums everything, which saves waiting for one another once
_TWO = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class Stage:
    """Collectives on tensors that are not empty, by copying them in and out. Sums are in rank order.

    The stage has two turns: a rank that has come to turn k + 1 has left turn k, so that the ranks wait for one another once
    a piece. memory: (2, size, STAGE_BYTES) uint8, nothing before it in its storage. arrivals, kind: with which they wait.
    """

    def __init__(self, memory: Tensor, arrivals: Arrivals, kind: int, *, rank: int, size: int) -> None:
        self._memory = {memory.dtype: memory}  # of every dtype, as views
        self._arrivals = arrivals
        self._kind = kind
        self._rank = rank
        self._size = size
        self._turn = 0

    def _show(self, part: Tensor, *, give: bool = True) -> Tensor:
        """``part`` (*shape), one or two dims and at most STAGE_BYTES, of every rank.

        Returns (size, *shape), to be read before the next call.
        """
        if part.dtype not in self._memory:
            self._memory[part.dtype] = self._memory[torch.uint8].view(part.dtype)
        self._turn ^= 1
        row = STAGE_BYTES // part.itemsize
        strides = (row, 1) if part.dim() == 1 else (row, part.shape[1], 1)  # one call: a small one costs mostly views
        slots = self._memory[part.dtype].as_strided((self._size, *part.shape), strides, self._turn * self._size * row)
        if give:
            slots[self._rank].copy_(part)
        self._meet()
        return slots

    def _meet(self) -> None:
        self._arrivals.wait(self._kind, self._arrivals.post(self._kind))

    def all_reduce(self, flat: Tensor, op: Op) -> None:
        """In place; flat: (numel,)."""
        whole = flat.nbytes <= _WHOLE_BYTES or self._size <= 3
        for part in flat.split(STAGE_BYTES // flat.itemsize):
            rows = self._show(part)
            if whole:
                combine(rows.unbind(), op, out=part)
            else:
                self._reduce_shares(rows, op, out=part)

    def _reduce_shares(self, rows: Tensor, op: Op, *, out: Tensor) -> None:
        """Every rank reduces its share into its own row, where nobody else reads that share before all have written."""
        shares = [share_of(out, rank, self._size) for rank in range(self._size)]
        mine = shares[self._rank]
        combine(rows[:, mine].unbind(), op, out=out[mine])
        rows[self._rank, mine] = out[mine]
        self._meet()
        for row, share in zip(rows, shares, strict=True):
            out[share] = row[share]

    def reduce_scatter(self, rows: Tensor, out: Tensor) -> None:
        """rows: (size, numel). out: (numel,), the sum of all ranks' rows for this one."""
        width = STAGE_BYTES // rows.itemsize // self._size
        for part, total in zip(rows.split(width, 1), out.split(width), strict=True):
            combine(self._show(part)[:, self._rank].unbind(), "sum", out=total)

    def all_gather(self, data: Tensor, out: Tensor) -> None:
        """data: (numel,). out: (size, numel)."""
        width = STAGE_BYTES // data.itemsize
        for part, rows in zip(data.split(width), out.split(width, 1), strict=True):
            rows.copy_(self._show(part))

    def all_to_all(self, rows: Tensor, out: Tensor) -> None:
        """Both (size, numel)."""
        width = STAGE_BYTES // rows.itemsize // self._size
        for part, received in zip(rows.split(width, 1), out.split(width, 1), strict=True):
            received.copy_(self._show(part)[:, self._rank])

    def broadcast(self, data: Tensor, src: int) -> None:
        """In place; data: (numel,)."""
        for part in data.split(STAGE_BYTES // data.itemsize):
            slots = self._show(part, give=self._rank == src)
            if self._rank != src:
                part.copy_(slots[src])


def share_of(flat: Tensor, rank: int, size: int) -> slice:
    """Rank ``rank``'s part of ``flat`` (numel,), on whole cache lines, so that no two ranks write the same one."""
    numel, line = flat.numel(), 64 // flat.itemsize
    share = ceil(ceil(numel / size) / line) * line
    return slice(min(rank * share, numel), min((rank + 1) * share, numel))


def combine(parts: Sequence[Tensor], op: Op, *, out: Tensor) -> None:
    """Into ``out``, in the order of the ranks; ``out`` may be one of the first two parts."""
    two = _TWO[op]
    two(parts[0], parts[1], out=out)
    for part in parts[2:]:
        two(out, part, out=out)
