"""`DataLoader`: what each rank reads, turn by turn. The same global batches for every world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from gradwire.core.microbatch import Microbatch
from gradwire.data.check import is_stream, length_of, reading_checked, recipe_for, whole
from gradwire.data.lockstep import agree
from gradwire.data.peers import World, here, loader_group
from gradwire.data.sources import MapSource, Pair, Reading, Source, StreamSource
from gradwire.data.split import Split, Uniform
from gradwire.data.state import pack, unpack
from gradwire.data.turns import Position, Seat, following

UNIFORM = Uniform()


class DataLoader:
    """Reads this rank's part of every global batch. Built on ``torch.utils.data.DataLoader``.

    ``batch_size`` is the GLOBAL batch: the samples of batch i are the same for every world size, order included.
    The order is a pure function of (seed, epoch); epochs advance by themselves. ``iter()`` starts the next epoch,
    also after a ``break``; after ``load_state_dict`` it goes on at the exact next sample.

    dataset: map-style (``__len__``, ``__getitem__``) or a stream (``__iter__``), which every rank and worker reads
    whole: sample i belongs to batch i // batch_size, ``get_worker_info()`` is None for it, so that each sample comes
    once. A stream that is different on every rank: ``split=Local()``.
    split: who reads what. shuffle: None is True for map-style, False for a stream. drop_last: leave out a short batch.
    num_workers, collate_fn, pin_memory, prefetch_factor, persistent_workers, worker_init_fn: as in torch.
    Persistent workers are seeded once, others each epoch. timeout_s: longest wait for a worker (0: none).
    world: default, the one that ``gw.init()`` opened.

    After ``attach`` (``gw.distribute`` calls it) all ranks make the same number of turns: one without a sample gets a
    stand-in with ``current.samples == 0``. Without it (evaluation) nothing is padded or repeated.
    Raises DataError for a wrong argument, and while reading, naming rank, worker and samples.

    >>> from contextlib import nullcontext
    >>> from types import SimpleNamespace
    >>> clock = SimpleNamespace(waiting_for_data=nullcontext)
    >>> world = SimpleNamespace(
    ...     rank=1, reader_rank=1, num_readers=2, clock=clock, reading=None, turn_ended=lambda: None
    ... )
    >>> [batch.tolist() for batch in DataLoader(range(10), 4, shuffle=False, world=world)]
    [[2, 3], [6, 7], [9]]
    """

    def __init__(
        self,
        dataset: object,
        batch_size: int,
        *,
        split: Split = UNIFORM,
        shuffle: bool | None = None,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], object] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        timeout_s: float = 0.0,
        worker_init_fn: Callable[[int], object] | None = None,
        world: World | None = None,
    ) -> None:
        world = here(world)
        reading = reading_checked(
            Reading(
                num_workers=num_workers,
                collate_fn=collate_fn,
                pin_memory=pin_memory,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
                timeout_s=timeout_s,
                worker_init_fn=worker_init_fn,
            )
        )
        stream = is_stream(dataset)
        recipe = recipe_for(
            length=length_of(dataset, world.rank), stream=stream, batch_size=batch_size, split=split, shuffle=shuffle,
            seed=seed, drop_last=drop_last, world=world,
        )  # fmt: skip
        source = StreamSource if stream else MapSource
        self._open(source(cast("Any", dataset), recipe, reading, world.rank), world)

    @classmethod
    def over(cls, source: Source, world: World) -> DataLoader:
        """A loader over any source of turns; ``shard`` is made of it."""
        loader = cls.__new__(cls)
        loader._open(source, world)
        return loader

    def _open(self, source: Source, world: World) -> None:
        self._source, self._world = source, world
        self._seat = Seat(rank=world.reader_rank, size=world.num_readers)
        self._position = Position(epoch=0)
        self._untouched = True  # nothing was yielded since the position was set
        self._current: Microbatch | None = None
        self._lengths: dict[tuple[int, Seat], int] = {}

    @property
    def current(self) -> Microbatch | None:
        """The micro-batch most recently yielded; None before the first."""
        return self._current

    @property
    def epoch(self) -> int:
        """The epoch that is being read or, between two, comes next; from 0."""
        return self._position.epoch

    def attach(self, accumulate: int = 1) -> None:
        """From the next ``iter()`` on: windows of ``accumulate`` micro-batches, in lockstep with the other ranks."""
        accumulate = whole("accumulate", accumulate, least=1, cure="1 does without accumulation")
        rank, size = self._world.reader_rank, self._world.num_readers
        self._seat = Seat(rank=rank, size=size, accumulate=accumulate, lockstep=True)

    def example(self) -> object:
        """A batch such as the loop will see, made of the first samples; nothing is consumed by it."""
        return self._source.example(-(-self._source.usual_batch // self._seat.size))

    def describe(self) -> dict[str, str | int]:
        """What must be equal on all ranks."""
        return self._source.describe()

    def __len__(self) -> int:
        """Turns of the loop in this epoch, on this rank. TypeError for a stream without a length."""
        key = (self.epoch, self._seat)
        if key not in self._lengths:
            self._lengths = {key: self._source.num_turns(*key)}
        return self._lengths[key]

    def __iter__(self) -> Iterator[Any]:
        """Batches as ``collate_fn`` makes them."""
        if not self._untouched:
            self._position = Position(epoch=self._position.epoch + 1)
        self._untouched = True
        return self._yielded(self._source.begin(self._position, self._seat), self._position.epoch)

    def _yielded(self, pairs: Iterator[Pair], epoch: int) -> Iterator[Any]:
        if self._source.local and self._seat.lockstep:
            pairs = agree(pairs, loader_group(self._world), self._seat.accumulate)
        try:
            while True:
                with self._world.clock.waiting_for_data():
                    pair = next(pairs, None)
                if pair is None:
                    break
                turn, data = pair
                self._current, self._position, self._untouched = turn.micro, following(turn.micro), False
                self._world.reading = self
                yield data
                self._world.turn_ended()
        finally:
            if self._world.reading is self:
                self._world.reading = None  # also after a break: it feeds nobody's backward any more
        self._position, self._untouched = Position(epoch=epoch + 1), True

    def state_dict(self) -> dict[str, object]:
        """Where the loop stands: what was yielded counts, not what was prefetched. Plain JSON-able values.

        Save it after ``optimizer.step()`` of a window's last micro-batch. Every rank's is the same except under
        ``Local``.
        """
        return pack(self._source, self._position, self._seat)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on where ``state`` was taken, also on another world size and with other ``num_workers``.

        Raises DataError, naming what differs, if the data set's length, batch size, seed, split or shuffling is
        another. Cost: a stream is read again up to there; a data set with indices is not.
        """
        self._position = unpack(state, self._source, self._seat)
        self._untouched = True
