"""Splits by lot: `Random` parts and `Sample`d epochs. By lot, yet pure functions of the key."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from gradwire.core.partition import Partition
from gradwire.data.classes import handed
from gradwire.data.order import Indices, Key, Stream, permutation, raw, uniforms
from gradwire.data.split import Split, Uniform, cut, numbers, one_per_rank
from gradwire.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Random(Split):
    """Random parts of unequal size.

    fractions: (world size,) each rank's share; they sum to 1.
    fixed=False: drawn anew from each global batch; a part's size is its share to within one sample, and its mean
    over batches is the share exactly. fixed=True: each sample has one owner for the whole run (data that cannot
    leave its machine); the shares then hold over the data set, as nearly as lots do.
    Raises DataError if fractions are negative or don't sum to 1; or, when the loader is built, for a wrong count.

    >>> [len(part) for part in Random(fractions=[0.75, 0.25]).parts(range(8), 2, (0, 0, 0, 0))]
    [6, 2]
    """

    fractions: Sequence[float]
    fixed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "fractions", numbers("fractions", self.fractions))
        for rank, fraction in enumerate(self.fractions):
            if fraction < 0:
                raise DataError(f"fractions[{rank}] is {fraction:g}; a share must not be negative")
        if abs(math.fsum(self.fractions) - 1) > 1e-6:
            raise DataError(f"fractions sum to {math.fsum(self.fractions):g}; the ranks' shares must sum to 1")

    def check(self, length: int | None, size: int) -> None:
        one_per_rank("fractions", self.fractions, size)

    def parts(self, batch: Sequence[int], size: int, key: Key) -> list[list[int]]:
        if self.fixed:
            return handed(batch, self.owners(batch, key[0]), size)
        order = cast("list[int]", permutation(len(batch), key, Stream.PARTS).tolist())
        offset = float(uniforms(1, key, Stream.PARTS)[0])
        bounds = [0, *(min(len(batch), int(edge * len(batch) + offset)) for edge in self._edges()), len(batch)]
        return cut([batch[place] for place in order], Partition(tuple(bounds)))

    def owners(self, batch: Sequence[int], seed: int) -> Indices:
        """The rank that owns each sample for the whole run."""
        salt = raw(1, (seed,), Stream.OWNERS)[0]
        places = mixed(np.asarray(batch, dtype=np.int64).astype(np.uint64) ^ salt).astype(np.float64) * 2.0**-64
        return np.searchsorted(self._edges(), places, side="right").astype(np.int64)

    def _edges(self) -> list[float]:
        """(world size - 1,) where one rank's share ends and the next begins."""
        return np.cumsum(self.fractions)[:-1].tolist()

    def words(self) -> str:
        return f"{self.kind()}: {', '.join(f'{fraction:g}' for fraction in self.fractions)}"

    def kind(self) -> str:
        return "random, fixed owners" if self.fixed else "random"


def mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words that scatters neighbours (splitmix64's finalizer, Steele et al. 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True, eq=False)
class Sample(Split):
    """Train on a sample of the data, drawn anew each epoch; parted by another split.

    fraction: samples per epoch over data set length; above 1 only with replacement.
    weights: (dataset length,) relative chance of each index, or None for equal chances.
    replacement: whether an index may come twice an epoch; by default with weights or a fraction above 1.
    split: who reads what of each batch. Cost: O(length) an epoch.
    Raises DataError for a fraction or weights that cannot be drawn.

    >>> len(Sample(0.25).draw(np.arange(100), (0, 0)))
    25
    """

    fraction: float
    weights: Sequence[float] | None = None
    replacement: bool | None = field(default=None, kw_only=True)
    split: Split = field(default_factory=Uniform, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(f"fraction={self.fraction!r} must be a number above 0, e.g. 0.1 for a tenth of the data")
        if not 0 < self.fraction < math.inf:
            raise DataError(f"fraction={self.fraction:g} must be above 0, e.g. 0.1 for a tenth of the data")
        if self.fraction > 1 and not self._replaces:
            raise DataError(f"fraction={self.fraction:g} is above 1, which needs replacement=True")
        if self.weights is not None:
            object.__setattr__(self, "weights", weights_of(self.weights))

    @property
    def local(self) -> bool:
        return self.split.local

    @property
    def _replaces(self) -> bool:
        return (self.weights is not None or self.fraction > 1) if self.replacement is None else self.replacement

    def check(self, length: int | None, size: int) -> None:
        self.split.check(length, size)
        if length is None:
            raise DataError("Sample needs a data set with a length; a stream is read once through, so sample inside it")
        if self.weights is None:
            return
        if len(self.weights) != length:
            raise DataError(f"there are {len(self.weights)} weights for {length} samples; give one weight per sample")
        possible = int(np.count_nonzero(self.weights))
        if not self._replaces and possible < self._num(length):
            raise DataError(
                f"fraction={self.fraction:g} draws {self._num(length)} samples but only {possible} weights are above 0"
                "; use replacement=True or a smaller fraction"
            )

    def _num(self, length: int) -> int:
        return max(1, round(self.fraction * length))

    def draw(self, order: Indices, key: Key) -> Indices:
        order = self.split.draw(order, key)
        num = self._num(len(order))
        weights = np.ones(len(order)) if self.weights is None else np.asarray(self.weights)[order]
        if self._replaces:
            chances = np.cumsum(weights)
            lots = uniforms(num, key, Stream.SAMPLE) * chances[-1]
            places = cast("Indices", chances.searchsorted(lots, side="right"))
            return order[np.minimum(places, len(order) - 1)]
        with np.errstate(divide="ignore"):  # weight 0: an infinite waiting time. Efraimidis and Spirakis 2006
            waits = -np.log(uniforms(len(order), key, Stream.SAMPLE)) / weights
        return order[np.sort(np.argsort(waits, kind="stable")[:num])]

    def parts(self, batch: Sequence[int], size: int, key: Key) -> list[list[int]]:
        return self.split.parts(batch, size, key)

    def words(self) -> str:
        return f"{self._drawing()}; {self.split.words()}"

    def kind(self) -> str:
        return f"{self._drawing()}; {self.split.kind()}"

    def _drawing(self) -> str:
        how = "with" if self._replaces else "without"
        words = f"sample of {self.fraction:g} {how} replacement"
        if self.weights is None:
            return words
        return f"{words}, weights crc {zlib.crc32(np.asarray(self.weights).tobytes()):08x}"


def weights_of(weights: Sequence[float]) -> NDArray[np.float64]:
    """(length,) float64. Raises DataError if one is negative or not finite, or all are zero."""
    try:
        found = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"weights of type {type(weights).__name__} must be one number per sample") from error
    if found.ndim != 1 or not len(found):
        raise DataError(f"weights have shape {found.shape}; give one number per sample")
    bad = np.flatnonzero(~np.isfinite(found) | (found < 0))
    if len(bad):
        raise DataError(f"weights[{bad[0]}] is {found[bad[0]]:g}; a weight must be finite and not negative")
    if not found.any():
        raise DataError("all weights are 0; at least one sample must be possible")
    return found
