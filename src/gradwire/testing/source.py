"""`ListSource`: a loader over batches in memory, for tests that are not about loading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from gradwire.comm.world import World
from gradwire.core.microbatch import Microbatch
from gradwire.core.partition import Partition

Batch = tuple[Tensor, ...]


class ListSource:
    """Global batches, each a tuple of tensors (N, ...), parted evenly or in ``shares`` over the ranks of ``world``."""

    def __init__(self, batches: Sequence[Batch], world: World, *, shares: Sequence[float] | None = None) -> None:
        self._batches = batches
        self._world = world
        self._shares = list(shares or [1.0] * world.num_readers)
        self._accumulate = 1
        self.current: Microbatch | None = None

    def attach(self, accumulate: int) -> None:
        self._accumulate = accumulate

    def example(self) -> Batch:
        return self._batches[0]

    def describe(self) -> dict[str, str | int]:
        return {"length": len(self._batches)}

    def __iter__(self) -> Iterator[Batch]:
        for step, batch in enumerate(self._batches):
            whole = len(batch[0])
            cuts = list(Partition.even(whole, min(self._accumulate, whole)).slices())
            for index, cut in enumerate(cuts):
                micro = tuple(tensor[cut] for tensor in batch)
                part = list(Partition.proportional(len(micro[0]), self._shares).slices())[self._world.reader_rank]
                mine = tuple(tensor[part] for tensor in micro)
                self.current = Microbatch(
                    epoch=0,
                    step=step,
                    index=index,
                    total=len(cuts),
                    samples=len(mine[0]),
                    global_samples=len(micro[0]),
                    window_samples=whole,
                )
                yield mine if len(mine[0]) else tuple(tensor[:1] for tensor in micro)
