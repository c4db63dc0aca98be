"""`Hierarchical`: exact inside a host, another reducer between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gradwire.compress.exact import AllReduce
from gradwire.core.group import Group
from gradwire.core.reducer import Bucket, Link, Reducer, State

_INSIDE = AllReduce()


@dataclass(frozen=True, kw_only=True)
class Hierarchical:
    """The exact sum inside each host, ``outer`` between the hosts' first ranks, who then tell the others.

    So only one rank of a host sends on the slow network, and what it sends is the whole host's contribution. The state is
    ``outer``'s and lives in the hosts' first ranks; the others' is empty. On a group without ``levels`` it is ``outer``.

    >>> Hierarchical(outer=AllReduce()).words()
    'exact inside a host, between hosts exact all-reduce'
    """

    outer: Reducer

    def choose(self, name: str, shape: tuple[int, ...]) -> Reducer:
        return replace(self, outer=self.outer.choose(name, shape))

    def init(self, bucket: Bucket, group: Group) -> State:
        between = _between(group)
        return {} if between is None else self.outer.init(bucket, between)

    def reduce(self, bucket: Bucket, state: State, group: Group, step: int) -> tuple[Tensor, State]:
        if group.levels is None:
            return self.outer.reduce(bucket, state, group, step)
        inside, between = group.levels.inside, group.levels.between
        mean, _ = _INSIDE.reduce(bucket, {}, inside, step)
        if between is not None:
            mean, state = self.outer.reduce(replace(bucket, flat=mean), state, between, step)
        return inside.broadcast(mean.contiguous()), state

    def resplit(self, states: Sequence[State], bucket: Bucket, group: Group) -> State:
        between = _between(group)
        held = [state for state in states if state]  # the earlier hosts' first ranks
        if between is None:
            return {}
        return self.outer.resplit(held, bucket, between) if held else self.outer.init(bucket, between)

    def plain(self, group: Group) -> bool:
        return group.levels is None and self.outer.plain(group)

    def sent_bytes(self, numel: int, num_ranks: int) -> float:
        """What a host's first rank sends to others. num_ranks: of the hosts."""
        return self.outer.sent_bytes(numel, num_ranks)

    def cost(self, numel: int, link: Link) -> float:
        """Of the part between hosts, beside which memory is fast. link: that of the hosts' first ranks."""
        return self.outer.cost(numel, link)

    def words(self) -> str:
        return f"exact inside a host, between hosts {self.outer.words()}"


def _between(group: Group) -> Group | None:
    """The group that ``outer`` works on: all ranks where there is one level; None on a rank that leaves it to another."""
    return group if group.levels is None else group.levels.between
