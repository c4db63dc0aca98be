"""What this rank's gradient counts: its samples, an explicit count, or the same as everybody's."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.comm.world import World
from gradwire.core.microbatch import Microbatch, MicrobatchSource
from gradwire.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Weight:
    """The gradient of one backward counts ``count`` of ``total`` (None: only an exchange can tell)."""

    count: float
    total: float | None


class Weighting:
    """Where a `GradientSync` learns its weights: from the attached loader, or from ``gw.weight``.

    The local mean loss of rank r has gradient g_r; the mean over all samples has sum_r (n_r / N) g_r.
    """

    def __init__(self, world: World, source: MicrobatchSource | None) -> None:
        self._world = world
        self._source = source
        self._used_serial = world.weight_serial
        self._running: Weight | None = None

    @property
    def microbatch(self) -> Microbatch | None:
        """What the loop holds; None without a loader."""
        return self._source.current if self._source else None

    def current(self) -> Weight:
        """The weight of the backward that runs, or else of the next one."""
        return self._running or self._next()

    def begin(self) -> Weight:
        """A backward begins; an explicit ``gw.weight`` is used up by it."""
        weight = self._running = self._next()
        self._used_serial = self._world.weight_serial
        return weight

    def end(self) -> None:
        """It ended."""
        self._running = None

    def _next(self) -> Weight:
        micro = self.microbatch
        explicit = self._world.weight_serial != self._used_serial
        if micro is not None and micro.samples == 0:  # a stand-in, whatever the loop counted on it
            return Weight(count=0.0, total=None if explicit else micro.window_samples)
        if explicit:
            return Weight(count=self._world.weight, total=None)
        if micro is not None:
            return Weight(count=micro.samples, total=micro.window_samples)
        self._refuse_unknown_loader()
        return Weight(count=1.0, total=float(self._world.size))

    def _refuse_unknown_loader(self) -> None:
        if self._world.size > 1 and self._world.reading is not None:
            raise UsageError(
                "a gw.DataLoader feeds this backward, but gw.distribute does not know it, so its samples cannot be "
                "weighed; call gw.distribute(model, optimizer, loader)"
            )
