"""How a global batch is parted among ranks: pure functions of (batch, world size, key).

Here: the contract and the splits that look at nothing but places. Splits by class are in `classes.py`, those by lot
in `chance.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gradwire.core.partition import Partition
from gradwire.data.order import Indices, Key
from gradwire.errors import DataError


@runtime_checkable
class Split(Protocol):
    """Which rank reads which sample. Frozen, printable, without state: all ranks compute the same answer.

    Subclass it and write ``parts`` and ``words``; the rest has defaults.
    """

    @property
    def local(self) -> bool:
        """Whether every rank's data set is its own, so that there is no common order."""
        return False

    def check(self, length: int | None, size: int) -> None:
        """Raise DataError if a data set of ``length`` (None: a stream) cannot be parted among ``size`` ranks."""

    def draw(self, order: Indices, key: Key) -> Indices:
        """The indices that the epoch visits, out of ``order``. key: (seed, epoch)."""
        return order

    def parts(self, batch: Sequence[int], size: int, key: Key) -> list[list[int]]:
        """``batch`` parted among ``size`` ranks; some parts may be empty. key: (seed, epoch, step, micro)."""
        ...

    def words(self) -> str:
        """One line for people and for the ranks' fingerprint."""
        ...

    def kind(self) -> str:
        """What must stay when a run goes on with another world size: the words without per-rank numbers."""
        return self.words()


def cut(batch: Sequence[int], partition: Partition) -> list[list[int]]:
    """Consecutive pieces of ``batch``, one per rank."""
    return [list(batch[piece]) for piece in partition.slices()]


@dataclass(frozen=True, kw_only=True)
class Uniform(Split):
    """Even, consecutive parts; the first ranks get one more where the batch is not divisible.

    >>> Uniform().parts([7, 3, 5, 1], 3, (0, 0, 0, 0))
    [[7, 3], [5], [1]]
    """

    def parts(self, batch: Sequence[int], size: int, key: Key) -> list[list[int]]:
        return cut(batch, Partition.even(len(batch), size))

    def words(self) -> str:
        return "uniform"


@dataclass(frozen=True)
class Proportional(Split):
    """Consecutive parts in proportion to the ranks' speeds, for machines of unequal speed. Exact by weighting.

    speeds: (world size,) samples per second of each rank, in any common unit.
    Raises DataError if a speed is not a positive number; or, when the loader is built, for a wrong count.

    >>> Proportional([3, 1]).parts(range(8), 2, (0, 0, 0, 0))
    [[0, 1, 2, 3, 4, 5], [6, 7]]
    """

    speeds: Sequence[float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "speeds", numbers("speeds", self.speeds))
        for rank, speed in enumerate(self.speeds):
            if speed <= 0:
                raise DataError(
                    f"speeds[{rank}] is {speed:g}; a speed must be positive (stop a rank that is to be idle)"
                )

    def check(self, length: int | None, size: int) -> None:
        one_per_rank("speeds", self.speeds, size)

    def parts(self, batch: Sequence[int], size: int, key: Key) -> list[list[int]]:
        return cut(batch, Partition.proportional(len(batch), self.speeds))

    def words(self) -> str:
        return f"proportional to {', '.join(f'{speed:g}' for speed in self.speeds)}"

    def kind(self) -> str:
        return "proportional"


@dataclass(frozen=True, kw_only=True)
class Local(Split):
    """Every rank's data set holds only that rank's samples; lengths and streams may differ.

    A rank reads ``batch_size / world size`` of its own samples a step (the first ranks one more). Ranks that run out
    go on with stand-ins of weight 0 until all have; every sample is used once an epoch.
    Cost: one exchange of 8 bytes per global batch.

    >>> Local().words()
    'local'
    """

    @property
    def local(self) -> bool:
        return True

    def parts(self, batch: Sequence[int], size: int, key: Key) -> list[list[int]]:
        raise DataError("Local() has no common batch to part: each rank's data set is its own")

    def words(self) -> str:
        return "local"


def numbers(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """``values`` as finite floats. Raises DataError naming the argument and the place."""
    try:
        found = tuple(float(value) for value in values)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}={values!r} must be a list of numbers, one per rank") from error
    for place, value in enumerate(found):
        if not math.isfinite(value):
            raise DataError(f"{name}[{place}] is {value}; it must be a finite number")
    return found


def one_per_rank(name: str, values: Sequence[float], size: int) -> None:
    """Raise DataError unless there is one value per rank."""
    if len(values) != size:
        raise DataError(f"{name} has {len(values)} entries for {size} ranks; give one per rank, in rank order")
