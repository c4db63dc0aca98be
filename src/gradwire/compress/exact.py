"""`AllReduce`: the exact reducer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.group import Group
from gradwire.core.reducer import Bucket, Link, Reducer, State


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """The exact mean: 2(n-1)/n x 4 bytes per float32 parameter, sent and received.

    On CPU with three or more ranks the sum is taken in rank order (an all-to-all, a local sum and an all-gather: the
    bytes of a ring), so that its bits do not depend on how the parameters were bucketed. Two ranks need no order.
    """

    def choose(self, name: str, shape: tuple[int, ...]) -> Reducer:
        return self

    def init(self, bucket: Bucket, group: Group) -> State:
        return {}

    def reduce(self, bucket: Bucket, state: State, group: Group, step: int) -> tuple[Tensor, State]:
        if self.plain(group) or bucket.flat.is_cuda:
            return group.all_reduce(bucket.flat), state
        return ordered_sum(bucket.flat, group), state

    def resplit(self, states: Sequence[State], bucket: Bucket, group: Group) -> State:
        return {}

    def plain(self, group: Group) -> bool:
        return group.sums_in_rank_order

    def sent_bytes(self, numel: int, num_ranks: int) -> float:
        return 4 * numel * 2 * (num_ranks - 1) / num_ranks

    def cost(self, numel: int, link: Link) -> float:
        return link.seconds(self.sent_bytes(numel, link.num_ranks))

    def words(self) -> str:
        return "exact all-reduce"


def ordered_sum(flat: Tensor, group: Group) -> Tensor:
    """Sum ``flat`` (numel,) over the ranks in rank order; returns it (numel,), a new tensor if it had to be padded."""
    share = -(-flat.numel() // group.size)
    padded = torch.nn.functional.pad(flat, (0, share * group.size - flat.numel()))
    total = group.reduce_scatter(padded.view(group.size, share))
    return group.all_gather(total).view(-1)[: flat.numel()]
