"""`StepClock`: where each step's wall time went on this rank: data, compute, exposed exchange."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

KEPT_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class StepAccount:
    """Medians over the last steps of this rank; seconds a step.

    steps: turns of the loop counted. step_s = data_s + compute_s + exchange_s of the median step (each its own median).
    exchange_s: the time the training thread was really blocked, not the time the wire was busy.
    samples_per_s: samples of all ranks over the wall time of all training steps but the first, data waits included.
    """

    steps: int
    step_s: float
    data_s: float
    compute_s: float
    exchange_s: float
    samples_per_s: float

    def __str__(self) -> str:
        parts = (("data", self.data_s), ("compute", self.compute_s), ("exchange", self.exchange_s))
        inside = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in parts)
        return (
            f"step {self.step_s * 1e3:.2f} ms = {inside} (medians of {self.steps}); {self.samples_per_s:,.0f} samples/s"
        )


@dataclass(kw_only=True)
class _Turn:
    """One turn of the loop, from asking for data to asking again."""

    started_s: float
    data_s: float = 0.0
    exchange_s: float = 0.0
    samples: int = 0
    trained: bool = False


class StepClock:
    """Filled in by the loader and the synchroniser; turns without a backward (evaluation) are not counted."""

    def __init__(self) -> None:
        self._turns: deque[tuple[float, float, float]] = deque(maxlen=KEPT_STEPS)
        self._open: _Turn | None = None
        self._steps = 0
        self._samples = 0
        self._seconds = 0.0

    @property
    def steps(self) -> int:
        """Training turns finished so far."""
        return self._steps

    @contextmanager
    def waiting_for_data(self) -> Generator[None]:
        """Wrap the loader's wait for a batch; ends the turn before it and begins the next."""
        now = time.monotonic()
        self._close(now)
        turn = self._open = _Turn(started_s=now)
        try:
            yield
        except BaseException:
            self._open = None
            raise
        turn.data_s = time.monotonic() - now

    def trained(self, *, exchange_s: float, samples: int) -> None:
        """A backward ended; the training thread was blocked in the exchange for ``exchange_s``."""
        now = time.monotonic()
        if self._open is None:
            self._open = _Turn(started_s=now)
        elif self._open.trained and self._open.data_s == 0.0:
            self._close(now)  # nobody's loader tells the turns apart: each backward is one
            self._open = _Turn(started_s=now)
        self._open.trained = True
        self._open.exchange_s += exchange_s
        self._open.samples += samples

    def blocked(self, seconds: float) -> None:
        """The training thread was blocked in an exchange after its backward: the ranks agreed on their parameters."""
        if self._open is not None:
            self._open.exchange_s += seconds

    def account(self) -> StepAccount:
        """The medians so far; zeros before the first full step."""
        columns = list(zip(*self._turns, strict=True)) or [(0.0,)] * 3
        step_s, data_s, exchange_s = (median(column) for column in columns)
        compute_s = median([step - data - exchange for step, data, exchange in self._turns] or [0.0])
        rate = self._samples / self._seconds if self._seconds else 0.0
        return StepAccount(
            steps=self._steps,
            step_s=step_s,
            data_s=data_s,
            compute_s=compute_s,
            exchange_s=exchange_s,
            samples_per_s=rate,
        )

    def usual_step_s(self) -> float:
        """Median seconds a step, 0 before the first."""
        recent = list(self._turns)[-50:]
        return median(turn[0] for turn in recent) if recent else 0.0

    def _close(self, now: float) -> None:
        turn, self._open = self._open, None
        if turn is None or not turn.trained:
            return
        seconds = now - turn.started_s
        self._turns.append((seconds, turn.data_s, turn.exchange_s))
        self._steps += 1
        if self._steps > 1:  # the first step warms up: allocations, thread pools, lazy imports
            self._samples += turn.samples
            self._seconds += seconds
