"""Loss over wall-clock time: quality runs times the seconds that a step takes on a network. Pure.

What a plan computes does not depend on how fast the network is, so a curve of loss over steps, measured once, becomes a curve
over time on each network by the seconds a step of the same model was measured to take there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.contenders import CONTENDERS, for_quality
from benchmarks.report import summaries_of

MODEL = "text"
SAME_LOSS = {"ddp": "exact"}  # DDP and exact plans compute the same mean: one curve of loss serves both

Curve = list[tuple[float, float]]  # (seconds, loss)


def part_of(slow: Mapping[str, Any], cell: str, model: str) -> dict[str, Any] | None:
    """What was measured for one network and model; None if it was not."""
    found = [part for part in slow.get("parts", []) if (part["cell"], part["model"]) == (cell, model)]
    return found[0] if found and "summaries" in found[0] else None


def mean_curve(runs: Sequence[Mapping[str, Any]], variant: str) -> list[tuple[int, float]]:
    """(step, loss): the mean over the seeds of the longest runs of this variant on MODEL."""
    mine = [run for run in runs if run["task"] == MODEL and run["variant"] == SAME_LOSS.get(variant, variant)]
    longest = max((run["steps"] for run in mine), default=0)
    points = zip(*(run["curve"] for run in mine if run["steps"] == longest), strict=True)
    return [(seeds[0][0], mean(seed[2] for seed in seeds)) for seeds in points]


def curves(slow: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], cell: str) -> dict[str, Curve]:
    """variant -> loss over seconds on this network, for every variant that has both speed and quality."""
    part = part_of(slow, cell, MODEL)
    if part is None:
        return {}
    step_s = {each.variant: each.step_s.median for each in summaries_of(part)}
    found: dict[str, Curve] = {}
    for variant in step_s:
        steps = mean_curve(runs, variant)
        if steps:
            first = for_quality(CONTENDERS[variant], steps[-1][0]).exact_steps
            slower_s = step_s.get("exact", 0.0) - step_s[variant] if first else 0.0
            found[variant] = [(step * step_s[variant] + min(step, first) * slower_s, loss) for step, loss in steps]
    return found


def seconds_to(curve: Curve, loss: float) -> float | None:
    """When the curve first is at or below ``loss``, in a straight line between evaluations; None if it never is.

    >>> seconds_to([(10.0, 3.0), (20.0, 2.0)], 2.5)
    15.0
    """
    before: tuple[float, float] | None = None
    for time_s, value in curve:
        if value <= loss:
            if before is None or before[1] == value:
                return time_s
            part = (before[1] - loss) / (before[1] - value)
            return before[0] + part * (time_s - before[0])
        before = time_s, value
    return None
