"""Wrong calls are answered at once: what was given, what is allowed, what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

from torch.utils.data import IterableDataset

from gradwire.data.epoch import Recipe
from gradwire.data.order import num_batches
from gradwire.data.peers import World
from gradwire.data.sources import Reading
from gradwire.data.split import Split
from gradwire.errors import DataError

SPLITS = (
    "Uniform(), Stratified(labels), ByClass(labels), Random(fractions=[...]), Proportional([...]), Sample(0.1), Local()"
)


def whole(name: str, value: object, *, least: int, cure: str) -> int:
    """``value`` if it is an int of at least ``least``. Raises DataError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(f"{name}={value!r} must be a whole number, {least} or more; {cure}")
    if value < least:
        raise DataError(f"{name}={value} must be {least} or more; {cure}")
    return value


def is_stream(dataset: object) -> bool:
    """Whether ``dataset`` is iterable-style. Raises DataError if it is no data set at all."""
    if isinstance(dataset, IterableDataset):
        return True
    if isinstance(dataset, Iterator):
        raise DataError(
            f"the data set is a {type(cast(object, dataset)).__name__}, which can be read only once; "
            "give an object whose __iter__ starts anew, e.g. a torch IterableDataset"
        )
    kind = type(dataset)
    if hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and not isinstance(dataset, str | dict):
        return False
    if hasattr(kind, "__iter__") and not isinstance(dataset, str | dict):
        return True
    raise DataError(
        f"a {kind.__name__} is not a data set; it needs __len__ and __getitem__ (map-style) or __iter__ (a stream)"
    )


def length_of(dataset: object, rank: int) -> int | None:
    """The data set's length, None if it has none. Raises DataError if it is empty."""
    try:
        length = len(dataset)  # pyright: ignore[reportArgumentType]  # torch's way to ask: streams may or may not say
    except (TypeError, NotImplementedError):
        return None
    if length == 0:
        raise DataError(f"rank {rank}: the data set is empty (len() is 0); check its path or filter")
    return length


def splits(split: object, length: int | None, size: int) -> Split:
    """``split`` if it is one and fits. Raises DataError."""
    if isinstance(split, type):
        raise DataError(f"split={split.__name__} is a class; write split={split.__name__}(...)")
    if not isinstance(split, Split):
        raise DataError(f"split={split!r} is not a split; use one of {SPLITS}")
    split.check(length, size)
    return split


def batch_size_for(value: object, size: int) -> int:
    """The global batch size. Raises DataError if it is none or smaller than the world."""
    batch_size = whole("batch_size", value, least=1, cure="it is the global batch, over all ranks, e.g. batch_size=256")
    if batch_size < size:
        raise DataError(
            f"batch_size={batch_size} is smaller than the {size} ranks, so that some would never have a sample; "
            f"use batch_size={size} or more (it is the global batch) or fewer ranks"
        )
    return batch_size


def recipe_for(
    *, length: int | None, stream: bool, batch_size: object, split: object, shuffle: object, seed: object,
    drop_last: object, world: World,
) -> Recipe:  # fmt: skip
    """A checked recipe. Raises DataError naming the first wrong argument."""
    if shuffle is not None and not isinstance(shuffle, bool):
        raise DataError(f"shuffle={shuffle!r} must be True, False or None (True for a data set with a length)")
    if stream and shuffle:
        raise DataError(
            "shuffle=True cannot reorder an iterable data set; leave shuffle out and shuffle inside the stream, "
            "or give a data set with __len__ and __getitem__"
        )
    recipe = Recipe(
        length=length,
        batch_size=batch_size_for(batch_size, world.num_readers),
        split=splits(split, length, world.num_readers),
        shuffle=not stream if shuffle is None else shuffle,
        seed=whole("seed", seed, least=0, cure="e.g. seed=0"),
        drop_last=flag("drop_last", drop_last),
    )
    _has_batches(recipe, world)
    return recipe


def _has_batches(recipe: Recipe, world: World) -> None:
    if recipe.length is None or not recipe.drop_last:
        return
    share = -(-recipe.batch_size // world.num_readers) if recipe.split.local else recipe.batch_size
    drawn = len(recipe.order(0, world.reader_rank))
    if num_batches(drawn, share, drop_last=True) == 0:
        raise DataError(
            f"rank {world.rank}: {drawn} samples make no whole batch of {share}, and drop_last=True leaves nothing; "
            "use drop_last=False or a smaller batch_size"
        )


def flag(name: str, value: object) -> bool:
    """``value`` if it is a bool; DataError naming the argument else."""
    if not isinstance(value, bool):
        raise DataError(f"{name}={value!r} must be True or False")
    return value


def reading_checked(reading: Reading) -> Reading:
    """``reading`` if torch can read so. Raises DataError."""
    num_workers = whole("num_workers", reading.num_workers, least=0, cure="0 reads in this process")
    flag("pin_memory", reading.pin_memory)
    if flag("persistent_workers", reading.persistent_workers) and not num_workers:
        raise DataError("persistent_workers=True needs num_workers of 1 or more; leave it out or add workers")
    if reading.prefetch_factor is not None:
        whole("prefetch_factor", reading.prefetch_factor, least=1, cure="it is batches per worker, e.g. 2")
        if not num_workers:
            raise DataError("prefetch_factor needs num_workers of 1 or more; leave it out or add workers")
    _timeout(reading.timeout_s, num_workers)
    for name, function in (("collate_fn", reading.collate_fn), ("worker_init_fn", reading.worker_init_fn)):
        if function is not None and not callable(function):  # pyright: ignore[reportUnnecessaryComparison]
            raise DataError(f"{name}={function!r} must be a function or None")
    return reading


def _timeout(timeout_s: object, num_workers: int) -> None:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 <= timeout_s < math.inf:
        raise DataError(f"timeout_s={timeout_s!r} must be a number of seconds, 0 (wait for ever) or more")
    if timeout_s and not num_workers:
        raise DataError(f"timeout_s={timeout_s:g} needs num_workers of 1 or more: it bounds the wait for a worker")
