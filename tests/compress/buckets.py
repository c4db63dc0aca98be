"""Buckets, and a group that counts what it sends."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.core.group import Group
from gradwire.core.reducer import Bucket, Piece


def bucket_of(flat: Tensor, *shapes: tuple[int, ...], index: int = 0) -> Bucket:
    pieces: list[Piece] = []
    for shape in shapes or (tuple(flat.shape),):
        offset = pieces[-1].offset + pieces[-1].numel if pieces else 0
        pieces.append(Piece(name=f"p{len(pieces)}", shape=shape, offset=offset))
    return Bucket(index=index, flat=flat, pieces=tuple(pieces))


def normal(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


class CountingGroup:
    """Counts the bytes that a bandwidth-optimal collective sends from one rank."""

    def __init__(self, inner: Group) -> None:
        self.inner = inner
        self.size, self.rank, self.name = inner.size, inner.rank, inner.name
        self.sums_in_rank_order, self.levels = inner.sums_in_rank_order, inner.levels
        self.sent = 0.0
        self.calls: list[str] = []

    def _count(self, name: str, tensor: Tensor, times: float) -> None:
        self.calls.append(name)
        self.sent += tensor.numel() * tensor.element_size() * times

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        self._count("all_reduce", tensor, 2 * (self.size - 1) / self.size)
        return self.inner.all_reduce(tensor, op)

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._count("all_gather", tensor, self.size - 1)
        return self.inner.all_gather(tensor)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        self._count("all_to_all", tensor, (self.size - 1) / self.size)
        return self.inner.all_to_all(tensor)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        self._count("reduce_scatter", tensor, (self.size - 1) / self.size)
        return self.inner.reduce_scatter(tensor)
