"""Where to cut an ordered list of units into stages: the slowest stage as fast as can be. Pure, and exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gradwire.errors import PlanError

STATE_FACTOR = 4  # a parameter, its gradient, and Adam's two moments


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The smallest part of a model that is never cut, and what one micro-batch of it costs.

    forward_s, backward_s: on a worker of speed 1. parameter_bytes: of what it trains. activation_bytes: kept from its forward
    until its backward. sent_bytes: what travels on if the model is cut behind it.
    """

    name: str
    forward_s: float = 1.0
    backward_s: float = 2.0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    sent_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.backward_s


def balance(
    units: Sequence[Unit],
    *,
    num_ranks: int,
    stages_per_rank: int = 1,
    speeds: Sequence[float] = (),
    memory_bytes: Sequence[int] = (),
    live: Sequence[int] = (),
    slack: float = 0.0,
) -> tuple[int, ...]:
    """Cut ``units`` so that the slowest stage, stage s on rank ``s % num_ranks``, takes the least time.

    speeds, memory_bytes: by rank; empty: alike, unlimited. live: micro-batches whose activations a stage holds at once,
    by stage; empty: 1. slack: among all cuts at most so much slower than the best (0.05: 5 %) the one that sends least.
    With several stages a rank each may use its part of the rank's memory. A stage's memory is `stage_bytes`.

    Returns the first unit of each stage after the first. Raises PlanError if there are fewer units than stages, or no cut
    fits the memory. Dynamic programming: units^2 x stages.

    >>> balance([Unit(name=str(i), forward_s=s, backward_s=0) for i, s in enumerate([1, 1, 1, 3])], num_ranks=2)
    (3,)
    """
    num_stages = num_ranks * stages_per_rank
    if len(units) < num_stages:
        raise PlanError(
            f"the model has {len(units)} blocks ({', '.join(u.name for u in units)}), too few for {num_stages} stages; use "
            f"pipeline={max(1, len(units) // stages_per_rank)} or a model with more blocks"
        )
    costs = _Costs(units, num_ranks, num_stages, speeds, memory_bytes, live)
    slowest_s = _slowest(costs)
    if math.isinf(slowest_s):
        raise PlanError(costs.why_nothing_fits())
    return _least_sent(costs, slowest_s * (1 + slack) + 1e-12 * slowest_s)


def stage_bytes(units: Sequence[Unit], live: int) -> int:
    """Parameters, gradients and two numbers of optimizer state for each, and the activations of ``live`` micro-batches."""
    return sum(STATE_FACTOR * unit.parameter_bytes + live * unit.activation_bytes for unit in units)


class _Costs:
    """Time of any run of units on any stage in O(1); infinite where its memory does not fit."""

    def __init__(
        self,
        units: Sequence[Unit],
        num_ranks: int,
        num_stages: int,
        speeds: Sequence[float],
        memory_bytes: Sequence[int],
        live: Sequence[int],
    ) -> None:
        self.units, self.num_ranks, self.num_stages = units, num_ranks, num_stages
        self._speeds = speeds or [1.0] * num_ranks
        self._limits = [limit * num_ranks / num_stages for limit in memory_bytes or [math.inf] * num_ranks]
        self._live = live or [1] * num_stages
        self._seconds = [0.0, *accumulate(unit.seconds for unit in units)]
        self._states = [0, *accumulate(STATE_FACTOR * unit.parameter_bytes for unit in units)]
        self._activations = [0, *accumulate(unit.activation_bytes for unit in units)]

    def seconds(self, stage: int, start: int, stop: int) -> float:
        rank = stage % self.num_ranks
        if self._bytes(stage, start, stop) > self._limits[rank]:
            return math.inf
        return (self._seconds[stop] - self._seconds[start]) / self._speeds[rank]

    def _bytes(self, stage: int, start: int, stop: int) -> int:
        activations = self._activations[stop] - self._activations[start]
        return self._states[stop] - self._states[start] + self._live[stage] * activations

    def why_nothing_fits(self) -> str:
        needs = self._states[-1] + max(self._live) * self._activations[-1]
        limits = ", ".join(f"{limit:,.0f}" for limit in self._limits)
        return (
            f"no cut of {len(self.units)} blocks into {self.num_stages} stages fits pipeline.memory_bytes ({limits} a stage); "
            f"all blocks together need about {needs:,} bytes with what is trained, its gradients, optimizer state and "
            f"{max(self._live)} micro-batches; use more stages, smaller micro-batches, or shard them"
        )


def _slowest(costs: _Costs) -> float:
    """The least possible time of the slowest stage."""
    n = len(costs.units)
    best = [0.0] + [math.inf] * n  # best[stop]: units before stop in the stages so far
    for stage in range(costs.num_stages):
        best = [math.inf] + [
            min(max(best[start], costs.seconds(stage, start, stop)) for start in range(stop))
            for stop in range(1, n + 1)
        ]
    return best[n]


def _least_sent(costs: _Costs, limit_s: float) -> tuple[int, ...]:
    """The cuts that send the fewest bytes with no stage above ``limit_s``; of equal ones the most even."""
    n = len(costs.units)
    none: tuple[float, float, tuple[int, ...]] = (math.inf, math.inf, ())
    best = [(0.0, 0.0, ())] + [none] * n  # bytes, sum of squared times, cuts

    def extended(start: int, stop: int, stage: int) -> tuple[float, float, tuple[int, ...]]:
        seconds, (sent, squares, cuts) = costs.seconds(stage, start, stop), best[start]
        if seconds > limit_s or math.isinf(sent):
            return none
        sent += costs.units[stop - 1].sent_bytes if stop < n else 0
        return sent, squares + seconds**2, (*cuts, start) if stage else ()

    for stage in range(costs.num_stages):
        best = [none] + [min(extended(start, stop, stage) for start in range(stop)) for stop in range(1, n + 1)]
    return best[n][2]
