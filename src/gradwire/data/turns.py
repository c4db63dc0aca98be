"""A turn of the user's loop, and how global batches are dealt into turns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.core.microbatch import Microbatch
from gradwire.core.partition import Partition
from gradwire.data.split import Split
from gradwire.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rank sits: rank of size, windows of ``accumulate``; lockstep: every rank makes every turn."""

    rank: int
    size: int
    accumulate: int = 1
    lockstep: bool = False


@dataclass(frozen=True, kw_only=True)
class Position:
    """The next turn: micro-batch ``micro`` of global batch ``step`` of ``epoch``, all from 0.

    of: into how many micro-batches that batch was cut, if micro > 0.
    """

    epoch: int
    step: int = 0
    micro: int = 0
    of: int = 0

    @property
    def mid_epoch(self) -> bool:
        return self.step > 0 or self.micro > 0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one rank reads in one turn: ``indices`` (a stand-in if ``micro.samples`` is 0), and what it counts.

    own: this rank's samples in the whole window (only asked for where ranks have data sets of their own).
    """

    indices: list[int]
    micro: Microbatch
    own: int

    def emit(self) -> list[int]:
        return self.indices

    def words(self) -> str:
        return f"samples {shown(self.indices)} (step {self.micro.step} of epoch {self.micro.epoch})"


def shown(indices: Sequence[int], most: int = 8) -> str:
    """Indices for a message: the first few and how many there are.

    >>> shown(range(20), most=2)
    '[0, 1, ... 20 in all]'
    """
    if len(indices) <= most:
        return str(list(indices))
    return f"[{', '.join(map(str, indices[:most]))}, ... {len(indices)} in all]"


def deal(batch: Sequence[int], *, seat: Seat, split: Split, seed: int, epoch: int, step: int) -> list[Turn]:
    """This rank's turns of one global batch.

    The batch is first cut into micro-batches, even and consecutive, then each is parted among the ranks: micro-batch m
    holds the same samples for every world size. In lockstep an empty part becomes a stand-in that counts 0 samples.

    >>> from gradwire.data.split import Uniform
    >>> seat = Seat(rank=1, size=2, accumulate=2, lockstep=True)
    >>> [turn.indices for turn in deal([5, 6, 7], seat=seat, split=Uniform(), seed=0, epoch=0, step=0)]
    [[6], [7]]
    """
    turns: list[Turn] = []
    pieces = list(Partition.even(len(batch), min(seat.accumulate, len(batch))).slices())
    for index, piece in enumerate(pieces):
        whole = batch[piece]
        parts = split.parts(whole, seat.size, (seed, epoch, step, index))
        if len(parts) != seat.size or sum(map(len, parts)) != len(whole):
            raise DataError(
                f"split {split.words()!r} made {len(parts)} parts of {sum(map(len, parts))} samples from a batch of "
                f"{len(whole)} for {seat.size} ranks; parts() must give each rank a list and each sample one rank"
            )
        own = parts[seat.rank]
        if own or seat.lockstep:
            micro = Microbatch(
                epoch=epoch, step=step, index=index, total=len(pieces), samples=len(own),
                global_samples=len(whole), window_samples=len(batch),
            )  # fmt: skip
            turns.append(Turn(indices=own or [whole[0]], micro=micro, own=0))
    return turns


def deal_own(batch: Sequence[int], *, seat: Seat, epoch: int, step: int, stand_in: int) -> list[Turn]:
    """The turns of a batch that is this rank's alone (``Local``); in lockstep always ``seat.accumulate`` of them.

    What the other ranks have only an exchange can tell: see `lockstep.agree`.
    """
    total = seat.accumulate if seat.lockstep else max(1, min(seat.accumulate, len(batch)))
    turns: list[Turn] = []
    for index, piece in enumerate(Partition.even(len(batch), total).slices()):
        own = list(batch[piece])
        if own or seat.lockstep:
            micro = Microbatch(
                epoch=epoch, step=step, index=index, total=total, samples=len(own),
                global_samples=None, window_samples=None,
            )  # fmt: skip
            turns.append(Turn(indices=own or [stand_in], micro=micro, own=len(batch)))
    return turns


def following(micro: Microbatch) -> Position:
    """The position after the turn ``micro``."""
    if micro.last:
        return Position(epoch=micro.epoch, step=micro.step + 1)
    return Position(epoch=micro.epoch, step=micro.step, micro=micro.index + 1, of=micro.total)


def resumed(turns: list[Turn], at: Position) -> list[Turn]:
    """The turns of the batch at which ``at`` stands that are still to come.

    Raises DataError if ``at`` lies inside a window that is now cut in another way.
    """
    if at.micro and turns and turns[0].micro.total != at.of:
        raise DataError(
            f"the state stands at micro-batch {at.micro} of {at.of} of step {at.step}, but this plan cuts that batch "
            f"into {turns[0].micro.total}; use accumulate={at.of} again, or save the state at the end of a window"
        )
    return [turn for turn in turns if turn.micro.index >= at.micro]


def batch_share(batch_size: int, seat: Seat, split: Split) -> int:
    """How many samples of its own order a reader takes per batch: all, or under ``Local`` the rank's share."""
    return Partition.even(batch_size, seat.size).sizes[seat.rank] if split.local else batch_size
