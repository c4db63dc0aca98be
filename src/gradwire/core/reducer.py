"""`Reducer`: how a group agrees on one gradient bucket."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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

    def seconds(self, sent_bytes: float, *, rounds: int = 1) -> float:
        """For a rank to send that much, in so many messages that wait for one another."""
        return rounds * self.latency_s + sent_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One parameter inside a bucket: ``flat[offset : offset + numel].view(shape)``."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A flat run of gradients that travel together.

    index: place in the fixed order. flat: (numel,) this rank's *weighted* contribution, so that the mean over
    ranks is the sum of contributions; a reducer may overwrite it. pieces: the parameters inside, in order; what lies between
    them (alignment) is zero.
    """

    index: int
    flat: Tensor
    pieces: tuple[Piece, ...]


class Reducer(Protocol):
    """The configuration is frozen, hashable and printable; the state is a dict that the caller keeps.

    A caller that throws a step away forgets the returned state, so ``reduce`` must not change ``state`` in place.
    Any number of rounds over ``group`` is allowed; all ranks run the same ones in the same order.
    """

    def choose(self, name: str, shape: tuple[int, ...]) -> Reducer:
        """Which reducer takes this parameter: itself, or another one (small tensors travel exact, say).

        Parameters with equal choices share buckets. ``choose`` of what was chosen gives itself.
        """
        ...

    def init(self, bucket: Bucket, group: Group) -> State:
        """The state before the first step, for a bucket of this size."""
        ...

    def reduce(self, bucket: Bucket, state: State, group: Group, step: int) -> tuple[Tensor, State]:
        """Agree on one bucket: returns the mean (numel,), bit-identical on all ranks, and the next state.

        The mean may be ``bucket.flat`` itself. step counts exchanges from 0, equal on all ranks.
        """
        ...

    def resplit(self, states: Sequence[State], bucket: Bucket, group: Group) -> State:
        """This rank's state for ``bucket`` from those of all ranks of an earlier world, in their order.

        Nothing is lost: what all ranks together had still to send, they have still to send.
        """
        ...

    def plain(self, group: Group) -> bool:
        """Whether ``reduce`` over ``group`` is one ``group.all_reduce(bucket.flat)`` and nothing else.

        Such buckets are started from backward itself, without a thread between.
        """
        ...

    def sent_bytes(self, numel: int, num_ranks: int) -> float:
        """What each rank sends for ``numel`` float32 values (on average over steps)."""
        ...

    def cost(self, numel: int, link: Link) -> float:
        """Predicted seconds to reduce ``numel`` float32 values over ``link``."""
        ...

    def words(self) -> str:
        """One line for people: what it does."""
        ...
