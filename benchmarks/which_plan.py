"""The page "Which plan for which network": ``python -m benchmarks.which_plan`` writes docs/which-plan.md from the results.

Every number and every sentence that compares comes from slow-networks.json and quality.json; what a plan costs by its
construction stands in COSTS.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cells import ROOT
from benchmarks.contenders import CONTENDERS, EXACT_SHARE, LEAST_EXACT, NO_EXACT_STEPS
from benchmarks.quality_report import BASELINE, losses, over_exact, signed, tasks_of
from benchmarks.report import summaries_of
from benchmarks.results import RESULTS, read, say
from benchmarks.targets import faster
from benchmarks.timed import MODEL, curves, mean_curve, seconds_to

PAGE = ROOT / "docs/which-plan.md"
NETWORKS = {"lab-1000": "1 Gbit/s", "lab-100": "100 Mbit/s"}
MODELS = {"big": "large transformer, few tokens", "conv": "conv net", "text": "small transformer"}
LOSSES = (0.003, 0.01)  # over exact, that somebody may accept
WORTH = 1.03  # a plan that is not this much faster than a more exact one is not worth its loss
TARGET_SLACK = 0.01  # of the exact loss, for the time to reach it
COSTS = {  # from the most exact to the least
    "exact": "nothing: the same answer as one machine",
    "bf16": "rounds what travels to 8 bits of precision; sums stay float32",
    "q8": "rounds what travels to 8 bits; keeps what was lost (one more copy of the gradients)",
    "q4": "rounds what travels to 4 bits; keeps what was lost (one more copy of the gradients)",
    "lowrank-r16": "sends one factor of a rank-16 product a step; keeps what was lost (one more copy of the gradients)",
    "delayed-q4": "as q4, and every step uses the gradient of the batch before; the last batch's is never used",
    "exact-h8": "ranks differ between agreements; one more copy of the weights and a velocity",
    "q4-h8": "ranks differ between agreements; one more copy of the weights, a velocity, and what was lost",
    "q4-h8-late": "as q4-h8, what was agreed is taken six steps later; one more copy of the weights",
}
PLANS = {name: CONTENDERS[name] for name in COSTS}


def page(slow: Mapping[str, Any], quality: Mapping[str, Any]) -> str:
    """The whole page."""
    parts = [part for part in slow["parts"] if "summaries" in part]
    runs = quality["runs"]
    lines = [
        "# Which plan for which network",
        "",
        "Made by `python -m benchmarks.which_plan` from [the speeds](../benchmarks/results/slow-networks.md) and",
        "[the losses](../benchmarks/results/quality.md), which say on what machine. Do not edit it by hand.",
        "",
        "Write the plan as `gw.Plan(sync=...)`, or `sync = ...` in a plan file. Times as fast as DDP: the same training by",
        "PyTorch's DDP in float32 on the same two ranks; median. Loss over exact: held-out loss after the same batches,",
        "mean over the seeds (lowest to highest). Plans with local steps begin with exact ones: the speeds leave them out",
        f"(`{NO_EXACT_STEPS}`), the losses were made with {EXACT_SHARE:.0%} of the run, at least {LEAST_EXACT}.",
        "",
        f"Repetitions of each speed: {slow['about']['repetitions']}. Seeds of each loss: {_seeds(runs)}. A difference that the",
        "seeds do not agree on is the noise of training: DDP's half precision, which rounds once, shows how large it is.",
        "",
        *_table(parts, runs),
        "",
        "## PyTorch's own ways, beside them",
        "",
        *_speed_table(parts, runs, [name for name in CONTENDERS if name not in PLANS and name != "ddp"]),
        "",
        "`alone` and `apart` are what no network at all would give.",
        "",
        "## What to choose",
        "",
        *_advice(parts, runs),
        "",
        *_time_to_loss(slow, runs),
        "## What it costs",
        "",
        *(f"- `{_sync(name)}`: {cost}." for name, cost in COSTS.items()),
        "",
        "The hosts were namespaces of one machine: the wires had the rate given and no delay of their own. On a network with",
        "much delay, fewer exchanges (`local`) gain more than this page shows. Losses are of small models and short runs;",
        "try yours.",
    ]
    return "\n".join(lines) + "\n"


def _seeds(runs: Sequence[Mapping[str, Any]]) -> str:
    counts = Counter((run["task"], run["variant"]) for run in runs).values()
    return " to ".join(str(count) for count in sorted({min(counts), max(counts)})) if counts else "none"


def _sync(name: str) -> str:
    """The plan's text without the exact first steps that only a measurement of speed leaves out."""
    return CONTENDERS[name].how.removeprefix('Plan(sync="').removesuffix('")').removesuffix(f",{NO_EXACT_STEPS}")


def _where(part: Mapping[str, Any]) -> str:
    return f"{NETWORKS.get(part['cell'], part['cell'])}, {MODELS.get(part['model'], part['model'])}"


def _speed(part: dict[str, Any], name: str) -> str:
    found = faster(part, name, "ddp")
    return "" if found is None else f"{found.median:.2f}"


def _speed_table(parts: Sequence[dict[str, Any]], runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    heads = [
        "times as fast as DDP",
        *(_where(part) for part in parts),
        *(f"loss over exact, {task}" for task, _ in tasks_of(runs)),
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in names:
        cells = [f"`{name}`", *(_speed(part, name) for part in parts), *_losses(runs, name)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _losses(runs: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """How much was lost on each task; empty where it was not trained, or is what the others are compared with."""
    found = [over_exact(losses(runs, task, steps), name) for task, steps in tasks_of(runs)]
    return ["" if loss is None or name == BASELINE else signed(loss) for loss in found]


def _table(parts: Sequence[dict[str, Any]], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    model = MODELS.get(parts[0]["model"], parts[0]["model"]) if parts else ""
    heads = ["plan", *(_where(part) for part in parts), f"bytes a parameter and step, {model}"]
    heads += [f"loss over exact, {task}" for task, _ in tasks_of(runs)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in PLANS:
        sent = _sent(parts[:1], name)
        cells = [f"`{_sync(name)}`", *(_speed(part, name) for part in parts)]
        cells.append("" if sent is None else f"{sent:.2g}")
        lines.append(f"| {' | '.join([*cells, *_losses(runs, name)])} |")
    return lines


def _sent(parts: Sequence[dict[str, Any]], name: str) -> float | None:
    """By the formula, where there is one: an exchange that straddles the measured window is counted too often or too rarely.

    Else what was measured, which holds for the shapes of this model; None without either.
    """
    if (formula := CONTENDERS[name].bytes_per_parameter) is not None:
        return formula
    found = [each.sent for part in parts for each in summaries_of(part) if each.variant == name]
    return found[0].median if found and found[0] is not None else None


def _worst(runs: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """The largest mean difference to exact training over the tasks; None if it was not trained."""
    found = [over_exact(losses(runs, task, steps), name) for task, steps in tasks_of(runs)]
    return max((each.median for each in found if each is not None), default=None)


def _best(part: dict[str, Any], names: Sequence[str]) -> tuple[str, float] | None:
    """The plan to take: from the most exact one on, another only if it is WORTH it."""
    best: tuple[str, float] | None = None
    for name in names:
        found = faster(part, name, "ddp")
        if found is not None and (best is None or found.median > WORTH * best[1]):
            best = name, found.median
    return best


def _advice(parts: Sequence[dict[str, Any]], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    losses_of = {name: 0.0 if name == BASELINE else _worst(runs, name) for name in PLANS}
    lines = [
        f"Of plans within {WORTH - 1:.0%} of each other's speed the more exact one is named. The loss of a plan is its mean over",
        "exact training on the task where it loses more; plans that were not trained here are left out of the limits.",
        "",
    ]
    for part in parts:
        choices: dict[str, str] = {}
        for limit in LOSSES:
            allowed = [name for name, lost in losses_of.items() if lost is not None and lost <= limit]
            if (best := _best(part, allowed)) is not None:
                choices.setdefault(best[0], f"at most {limit:.1%} lost: `{_sync(best[0])}` ({best[1]:.1f} times DDP)")
        if (best := _best(part, list(PLANS))) is not None:
            lost = losses_of[best[0]]
            loss = "its loss was not measured" if lost is None else f"{lost:+.1%} loss"
            choices.setdefault(best[0], f"fastest: `{_sync(best[0])}` ({best[1]:.1f} times DDP, {loss})")
        if choices:
            lines.append(f"- {_where(part)}: {'; '.join(choices.values())}.")
    return lines


def _time_to_loss(slow: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    exact = mean_curve(runs, BASELINE)
    found = {cell: curves(slow, runs, cell) for cell in NETWORKS}
    if not exact or not any(found.values()):
        return []
    target = exact[-1][1] * (1 + TARGET_SLACK)
    lines = [
        "## Time to the same loss",
        "",
        "![Loss over wall-clock time at 100 Mbit/s and 1 Gbit/s](../benchmarks/results/loss-over-time.svg)",
        "",
        f"Seconds until the held-out loss of the {MODELS[MODEL]} is {target:.3f}, which is {TARGET_SLACK:.0%} above where exact",
        "training ended; evaluation left out; empty: never in this run.",
        "",
        f"| variant | {' | '.join(NETWORKS.values())} |",
        "|---" * (len(NETWORKS) + 1) + "|",
    ]
    for name in CONTENDERS:
        if any(name in each for each in found.values()):
            times = [seconds_to(each[name], target) if name in each else None for each in found.values()]
            lines.append(f"| `{name}` | {' | '.join('' if time is None else f'{time:.0f}' for time in times)} |")
    return [*lines, ""]


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.which_plan", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the two results")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    slow, quality = read(args.results / "slow-networks.json"), read(args.results / "quality.json")
    if not slow or not quality:
        say(f"{args.results} lacks slow-networks.json (make bench-slow) or quality.json (make quality)")
        return 1
    args.page.write_text(page(slow, quality))
    print(args.page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
