"""Where a loader's turns come from: a data set with an order, or a stream. Torch's DataLoader does the reading."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import (
    Dataset,
    default_collate,  # pyright: ignore[reportUnknownVariableType]
)

from gradwire.data.epoch import Recipe, Words, worker_seed
from gradwire.data.random_states import RandomStates
from gradwire.data.stream import StreamReader, Task, Window
from gradwire.data.turns import Position, Seat, Turn, resumed
from gradwire.data.watch import Watch, name_deaths
from gradwire.data.workers import Feed, WorkerStart, leave_garbage_to_the_parent

Collate = Callable[[list[object]], object]
Pair = tuple[Turn, object]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How samples are read; torch's names, except timeout_s (seconds to wait for a worker, 0: for ever)."""

    num_workers: int = 0
    collate_fn: Collate | None = None
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    timeout_s: float = 0.0
    worker_init_fn: Callable[[int], object] | None = None
    multiprocessing_context: object = None
    generator: torch.Generator | None = None
    pin_memory_device: str = ""


class Described(Protocol):
    """What a saved position refers to."""

    @property
    def local(self) -> bool: ...

    @property
    def split_kind(self) -> str: ...

    def describe(self) -> Words: ...

    def state(self, at: Position) -> Mapping[str, object]:
        """What else than the position ``at`` is needed to go on from there."""
        ...

    def restore(self, state: Mapping[str, object]) -> None: ...


class Source(Described, Protocol):
    """Makes the pairs (turn, data) of an epoch."""

    def begin(self, at: Position, seat: Seat) -> Iterator[Pair]:
        """Start reading from ``at``. Torch's random draws happen during this call, as in its own ``iter(loader)``."""
        ...

    def num_turns(self, epoch: int, seat: Seat) -> int: ...

    @property
    def usual_batch(self) -> int:
        """Samples of a global batch."""
        ...

    def example(self, num_samples: int) -> object:
        """A batch of the first samples, or fewer if there are."""
        ...


def collated(samples: Iterable[object], num_samples: int, collate: Collate | None) -> object:
    """The first of ``samples`` as a batch; random numbers that are drawn on the way are given back."""
    numbers = np.random.get_state()  # the generator that data sets draw from
    python = random.getstate()
    with torch.random.fork_rng():
        batch = (collate or cast("Collate", default_collate))(list(islice(samples, num_samples)))
    random.setstate(python)
    np.random.set_state(numbers)
    return batch


class RecipeState:
    """What sources that follow a recipe have in common: no state beside the position."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._generator = torch.Generator()  # of the workers' seeds: torch's default generator is left alone

    @property
    def local(self) -> bool:
        return self._recipe.split.local

    @property
    def split_kind(self) -> str:
        return self._recipe.split.kind()

    def describe(self) -> Words:
        return self._recipe.describe()

    def num_turns(self, epoch: int, seat: Seat) -> int:
        return self._recipe.num_turns(epoch, seat)

    @property
    def usual_batch(self) -> int:
        return self._recipe.batch_size

    def state(self, at: Position) -> Mapping[str, object]:
        return {}

    def restore(self, state: Mapping[str, object]) -> None:
        """Nothing to restore: the order is a function of seed and epoch."""

    def seeded(self, epoch: int) -> None:
        self._generator.manual_seed(worker_seed(self._recipe.seed, epoch))


class MapSource(RecipeState):
    """A data set with ``__len__`` and ``__getitem__``."""

    def __init__(self, dataset: object, recipe: Recipe, reading: Reading, rank: int) -> None:
        super().__init__(recipe)
        self._feed: Feed[Turn] = Feed()
        self._watch = Watch(self._feed, rank=rank, num_workers=reading.num_workers)
        self._torch = torch_loader(dataset, self._feed, replace(reading, generator=self._generator), self._watch)
        self._samples, self._collate = cast("Any", dataset), reading.collate_fn

    def example(self, num_samples: int) -> object:
        num = min(num_samples, len(self._samples))
        return collated((self._samples[index] for index in range(num)), num, self._collate)

    def begin(self, at: Position, seat: Seat) -> Iterator[Pair]:
        self.seeded(at.epoch)
        recipe = self._recipe
        self._feed.ask(lambda: recipe.turns(at, seat))
        return pairs(started(self._torch, self._watch), self._feed, self._watch)


class StreamSource(RecipeState):
    """An iterable data set. draws: where torch draws the workers' seeds, None to take them from the recipe's seed."""

    def __init__(
        self,
        dataset: Iterable[object],
        recipe: Recipe,
        reading: Reading,
        rank: int,
        *,
        draws: RandomStates | None = None,
    ) -> None:
        super().__init__(recipe)
        self._run, self._draws = 0, draws
        self._samples, self._collate = dataset, reading.collate_fn
        self._feed: Feed[Task] = Feed()
        self._watch = Watch(self._feed, rank=rank, num_workers=reading.num_workers)
        reader = StreamReader(dataset, recipe, reading.collate_fn or cast("Collate", default_collate))
        reading = replace(reading, generator=reading.generator if draws else self._generator)
        self._torch: TorchDataLoader[Window | None] = torch_loader(reader, self._feed, reading, self._watch, ready=True)

    def begin(self, at: Position, seat: Seat) -> Iterator[Pair]:
        self._run += 1
        self.seeded(at.epoch)
        run = self._run
        self._feed.ask(lambda: (Task(run=run, epoch=at.epoch, step=step, seat=seat) for step in count(at.step)))
        if self._draws is None:
            return self._pairs(started(self._torch, self._watch), at)
        self._draws.at_start()
        batches = started(self._torch, self._watch)
        self._draws.go_on()
        return self._pairs(batches, at)

    def example(self, num_samples: int) -> object:
        return collated(iter(self._samples), num_samples, self._collate)

    def state(self, at: Position) -> Mapping[str, object]:
        return self._draws.state(mid_epoch=at.mid_epoch) if self._draws else {}

    def restore(self, state: Mapping[str, object]) -> None:
        if self._draws:
            self._draws.restore(state)

    def _pairs(self, batches: Iterator[Window | None], at: Position) -> Iterator[Pair]:
        try:
            while (window := self._watch.next(batches, None)) is not None:
                step = self._feed.take().step
                kept = {id(turn) for turn in resumed([turn for turn, _ in window], at)} if step == at.step else None
                for turn, data in window:
                    if kept is None or id(turn) in kept:
                        yield turn, data
        finally:
            del batches  # an error's traceback holds this frame


def as_it_is(data: object) -> object:
    """The collate function of batches that are ready; a named function, so that spawned workers can have it."""
    return data


def torch_loader(
    dataset: object, feed: Feed[Any], reading: Reading, watch: Watch, *, ready: bool = False
) -> TorchDataLoader[Any]:
    """torch's loader over ``feed``. ready: the data set itself gives whole batches, of a stream it follows."""
    start = WorkerStart(rank=watch.rank, pids=watch.pids, user_init=reading.worker_init_fn, hide=ready)
    return TorchDataLoader(
        cast("Dataset[object]", dataset),
        batch_size=None if ready else 1,
        sampler=feed if ready else None,
        batch_sampler=None if ready else cast("Any", feed),
        num_workers=reading.num_workers,
        collate_fn=as_it_is if ready else reading.collate_fn,
        pin_memory=reading.pin_memory,
        timeout=reading.timeout_s,
        worker_init_fn=start if reading.num_workers else None,
        multiprocessing_context=reading.multiprocessing_context,
        generator=reading.generator,
        prefetch_factor=reading.prefetch_factor,
        persistent_workers=reading.persistent_workers,
        pin_memory_device=reading.pin_memory_device,
    )


def started(loader: TorchDataLoader[Any], watch: Watch) -> Iterator[Any]:
    """torch's own iterator, its workers' deaths named."""
    if loader.num_workers:
        leave_garbage_to_the_parent()
    batches = iter(loader)
    if loader.num_workers:
        name_deaths(watch)
    return batches


def pairs(batches: Iterator[object], feed: Feed[Turn], watch: Watch) -> Iterator[Pair]:
    """Each turn with its data. Closing it ends the workers."""
    end = object()
    try:
        while (data := watch.next(batches, end)) is not end:
            yield feed.take(), data
    finally:
        del batches  # an error's traceback holds this frame
