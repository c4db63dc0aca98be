"""`shard`: one deletable line after a plain torch DataLoader, whose own sampler decides the global batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler

from gradwire.core.group import Group
from gradwire.data.check import batch_size_for, is_stream, length_of
from gradwire.data.epoch import Recipe, Words
from gradwire.data.loader import DataLoader
from gradwire.data.lockstep import agreed_order
from gradwire.data.peers import World, here, loader_group
from gradwire.data.random_states import RandomStates, generators_of
from gradwire.data.sources import Pair, Reading, StreamSource, collated, pairs, started, torch_loader
from gradwire.data.split import Uniform
from gradwire.data.turns import Position, Seat, Turn, deal, resumed
from gradwire.data.watch import Watch
from gradwire.data.workers import Feed
from gradwire.errors import DataError

UNIFORM = Uniform()
UNKNOWN_BATCH = 32  # a sampler of whole batches would have to be drawn from


def shard(loader: TorchDataLoader[Any], *, world: World | None = None) -> DataLoader:
    """Each rank reads its part of the batches of a plain torch DataLoader: ``train = gw.shard(train)``.

    The global batches are exactly those that ``loader``'s own sampler or batch sampler gives; its batch size is
    the global one. Dataset, collate function, workers, pinning, generator and timeout are kept. In a world of one,
    batches and torch's random numbers are bit-identical to iterating ``loader`` itself.
    All ranks must draw the same order: seed them alike (compared each epoch by 8 bytes).
    An iterable data set is read as ``DataLoader`` reads it: each sample once, also with workers.
    Raises DataError for a loader that cannot be parted; while iterating, MismatchError if ranks draw different orders.

    >>> from contextlib import nullcontext
    >>> from types import SimpleNamespace
    >>> clock = SimpleNamespace(waiting_for_data=nullcontext)
    >>> world = SimpleNamespace(
    ...     rank=0, reader_rank=0, num_readers=1, clock=clock, reading=None, turn_ended=lambda: None
    ... )
    >>> [batch.tolist() for batch in shard(TorchDataLoader(range(3), batch_size=2), world=world)]
    [[0, 1], [2]]
    """
    world = here(world)
    _can_be_parted(loader)
    loader = cast("Any", loader)  # torch's annotations are partial
    if loader.batch_size is not None:
        batch_size_for(loader.batch_size, world.num_readers)
    reading = reading_of(loader)
    if not is_stream(loader.dataset):
        length_of(loader.dataset, world.rank)
        return DataLoader.over(SamplerSource(loader, reading, world), world)
    recipe = Recipe(
        length=length_of(loader.dataset, world.rank), batch_size=cast("int", loader.batch_size), split=UNIFORM,
        shuffle=False, seed=0, drop_last=loader.drop_last,
    )  # fmt: skip
    dataset = cast("Iterable[object]", loader.dataset)
    return DataLoader.over(
        StreamSource(dataset, recipe, reading, world.rank, draws=RandomStates(generators_of(loader))), world
    )


def _can_be_parted(loader: object) -> None:
    if isinstance(loader, DataLoader):
        raise DataError("this loader is gradwire's already; shard() takes a torch.utils.data.DataLoader")
    if not isinstance(loader, TorchDataLoader):
        raise DataError(
            f"shard() takes a torch.utils.data.DataLoader, not a {type(loader).__name__}; "
            "for a data set use gw.DataLoader(dataset, batch_size)"
        )
    plain = cast("Any", loader)
    if plain.batch_sampler is None:
        raise DataError(
            "this loader has batch_size=None, so that its data set makes the batches; give it batch_size=... "
            "(the global batch) and let the data set give samples"
        )
    samplers: list[object] = [plain.sampler, plain.batch_sampler]
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise DataError("this loader's DistributedSampler parts the data already; leave it out (use shuffle=True)")
    if not plain.in_order:
        raise DataError("this loader has in_order=False, so that batches cannot be told apart; use in_order=True")


def reading_of(loader: TorchDataLoader[Any]) -> Reading:
    """How a torch loader reads."""
    plain = cast("Any", loader)
    return Reading(
        num_workers=plain.num_workers,
        collate_fn=plain.collate_fn,
        pin_memory=plain.pin_memory,
        prefetch_factor=plain.prefetch_factor,
        persistent_workers=plain.persistent_workers,
        timeout_s=plain.timeout,
        worker_init_fn=plain.worker_init_fn,
        multiprocessing_context=plain.multiprocessing_context,
        generator=plain.generator,
        pin_memory_device=plain.pin_memory_device,
    )


class SamplerSource:
    """A map-style data set whose batches come from a torch (batch) sampler, drawn from torch generators."""

    local = False
    split_kind = UNIFORM.words()

    def __init__(self, loader: TorchDataLoader[Any], reading: Reading, world: World) -> None:
        self._loader, self._world = cast("Any", loader), world
        self._batch_sampler: Iterable[list[int]] = self._loader.batch_sampler
        self._random = RandomStates(generators_of(loader))
        self._feed: Feed[Turn] = Feed()
        self._watch = Watch(self._feed, rank=world.rank, num_workers=reading.num_workers)
        self._torch = torch_loader(loader.dataset, self._feed, reading, self._watch)

    def describe(self) -> Words:
        loader = self._loader
        return {
            "batch_size": type(self._batch_sampler).__name__ if loader.batch_size is None else loader.batch_size,
            "split": UNIFORM.words(),
            "seed": "the sampler's",
            "shuffle": type(loader.sampler).__name__,
            "drop_last": "yes" if loader.drop_last else "no",
            "length": len(cast("list[object]", loader.dataset)),
        }

    def begin(self, at: Position, seat: Seat) -> Iterator[Pair]:
        self._random.at_start()
        batch_sampler, random = self._batch_sampler, self._random
        group = loader_group(self._world) if seat.size > 1 else None
        # iter() here and now: some samplers draw in it
        self._feed.ask(lambda: dealt(iter(batch_sampler), group, random, at, seat))
        return pairs(started(self._torch, self._watch), self._feed, self._watch)

    def num_turns(self, epoch: int, seat: Seat) -> int:
        """Exact for a batch size; with a custom batch sampler, as if all batches were large enough for every rank."""
        num = len(cast("list[object]", self._batch_sampler))
        if self._loader.batch_size is None:
            return num * seat.accumulate
        size = self._loader.batch_size
        last = len(cast("list[object]", self._loader.sampler)) - (num - 1) * size
        return (num - 1) * _num_turns(size, seat) + _num_turns(min(size, last), seat) if num else 0

    @property
    def usual_batch(self) -> int:
        return self._loader.batch_size or UNKNOWN_BATCH

    def example(self, num_samples: int) -> object:
        dataset = self._loader.dataset
        num = min(num_samples, len(dataset))
        return collated((dataset[index] for index in range(num)), num, self._loader.collate_fn)

    def state(self, at: Position) -> Mapping[str, object]:
        return self._random.state(mid_epoch=at.mid_epoch)

    def restore(self, state: Mapping[str, object]) -> None:
        self._random.restore(state)


def dealt(
    batches: Iterator[list[int]], group: Group | None, random: RandomStates, at: Position, seat: Seat
) -> Iterator[Turn]:
    """A rank's turns, from ``at`` on, of the batches that a sampler gives from the start of the epoch."""
    if group is not None:  # one rank alone draws as late as torch does
        batches = agreed_order(batches, group, at.epoch)
    for step, batch in enumerate(batches):
        if step < at.step:
            continue
        random.go_on()
        turns = deal(batch, seat=seat, split=UNIFORM, seed=0, epoch=at.epoch, step=step)
        yield from resumed(turns, at) if step == at.step else turns
    random.go_on()


def _num_turns(batch_size: int, seat: Seat) -> int:
    return len(deal(range(batch_size), seat=seat, split=UNIFORM, seed=0, epoch=0, step=0))
