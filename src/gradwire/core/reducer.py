"""`Reducer`: how a group agrees on one gradient bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gradwire.core.group import Group

State = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a group's network can do, as measured.

    latency_s: seconds of an 8-byte all-reduce. bandwidth_bytes_per_s: line rate seen by one rank.
    num_ranks: how many ranks share it.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    num_ranks: int

    @property
    def ring_factor(self) -> float:
        """2(n-1)/n: how many times a rank sends a buffer in a bandwidth-optimal all-reduce."""
        return 2 * (self.num_ranks - 1) / self.num_ranks


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A flat run of gradients that travel together.

    index: place in the fixed order. flat: (numel,) this rank's *weighted* contribution, so that the mean over
    ranks is the sum of contributions; a reducer may overwrite it. names and numels: the parameters inside, in order.
    """

    index: int
    flat: Tensor
    names: tuple[str, ...]
    numels: tuple[int, ...]


class Reducer(Protocol):
    """The configuration is frozen and printable; the state is a dict that the caller keeps.

    A caller that throws a step away forgets the returned state, so ``reduce`` must not change ``state`` in place.
    Any number of rounds over ``group`` is allowed; all ranks run the same ones in the same order.
    """

    def init(self, bucket: Bucket, group: Group) -> State:
        """The state before the first step, for a bucket of this size."""
        ...

    def reduce(self, bucket: Bucket, state: State, group: Group, step: int) -> tuple[Tensor, State]:
        """Agree on one bucket: returns the mean (numel,), bit-identical on all ranks, and the next state.

        The mean may be ``bucket.flat`` itself. step counts exchanges from 0, equal on all ranks.
        """
        ...

    def plain(self, group: Group) -> bool:
        """Whether ``reduce`` over ``group`` is one ``group.all_reduce(bucket.flat)`` and nothing else.

        Such buckets are started from backward itself, without a thread between.
        """
        ...

    def cost(self, numel: int, link: Link) -> float:
        """Predicted seconds to reduce ``numel`` float32 values over ``link``."""
        ...

    def words(self) -> str:
        """One line for people: what it does and what it sends."""
        ...
