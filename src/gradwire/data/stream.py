"""Iterable data sets: one global stream that every reader follows, each making the batches that are its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from torch.utils.data import Dataset

from gradwire.data.epoch import Recipe
from gradwire.data.turns import Seat, Turn, batch_share, deal, deal_own

LAST = -1  # in a turn's indices: the last sample seen, as a stand-in

Window = list[tuple[Turn, object]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Asks a reader for global batch ``step`` of ``epoch``. run: changes when the stream is to be read anew."""

    run: int
    epoch: int
    step: int
    seat: Seat

    def emit(self) -> Task:
        return self

    def words(self) -> str:
        return f"batch {self.step} of the stream (epoch {self.epoch})"


class StreamReader(Dataset[Window | None]):
    """Reads the stream up to the batch that is asked for, and makes this rank's turns of it.

    Sample i belongs to global batch i // batch_size; the split parts positions in the stream. Torch deals tasks to
    workers round robin, so each of n workers makes every n-th batch and passes over the others' samples: every
    worker of every rank reads the whole stream (decode in ``collate_fn`` if reading is dear).
    """

    def __init__(self, dataset: Iterable[object], recipe: Recipe, collate: Callable[[list[object]], object]) -> None:
        self._dataset, self._recipe, self._collate = dataset, recipe, collate
        self._run = -1
        self._samples: Iterator[object] = iter(())
        self._at = 0
        self._last: list[object] = []

    def __getitem__(self, task: Task) -> Window | None:
        """This rank's turns of one global batch, with their data; None after the end."""
        if task.run != self._run:
            self._run, self._at, self._last = task.run, 0, []
            self._samples = iter(self._dataset)
        share = batch_share(self._recipe.batch_size, task.seat, self._recipe.split)
        start = task.step * share
        self._read(start - self._at, keep=1)
        batch = self._read(share, keep=share)
        if len(batch) < share and self._recipe.drop_last:
            batch = []
        turns = self._deal(range(start, start + len(batch)), task)
        return [(turn, self._collated(turn, batch, start)) for turn in turns] if turns is not None else None

    def _read(self, num: int, *, keep: int) -> list[object]:
        """Reads ``num`` samples, or what is left; returns the last ``keep`` of them."""
        counted = _Counted(islice(self._samples, num))
        kept = list(deque(counted, maxlen=keep))
        self._at += counted.num
        self._last = kept[-1:] or self._last
        return kept

    def _deal(self, positions: range, task: Task) -> list[Turn] | None:
        recipe, seat = self._recipe, task.seat
        if not recipe.split.local:
            if not positions:
                return None
            return deal(positions, seat=seat, split=recipe.split, seed=recipe.seed, epoch=task.epoch, step=task.step)
        if not positions and not (seat.lockstep and self._last):
            return None
        return deal_own(positions, seat=seat, epoch=task.epoch, step=task.step, stand_in=LAST)

    def _collated(self, turn: Turn, batch: list[object], start: int) -> object:
        return self._collate([self._last[0] if place == LAST else batch[place - start] for place in turn.indices])


class _Counted:
    def __init__(self, items: Iterator[object]) -> None:
        self._items = items
        self.num = 0

    def __iter__(self) -> Iterator[object]:
        for item in self._items:
            self.num += 1
            yield item
