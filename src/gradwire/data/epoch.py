"""`Recipe`: everything that decides which samples an epoch visits, and the turns that follow from it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from gradwire.data.order import Indices, Key, Stream, batches, epoch_order, num_batches, raw
from gradwire.data.split import Split
from gradwire.data.turns import Position, Seat, Turn, batch_share, deal, deal_own, resumed

Words = dict[str, str | int]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the user asked for. length: of the data set, None for a stream without one. batch_size: global."""

    length: int | None
    batch_size: int
    split: Split
    shuffle: bool
    seed: int
    drop_last: bool

    def describe(self) -> Words:
        """What must be equal on all ranks."""
        words: Words = {
            "batch_size": self.batch_size,
            "split": self.split.words(),
            "seed": self.seed,
            "shuffle": "yes" if self.shuffle else "no",
            "drop_last": "yes" if self.drop_last else "no",
        }
        if not self.split.local:
            words["length"] = "stream" if self.length is None else self.length
        return words

    def order(self, epoch: int, rank: int) -> Indices:
        """The indices that ``epoch`` visits; only under ``Local`` do they depend on the rank."""
        key: Key = (self.seed, epoch, rank + 1) if self.split.local else (self.seed, epoch)
        length = self.length or 0
        return self.split.draw(epoch_order(length, key, shuffle=self.shuffle), key)

    def turns(self, at: Position, seat: Seat) -> Iterator[Turn]:
        """A rank's turns from ``at`` to the end of the epoch; endless (stand-ins) for ``Local`` in lockstep."""
        share = batch_share(self.batch_size, seat, self.split)
        order = self.order(at.epoch, seat.rank)
        for step, batch in enumerate(batches(order, share, drop_last=self.drop_last, start=at.step), at.step):
            turns = self._deal(batch, seat, at.epoch, step)
            yield from resumed(turns, at) if step == at.step else turns
        if self.split.local and seat.lockstep:
            for step in count(max(at.step, num_batches(len(order), share, drop_last=self.drop_last))):
                yield from deal_own([], seat=seat, epoch=at.epoch, step=step, stand_in=int(order[-1]))

    def _deal(self, batch: list[int], seat: Seat, epoch: int, step: int) -> list[Turn]:
        if self.split.local:
            return deal_own(batch, seat=seat, epoch=epoch, step=step, stand_in=batch[0])
        return deal(batch, seat=seat, split=self.split, seed=self.seed, epoch=epoch, step=step)

    def num_turns(self, epoch: int, seat: Seat) -> int:
        """How many turns of the loop an epoch has on this rank; under ``Local``: with samples of its own.

        Raises TypeError, as Python's len() does, for a stream without a length.
        """
        if self.length is None:
            raise TypeError("this loader reads a stream without a length; give the data set a __len__ to use len()")
        if self.split.local:
            share = batch_share(self.batch_size, seat, self.split)
            drawn = len(self.order(epoch, seat.rank))
            return num_batches(drawn, share, drop_last=self.drop_last) * seat.accumulate
        return sum(1 for _ in self.turns(Position(epoch=epoch), seat))


def worker_seed(seed: int, epoch: int) -> int:
    """What the loader workers' seeds of an epoch are derived from."""
    return int(raw(1, (seed, epoch), Stream.WORKERS)[0]) >> 1
