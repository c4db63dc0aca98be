"""Splits by class: every rank the same mix, or every class to one rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from gradwire.data.order import Indices, Key
from gradwire.data.split import Split
from gradwire.errors import DataError

Label = int | str | float


@dataclass(frozen=True, eq=False)
class Stratified(Split):
    """Each rank's part has the class mix of the global batch, as nearly as whole samples allow.

    The batch is dealt class by class, so that two ranks differ by at most one in every class and in total.
    labels: (dataset length,) the class of each index (of a stream: of each position): a list, array or tensor.
    Raises DataError if labels have another length than the data set or are not flat.

    >>> Stratified(["cat", "dog", "cat", "dog"]).parts([0, 1, 2, 3], 2, (0, 0, 0, 0))
    [[0, 1], [2, 3]]
    """

    labels: Iterable[Label]
    codes: Indices = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "codes", coded(self.labels))

    def check(self, length: int | None, size: int) -> None:
        same_length(len(self.codes), length)

    def parts(self, batch: Sequence[int], size: int, key: Key) -> list[list[int]]:
        classes = classes_of(self.codes, batch)
        ranks = np.empty(len(batch), dtype=np.int64)
        ranks[np.argsort(classes, kind="stable")] = np.arange(len(batch)) % size
        return handed(batch, ranks, size)

    def words(self) -> str:
        return labels_words("stratified", self.codes)


@dataclass(frozen=True, eq=False)
class ByClass(Split):
    """Each class belongs to one rank for the whole run, balanced by sample counts. For studies of skewed data.

    A rank may get nothing of a batch; weighting by samples keeps the mean exact.
    labels: (dataset length,) the class of each index: a list, array or tensor.
    Raises DataError if labels have another length than the data set or are not flat.

    >>> ByClass([0, 0, 0, 1, 2]).parts([4, 0, 3, 1], 2, (0, 0, 0, 0))
    [[0, 1], [4, 3]]
    """

    labels: Iterable[Label]
    codes: Indices = field(init=False, repr=False)
    _owners: dict[int, Indices] = field(init=False, repr=False, default_factory=dict[int, Indices])

    def __post_init__(self) -> None:
        object.__setattr__(self, "codes", coded(self.labels))

    def check(self, length: int | None, size: int) -> None:
        same_length(len(self.codes), length)

    def owners(self, size: int) -> Indices:
        """(num_classes,) the rank of each class: largest class first, to the rank with the fewest samples so far."""
        if size not in self._owners:
            counts = np.bincount(self.codes)
            owners, loads = np.empty(len(counts), dtype=np.int64), [0] * size
            for code in np.argsort(-counts, kind="stable").tolist():
                owners[code] = loads.index(min(loads))
                loads[owners[code]] += int(counts[code])
            self._owners[size] = owners
        return self._owners[size]

    def parts(self, batch: Sequence[int], size: int, key: Key) -> list[list[int]]:
        return handed(batch, self.owners(size)[classes_of(self.codes, batch)], size)

    def words(self) -> str:
        return labels_words("by class", self.codes)


def handed(batch: Sequence[int], ranks: Indices, size: int) -> list[list[int]]:
    """Sample i of ``batch`` goes to ``ranks[i]``; within a part the batch's order is kept."""
    parts: list[list[int]] = [[] for _ in range(size)]
    for index, rank in zip(batch, cast("list[int]", ranks.tolist()), strict=True):
        parts[rank].append(index)
    return parts


def coded(labels: Iterable[Label]) -> Indices:
    """Labels as class numbers 0, 1, ... in sorted order of the labels. (length,) int64."""
    if isinstance(labels, str) or not isinstance(labels, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DataError(f"labels={labels!r} must hold one class per sample: a list, an array or a tensor")
    try:
        flat = np.asarray(labels if hasattr(labels, "__array__") else list(labels))
    except (TypeError, ValueError) as error:  # ragged lists; tensors that are not on the CPU
        raise DataError(f"labels must be one class per sample, flat and on the CPU: {error}") from error
    if flat.ndim != 1:
        raise DataError(f"labels have shape {flat.shape}; give one class per sample, e.g. labels.argmax(1) for one-hot")
    if not len(flat):
        raise DataError("labels are empty; give one class per sample of the data set")
    return np.unique(flat, return_inverse=True)[1].astype(np.int64)


def classes_of(codes: Indices, batch: Sequence[int]) -> Indices:
    """The class numbers of the batch's samples."""
    try:
        return codes[np.asarray(batch, dtype=np.int64)]
    except IndexError as error:
        found = f"sample {max(batch)} has no label: there are {len(codes)} labels"
        raise DataError(f"{found}; give one per sample") from error


def same_length(num_labels: int, length: int | None) -> None:
    """Raise DataError unless there is one label a sample; a stream has no length to compare."""
    if length is not None and num_labels != length:
        raise DataError(f"there are {num_labels} labels for {length} samples; give one label per sample")


def labels_words(kind: str, codes: Indices) -> str:
    """Tells two labellings apart: their count, classes and checksum."""
    return f"{kind}: {int(codes.max()) + 1} classes of {len(codes)} labels, crc {zlib.crc32(codes.tobytes()):08x}"
