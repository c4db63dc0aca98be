"""What travels between tensor parallel ranks, and what travels back in backward.

A *whole* tensor is the same on all ranks, and so is its gradient. A *part* is one rank's piece along one dimension.
"""

# autograd.Function's stubs say nothing about forward and backward
# pyright: reportIncompatibleMethodOverride=false
# ruff: noqa: ANN401

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Segments = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Ranks:
    """The tensor parallel ranks that share a model, and this one's place among them."""

    mesh: DeviceMesh
    group: dist.ProcessGroup
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Ranks:
        """mesh: one dimension of a device mesh, e.g. ``world.torch_mesh()["tensor"]``."""
        return cls(mesh, mesh.get_group(), mesh.size(), mesh.get_local_rank())

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks, on all of them; a new tensor."""
        whole = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=self.group)
        return whole

    def largest(self, value: Tensor) -> Tensor:
        """The largest over ranks, entry by entry; a new tensor."""
        whole = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=self.group)
        return whole

    def collect(self, part: Tensor) -> list[Tensor]:
        """Every rank's part, in rank order."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return parts

    def swap(self, rows: Tensor) -> Tensor:
        """rows: (size, ...), one for each rank; returns what each rank sent here."""
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self.group)
        return received


def my_share(whole: Tensor, dim: int, segments: Segments, ranks: Ranks) -> Tensor:
    """This rank's piece: its 1/n of every segment of ``dim``."""
    pieces: list[Tensor] = []
    start = 0
    for length in segments:
        share = length // ranks.size
        pieces.append(whole.narrow(dim, start + ranks.rank * share, share))
        start += length
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def join(parts: Sequence[Tensor], dim: int, segments: Segments) -> Tensor:
    """The whole, from every rank's piece in rank order."""
    if len(segments) == 1:
        return torch.cat(list(parts), dim)
    shares = [length // len(parts) for length in segments]
    pieces = [part.split(shares, dim) for part in parts]
    return torch.cat([piece[segment] for segment in range(len(segments)) for piece in pieces], dim)


class _Enter(Function):
    """A whole tensor is used in work on parts: each rank's gradient is a summand."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ranks.total(grads[0]), None


class _Leave(Function):
    """Every rank holds a summand of the whole."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, ranks: Ranks) -> Tensor:
        return ranks.total(summand)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _Take(Function):
    """This rank's piece of a whole tensor."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, segments: Segments, ranks: Ranks) -> Tensor:
        ctx.place = (dim, segments, ranks)
        return my_share(whole, dim, segments, ranks).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dim, segments, ranks = ctx.place
        return join(ranks.collect(grads[0]), dim, segments), None, None, None


class _Gather(Function):
    """The whole tensor, from all pieces; what follows is the same on all ranks, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, segments: Segments, ranks: Ranks) -> Tensor:
        ctx.place = (dim, segments, ranks)
        return join(ranks.collect(part), dim, segments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return my_share(grads[0], *ctx.place).contiguous(), None, None, None


class _MoveRows(Function):
    """From equal runs of rows to each rank's 1/n of every segment of rows; backward moves them home."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, segments: Segments, ranks: Ranks) -> Tensor:
        ctx.place = (segments, ranks)
        return _move(rows, (sum(segments),), segments, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        segments, ranks = ctx.place
        return _move(grads[0], segments, (sum(segments),), ranks), None, None


def enter(whole: Tensor, ranks: Ranks) -> Tensor:
    """A whole tensor as an input of work on parts; backward sums over ranks."""
    return cast("Tensor", _Enter.apply(whole, ranks)) if whole.requires_grad else whole


def leave(summand: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks; backward gives each summand the whole gradient."""
    return cast("Tensor", _Leave.apply(summand, ranks))


def take(whole: Tensor, dim: int, segments: Segments, ranks: Ranks) -> Tensor:
    """This rank's piece of a whole tensor; backward gathers the pieces' gradients."""
    if not whole.requires_grad:
        return my_share(whole, dim, segments, ranks)
    return cast("Tensor", _Take.apply(whole, dim, segments, ranks))


def gather(part: Tensor, dim: int, segments: Segments, ranks: Ranks) -> Tensor:
    """The whole tensor; backward cuts this rank's piece out of the gradient."""
    return cast("Tensor", _Gather.apply(part, dim, segments, ranks))


def move_rows(rows: Tensor, segments: Segments, ranks: Ranks) -> Tensor:
    """rows: (R/n, ...), run r of n equal runs. Returns (R/n, ...): this rank's 1/n of every segment of the R rows.

    A fused projection is stored in the user's order, cut in equal runs, so that it stays a plain ``Shard(0)`` for FSDP2
    and for checkpoints; what its heads need is moved in forward: at most R/n rows a rank.
    """
    if len(segments) == 1:
        return rows
    return cast("Tensor", _MoveRows.apply(rows, segments, ranks))


def _move(rows: Tensor, have: Segments, want: Segments, ranks: Ranks) -> Tensor:
    keep, sends, width = _routes(have, want, ranks.size, ranks.rank)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    source, target = keep
    out[target] = rows[source]
    if not width:
        return out
    buffer = rows.new_zeros(ranks.size, width, *rows.shape[1:])
    for peer, (source, _) in enumerate(sends):
        buffer[peer, : len(source)] = rows[source]
    received = ranks.swap(buffer)
    for peer, (_, target) in enumerate(sends):
        out[target] = received[peer, : len(target)]
    return out


@lru_cache(maxsize=256)
def _routes(
    have: Segments, want: Segments, size: int, rank: int
) -> tuple[tuple[Tensor, Tensor], list[tuple[Tensor, Tensor]], int]:
    """(rows that stay: from, to), for each peer (rows it gets from here, places of what it sends), the longest message."""
    owned = [_rows_of(have, size, r) for r in range(size)]
    wanted = [_rows_of(want, size, r) for r in range(size)]

    def message(src: int, dst: int) -> tuple[list[int], list[int]]:
        at = {row: place for place, row in enumerate(owned[src])}
        pairs = [(at[row], place) for place, row in enumerate(wanted[dst]) if row in at]
        return [a for a, _ in pairs], [b for _, b in pairs]

    messages = {(a, b): message(a, b) for a in range(size) for b in range(size)}
    width = max((len(rows) for (a, b), (rows, _) in messages.items() if a != b), default=0)
    none = torch.empty(0, dtype=torch.long)
    sends = [
        (torch.tensor(messages[rank, peer][0]), torch.tensor(messages[peer, rank][1])) if peer != rank else (none, none)
        for peer in range(size)
    ]
    stay = messages[rank, rank]
    as_long = [(a.long(), b.long()) for a, b in sends]
    return (torch.tensor(stay[0]).long(), torch.tensor(stay[1]).long()), as_long, width


def _rows_of(segments: Segments, size: int, rank: int) -> list[int]:
    rows: list[int] = []
    start = 0
    for length in segments:
        share = length // size
        rows += range(start + rank * share, start + (rank + 1) * share)
        start += length
    return rows
