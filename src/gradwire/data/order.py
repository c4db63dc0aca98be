"""The order of an epoch: a pure function of (seed, epoch), the same for every world size and numpy version."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Key = tuple[int, ...]


class Stream(IntEnum):
    """What random numbers are for: two purposes never share a stream."""

    ORDER = 0
    SAMPLE = 1
    PARTS = 2
    OWNERS = 3
    WORKERS = 4


def raw(num: int, key: Key, stream: Stream) -> NDArray[np.uint64]:
    """``num`` random 64-bit words, a pure function of (key, stream).

    Taken from the bit generator itself: numpy promises that it never changes, which it doesn't for ``Generator``.
    """
    entropy = np.random.SeedSequence(list(key), spawn_key=(int(stream),))
    return np.asarray(np.random.PCG64(entropy).random_raw(num), dtype=np.uint64)


def uniforms(num: int, key: Key, stream: Stream) -> NDArray[np.float64]:
    """``num`` numbers strictly between 0 and 1, a pure function of (key, stream)."""
    return ((raw(num, key, stream) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def permutation(length: int, key: Key, stream: Stream = Stream.ORDER) -> Indices:
    """``range(length)`` in random order, a pure function of (key, stream). Sorts random words: O(n log n).

    >>> sorted(permutation(5, (0, 1)).tolist())
    [0, 1, 2, 3, 4]
    """
    return np.argsort(raw(length, key, stream), kind="stable").astype(np.int64)


def epoch_order(length: int, key: Key, *, shuffle: bool) -> Indices:
    """The indices 0..length-1 as an epoch visits them; each once. key: (seed, epoch).

    >>> epoch_order(4, (0, 3), shuffle=False).tolist()
    [0, 1, 2, 3]
    >>> epoch_order(99, (0, 0), shuffle=True).tolist() == epoch_order(99, (0, 1), shuffle=True).tolist()
    False
    """
    return permutation(length, key) if shuffle else np.arange(length, dtype=np.int64)


def num_batches(length: int, batch_size: int, *, drop_last: bool) -> int:
    """How many batches ``length`` samples make.

    >>> num_batches(10, 4, drop_last=False), num_batches(10, 4, drop_last=True)
    (3, 2)
    """
    return length // batch_size if drop_last else -(-length // batch_size)


def batches(order: Indices, batch_size: int, *, drop_last: bool, start: int = 0) -> Iterator[list[int]]:
    """Consecutive global batches of ``order``, from batch ``start`` on; the last one may be short.

    >>> list(batches(np.arange(5), 2, drop_last=False))
    [[0, 1], [2, 3], [4]]
    """
    for step in range(start, num_batches(len(order), batch_size, drop_last=drop_last)):
        yield order[step * batch_size : (step + 1) * batch_size].tolist()
