"""What this rank's gradient counts: its samples, an explicit count, or the same as everybody's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gradwire.comm.world import World
from gradwire.core.microbatch import Microbatch, MicrobatchSource
from gradwire.errors import UsageError
from gradwire.sync.loading import Loading
from gradwire.sync.opening import Opening


@dataclass(frozen=True, kw_only=True)
class Weight:
    """The gradient of one backward counts ``count`` of ``total`` (None: ``gw.weight`` said so, only an exchange can tell).

    first: no earlier backward had this very weight: a second loss on the same micro-batch does not count its samples again.
    """

    count: float
    total: float | None
    first: bool = True


@dataclass(frozen=True, kw_only=True)
class _Use:
    """Where a weight was taken from."""

    serial: int
    microbatch: Microbatch | None
    explicit: bool

    def same(self, other: _Use) -> bool:
        """The very same turn of the loop and the same ``gw.weight``; equal positions of two passes are not."""
        at = self.microbatch is other.microbatch
        return at and self.serial == other.serial and self.explicit is other.explicit


class Weighting:
    """Where a `GradientSync` learns its weights: from the attached loader, or from ``gw.weight``.

    The local mean loss of rank r has gradient g_r; the mean over all samples has sum_r (n_r / N) g_r. What ``gw.weight``
    said holds for every backward (a reentrant checkpoint has several) until the optimizer steps or the loader moves on.
    A window that spans_batches has a total that only its exchange can tell.
    """

    def __init__(
        self, world: World, source: MicrobatchSource | None, loading: Loading, *, spans_batches: bool = False
    ) -> None:
        self._world = world
        self._loading = loading
        self._spans_batches = spans_batches
        self._source = source
        self._spent_serial = world.weight_serial
        self._used: _Use | None = None
        self._running: Weight | None = None

    @property
    def microbatch(self) -> Microbatch | None:
        """What the loop holds; None without a loader."""
        return None if self._source is None else self._source.current

    @property
    def stand_in(self) -> bool:
        """Whether the loop holds a sample that is not this rank's, only there so that the code has one."""
        micro = self.microbatch
        return micro is not None and micro.samples == 0

    def current(self) -> Weight:
        """The weight of the backward that runs, or else of the next one."""
        return self._running or self._next()

    def begin(self) -> Weight:
        """A backward begins."""
        self._loading.take_up()
        weight = self._next()
        used = _Use(serial=self._world.weight_serial, microbatch=self.microbatch, explicit=weight.total is None)
        self._running = replace(weight, first=self._used is None or not used.same(self._used))
        self._used = used
        return self._running

    def end(self) -> None:
        """It ended."""
        self._running = None

    def opening(self, window: Window) -> Opening:
        """What the exchange of ``window`` opens with."""
        return Opening(
            count=window.count,
            unit=window.unit or 1.0,
            explicit=window.relative,
            microbatch=self.microbatch,
            loaded=self._loading.take(),
        )

    def settle(self) -> None:
        """The optimizer steps: the counts used so far are spent."""
        if self._used is not None:
            self._spent_serial = self._used.serial

    def _next(self) -> Weight:
        weight = self._known()
        return replace(weight, total=None) if self._spans_batches else weight

    def _known(self) -> Weight:
        micro = self.microbatch
        if self.stand_in and micro is not None:
            return Weight(count=0.0, total=micro.window_samples or 1.0)
        if self._explicit(micro):
            return Weight(count=self._world.weight, total=None)
        if micro is not None:
            return Weight(count=micro.samples, total=micro.window_samples)
        self._refuse_unknown_loader()
        return Weight(count=1.0, total=float(self._world.num_readers))

    def _explicit(self, micro: Microbatch | None) -> bool:
        serial = self._world.weight_serial
        moved_on = self._used is not None and self._used.serial == serial and self._used.microbatch is not micro
        return serial != self._spent_serial and not moved_on

    def _refuse_unknown_loader(self) -> None:
        if self._world.size > 1 and self._world.reading is not None:
            raise UsageError(
                "a gw.DataLoader feeds this backward, but gw.distribute does not know it, so its samples cannot be "
                "weighed; call gw.distribute(model, optimizer, loader)"
            )


class Window:
    """What this rank has counted in the window that is open, or was closed last.

    count: the sum of its backwards' counts. unit: what the buckets' sum is divided by. scale: the factor of this backward's
    gradients. With a known total that is n_r/N; otherwise (relative) gradients are kept beside the window's first count, so
    that they are never large, for half precision's sake, and the exchange divides by the total. common_unit: that count is
    1 on all ranks, since some are summed before the exchange.
    """

    def __init__(self, *, common_unit: bool = False) -> None:
        self._common_unit = common_unit
        self.count = 0.0
        self.scale = 1.0
        self.relative = False
        self.closed = False
        self.unit = 0.0

    def begin(self, weight: Weight, *, idle: bool) -> None:
        """A backward begins; idle: one without a gradient of this rank."""
        if self.closed and weight.first:
            self.count, self.unit, self.relative, self.closed = 0.0, 0.0, False, False
        if not idle:
            self._add(weight)

    def _add(self, weight: Weight) -> None:
        count, total = weight.count, weight.total
        explicit = total is None
        if self.count and count and explicit is not self.relative:
            raise UsageError(
                "gw.weight was called for some micro-batches of a window only; call it before each backward"
            )
        if count or not self.count:
            self.relative = explicit
        self.count += count if weight.first else 0.0
        if total is not None and not self.relative:
            self.unit = total
        elif not self.unit:
            self.unit = 1.0 if self._common_unit else count
        self.scale = count / self.unit if self.unit else 0.0

    @property
    def share(self) -> float:
        """What makes the buckets' sum this rank's own mean."""
        return self.unit / self.count if self.count else 0.0

    def local_unit(self, num_readers: int) -> float:
        """Under ``no_sync``, ``.grad`` holds scale x this, so that equal weights leave autograd's own values (as DDP)."""
        return 1.0 if self.relative else float(num_readers)
