"""`Sizing`: the bucket size follows the measured link and backward time, once."""

from __future__ import annotations

from gradwire.core.reducer import Link, Reducer
from gradwire.sync.buckets import best_bucket_bytes
from gradwire.sync.exchange import Exchange

MEASURED_EXCHANGE = 3  # the first ones warm up


class Sizing:
    """Counts exchanges, which are the same on all ranks; after the third all ranks decide alike, by rank 0's figures.

    wanted: a better bucket size, to be used from the next exchange on; None: the present one.
    """

    def __init__(self, exchange: Exchange, reducer: Reducer, link: Link, *, total_bytes: int, fixed: bool) -> None:
        self._exchange = exchange
        self._reducer = reducer
        self._link = link
        self._total_bytes = total_bytes
        self._fixed = fixed
        self.exchanges = 0
        self.wanted: int | None = None

    def exchanged(self, backward_s: float) -> None:
        """An exchange has ended. Waits, the third time."""
        self.exchanges += 1
        if self.exchanges != MEASURED_EXCHANGE or self._fixed:
            return
        # Rank 0 says too whether the layout may change: of a host's ranks only the first remembers what was not sent.
        mine = [self._link.latency_s, self._link.bandwidth_bytes_per_s, backward_s, float(self._exchange.stateless)]
        latency_s, bandwidth, backward_s, stateless = self._exchange.measure(mine)
        if not stateless:
            return
        link = Link(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, num_ranks=self._link.num_ranks)
        exchange_s = self._reducer.cost(self._total_bytes // 4, link) - latency_s
        self.wanted = best_bucket_bytes(self._total_bytes, exchange_s, latency_s=latency_s, backward_s=backward_s)
