"""The exact reducers: `AllReduce` for dense buckets, a gather of rows for sparse gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.group import Group
from gradwire.core.reducer import Bucket, Link, State


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """The exact mean: 2(n-1)/n x 4 bytes per float32 parameter, sent and received.

    On CPU with three or more ranks the sum is taken in rank order (an all-to-all, a local sum and an all-gather: the
    bytes of a ring), so that its bits do not depend on how the parameters were bucketed. Two ranks need no order.
    """

    def init(self, bucket: Bucket, group: Group) -> State:
        return {}

    def reduce(self, bucket: Bucket, state: State, group: Group, step: int) -> tuple[Tensor, State]:
        if self.plain(group) or bucket.flat.is_cuda:
            return group.all_reduce(bucket.flat), state
        return ordered_sum(bucket.flat, group), state

    def plain(self, group: Group) -> bool:
        return group.size < 3

    def cost(self, numel: int, link: Link) -> float:
        return link.latency_s + link.ring_factor * 4 * numel / link.bandwidth_bytes_per_s

    def words(self) -> str:
        return "exact all-reduce"


def ordered_sum(flat: Tensor, group: Group) -> Tensor:
    """Sum ``flat`` (numel,) over the ranks in rank order; returns it (numel,), a new tensor if it had to be padded."""
    share = -(-flat.numel() // group.size)
    padded = torch.nn.functional.pad(flat, (0, share * group.size - flat.numel()))
    total = group.reduce_scatter(padded.view(group.size, share))
    return group.all_gather(total).view(-1)[: flat.numel()]


def sum_sparse(grad: Tensor | None, like: Tensor, group: Group) -> Tensor:
    """Sum sparse COO gradients over the ranks by gathering their rows.

    grad: sparse (*shape) or None for no rows. like: the parameter (*shape), dense. Returns coalesced sparse (*shape), the
    same on all ranks. Sends (n-1) x rows x (8 + row bytes), so it pays while a batch touches few rows.
    """
    empty = torch.sparse_coo_tensor(
        torch.zeros((1, 0), dtype=torch.int64, device=like.device),
        like.new_zeros((0, *like.shape[1:])),
        like.shape,
        check_invariants=False,
    )
    mine = empty if grad is None else grad.coalesce()
    rows, values = mine.indices()[0], mine.values()
    counts = group.all_gather(torch.tensor([rows.numel()], device=like.device)).flatten().tolist()
    longest = max(counts)
    all_rows = group.all_gather(torch.nn.functional.pad(rows, (0, longest - rows.numel())))
    padding = values.new_zeros((longest - values.shape[0], *values.shape[1:]))
    all_values = group.all_gather(torch.cat([values, padding]))
    kept_rows = torch.cat([row[:count] for row, count in zip(all_rows, counts, strict=True)])
    kept_values = torch.cat([value[:count] for value, count in zip(all_values, counts, strict=True)])
    return torch.sparse_coo_tensor(kept_rows.unsqueeze(0), kept_values, like.shape, check_invariants=False).coalesce()
