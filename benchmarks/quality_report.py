"""From quality runs to a table: each variant's loss beside that of exact training with the same seed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.contenders import CONTENDERS, for_quality
from benchmarks.report import Span
from benchmarks.targets import POWERSGD

BASELINE = "exact"
WITHIN: Mapping[str, float] = {"q4": 0.003, "q4-h8": 0.01}  # of the exact loss
LOWRANK = "lowrank-r16"

Run = Mapping[str, Any]  # what quality.one gives
NOTES = (
    "Loss on held-out data after the same batches in the same order, two ranks. Over exact: the relative difference to exact",
    "training with the same seed, mean over the seeds (lowest to highest); below 0 is better than exact. The seeds of exact",
    "training itself lie so far apart: see its row. A difference well inside that spread says that nothing was seen, not",
    "that there is none.",
)


def losses(runs: Sequence[Run], task: str, steps: int) -> dict[str, dict[int, float]]:
    """variant -> seed -> final loss."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        if run["task"] == task and run["steps"] == steps:
            found.setdefault(run["variant"], {})[run["seed"]] = run["loss"]
    return found


def differences(found: Mapping[str, Mapping[int, float]], variant: str) -> list[float]:
    """The relative difference to exact training, for each seed that has both."""
    exact, other = found.get(BASELINE, {}), found.get(variant, {})
    return [other[seed] / exact[seed] - 1 for seed in sorted(exact.keys() & other.keys())]


def over_exact(found: Mapping[str, Mapping[int, float]], variant: str) -> Span | None:
    """The relative difference to exact training; None if no seed has both. ``median`` holds the mean."""
    each = differences(found, variant)
    return Span(median=mean(each), low=min(each), high=max(each)) if each else None


def tasks_of(runs: Sequence[Run]) -> list[tuple[str, int]]:
    """(task, steps) of these runs, in the order in which they were first run."""
    return list(dict.fromkeys((run["task"], run["steps"]) for run in runs))


def table(runs: Sequence[Run], task: str, steps: int) -> list[str]:
    """The lines of one task's table."""
    found = losses(runs, task, steps)
    lines = ["| variant | how | seeds | loss | over exact |", "|---|---|---|---|---|"]
    for variant, by_seed in found.items():
        loss = Span.of(list(by_seed.values()))
        difference = over_exact(found, variant)
        how = for_quality(CONTENDERS[variant], steps).how
        cells = [variant, how, str(len(by_seed)), f"{mean(by_seed.values()):.4f} ({loss.low:.4f}-{loss.high:.4f})"]
        lines.append(f"| {' | '.join(cells)} | {'' if difference is None else signed(difference)} |")
    return lines


def signed(difference: Span) -> str:
    """As the table shows it.

    >>> signed(Span(median=0.001, low=-0.0005, high=0.002))
    '+0.10 % (-0.05 to +0.20)'
    """
    mid, low, high = (100 * each for each in (difference.median, difference.low, difference.high))
    return f"{mid:+.2f} % ({low:+.2f} to {high:+.2f})"


def target_lines(runs: Sequence[Run], task: str, steps: int) -> list[str]:
    """What was promised of the loss, beside what was measured."""
    found = losses(runs, task, steps)
    lines = ["| variant | over exact | target | met by the mean | met by the seeds |", "|---|---|---|---|---|"]
    limits = {variant: (limit, f"at most {limit:+.1%}") for variant, limit in WITHIN.items()}
    if (powersgd := over_exact(found, POWERSGD)) is not None:
        limits[LOWRANK] = (powersgd.median, f"no worse than PowerSGD r4: {signed(powersgd)}")
    for variant, (limit, said) in limits.items():
        difference = over_exact(found, variant)
        if difference is not None:
            met = "yes" if difference.median <= limit else "**no**"
            each = differences(found, variant)
            share = f"{sum(value <= limit for value in each)} of {len(each)}"
            lines.append(f"| {variant} | {signed(difference)} | {said} | {met} | {share} |")
    return lines


def words(result: Mapping[str, Any]) -> str:
    """The whole result for people."""
    lines = [f"# {result['name']}", "", *(f"- {key}: {value}" for key, value in result["about"].items()), "", *NOTES]
    for task, steps in tasks_of(result["runs"]):
        lines += ["", f"## {task}, {steps} steps", "", *table(result["runs"], task, steps)]
        lines += ["", *target_lines(result["runs"], task, steps)]
    return "\n".join(lines) + "\n"
