"""`Partition`: who owns which slice of a flat index space."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gradwire.errors import UsageError


@dataclass(frozen=True)
class Partition:
    """Contiguous slices of ``range(total)``, one per rank, some perhaps empty.

    bounds: (num_ranks + 1,) non-decreasing, from 0 to total; rank r owns ``range(bounds[r], bounds[r + 1])``.

    >>> Partition.even(10, 4).sizes
    (3, 3, 2, 2)
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.bounds) < 2 or self.bounds[0] != 0 or list(self.bounds) != sorted(self.bounds):
            raise UsageError(f"partition bounds {self.bounds} must start at 0 and never fall")

    @classmethod
    def even(cls, total: int, num_ranks: int) -> Partition:
        """As equal as possible; the first ``total % num_ranks`` ranks own one more."""
        if total < 0 or num_ranks < 1:
            raise UsageError(f"cannot part {total} items among {num_ranks} ranks; use total >= 0 and at least 1 rank")
        share, rest = divmod(total, num_ranks)
        return cls.of_sizes([share + (rank < rest) for rank in range(num_ranks)])

    @classmethod
    def proportional(cls, total: int, weights: Sequence[float]) -> Partition:
        """Shares in proportion to ``weights`` (largest remainder; ties go to the lower rank).

        >>> Partition.proportional(10, [3, 1, 1]).sizes
        (6, 2, 2)
        """
        whole = float(sum(weights))
        if total < 0 or not weights or min(weights) < 0 or not 0 < whole < float("inf"):
            raise UsageError(f"weights {list(weights)} must be finite, not negative, and not all zero")
        exact = [total * weight / whole for weight in weights]
        sizes = [int(share) for share in exact]
        by_remainder = sorted(range(len(exact)), key=lambda rank: (sizes[rank] - exact[rank], rank))
        for rank in by_remainder[: total - sum(sizes)]:
            sizes[rank] += 1
        return cls.of_sizes(sizes)

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> Partition:
        """Rank r owns ``sizes[r]`` items."""
        return cls((0, *accumulate(sizes)))

    @property
    def total(self) -> int:
        return self.bounds[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False))

    def owner(self, index: int) -> int:
        """The rank that owns ``index``."""
        if not 0 <= index < self.total:
            raise UsageError(f"index {index} is outside 0..{self.total - 1}")
        return bisect_right(self.bounds, index) - 1

    def slices(self) -> Iterator[slice]:
        """Each rank's slice, in rank order."""
        return (slice(start, stop) for start, stop in zip(self.bounds, self.bounds[1:], strict=False))

    def reshard(self, other: Partition, rank: int) -> list[tuple[int, slice]]:
        """What ``rank`` of ``other`` must read from the ranks of this partition: (source rank, global slice)."""
        if other.total != self.total:
            raise UsageError(f"cannot reshard {self.total} items into {other.total}")
        low, high = other.bounds[rank], other.bounds[rank + 1]
        cuts = [(src, max(low, part.start), min(high, part.stop)) for src, part in enumerate(self.slices())]
        return [(src, slice(start, stop)) for src, start, stop in cuts if start < stop]
