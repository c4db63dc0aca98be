"""The driver for slow networks: ``python -m benchmarks.slow_networks`` (``make bench-slow``; root).

Two hosts, one pinned core each, wires of 1,000 and 100 Mbit/s; PyTorch's ways, gradwire's plans and training without a
network take turns, A B C, A B C, ..., each time in fresh processes. Writes benchmarks/results/slow-networks.json and .md.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cells import CELLS, Place, RunFailedError, opened
from benchmarks.contenders import CONTENDERS
from benchmarks.lab import LabError
from benchmarks.lab.line import measure as measure_line
from benchmarks.report import Summary, keep, markdown, summaries_of, summarize, window_s
from benchmarks.results import RESULTS, about, say, write
from benchmarks.targets import bytes_lines, speed_lines
from benchmarks.turns import take_turns
from benchmarks.workloads import WORKLOADS

BASELINE = "ddp"
TIMEOUT_S = 180.0
NETWORK = "namespaces with shaped wires (tbf); no delay or loss is added"
NOTES = (
    "A step is the mean over the measured steps of the slower rank, whole windows of a plan's exchanges only; median over",
    "the repetitions (lowest-highest). Speed is taken within each repetition, whose variants run one after the other.",
    "One pinned core and one torch thread a rank. Bytes: what a rank's network card counted in the measured steps, headers and",
    "everything else included, per parameter and step, over 2(n-1)/n (which is 1 for two ranks). Processor: how long the",
    "training thread + the rank's other threads were on the core in a step; the rest of the step the core waited for the",
    "network, or worked for it in the kernel. Limit: what no network at all (`alone`) reaches against the same rival.",
)


def main() -> int:
    """Measure the cells asked for; what is done is written after every part."""
    args = _arguments()
    result: dict[str, Any] = {
        "name": args.name,
        "about": about("benchmarks.slow_networks", NETWORK, args.repetitions),
        "parts": [],
    }
    for cell in args.cells:
        for model in args.models:
            result["parts"].append(_part_or_reason(cell, model, args.variants, args.repetitions))
            write(result, words(result), args.results)
    return int(any(part.get("failures") or "not_run" in part for part in result["parts"]))


def _arguments() -> argparse.Namespace:
    cells = [name for name, cell in CELLS.items() if cell.rate_mbit is not None]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_networks", description=__doc__)
    parser.add_argument("--cells", nargs="+", choices=cells, default=cells)
    parser.add_argument("--models", nargs="+", choices=sorted(WORKLOADS), default=["big", "conv", "text"])
    parser.add_argument("--variants", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--name", default="slow-networks", help="of the two files written")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder they go to")
    args = parser.parse_args()
    if args.repetitions < 1:
        parser.error("--repetitions must be at least 1; 5 or more for a result that can be believed")
    if BASELINE not in args.variants:
        parser.error(f"--variants must name {BASELINE}: the others are compared with it")
    return args


def _part_or_reason(cell: str, model: str, variants: list[str], repetitions: int) -> dict[str, Any]:
    try:
        with opened(replace(CELLS[cell], timeout_s=TIMEOUT_S)) as place:
            return _part(place, model, variants, repetitions)
    except LabError as error:
        reason = str(error)
    except RunFailedError as error:
        reason = str(error)
    say(reason)
    return {"cell": cell, "model": model, "not_run": reason.strip().splitlines()[-1]}


def _part(place: Place, model: str, variants: list[str], repetitions: int) -> dict[str, Any]:
    """One cell and model: measure the line, take turns."""
    if place.lab is None:
        raise ValueError(f"cell {place.cell.name} has no network that could be slow")
    line = f"{measure_line(place.lab) * 8 / 1e6:.0f} of {place.cell.rate_mbit:g} Mbit/s"
    parameters = sum(parameter.numel() for parameter in WORKLOADS[model].model(0).parameters())
    runs = {
        name: (replace(place, cell=CONTENDERS[name].fitted(place.cell, parameters)), CONTENDERS[name].variant)
        for name in variants
    }
    rows, failures = take_turns(runs, model, repetitions)
    if BASELINE not in rows:
        raise RunFailedError(f"the baseline failed: {failures[BASELINE]}")
    baseline = rows[BASELINE]
    summaries = [
        summarize(name, each, baseline, seconds=window_s, bytes_per_parameter=1.0) for name, each in rows.items()
    ]
    steps = ", ".join(f"{name} {where.cell.steps} after {where.cell.warm_up}" for name, (where, _) in runs.items())
    return {
        "cell": place.cell.name,
        "model": model,
        "baseline": BASELINE,
        "about": {"line, measured": line, "parameters": f"{parameters:,}", "steps": steps}
        | {f"{name} failed": last for name, last in failures.items()},
        "summaries": [keep(each) for each in summaries],
        "rows": rows,
        "failures": failures,
    }


def words(result: dict[str, Any]) -> str:
    """The whole result for people: a table for each network and model, then the targets."""
    text = markdown(result, notes=NOTES, part_table=lambda part: table(summaries_of(part)))
    lines = ["", "## Targets", "", *speed_lines(result["parts"]), "", *bytes_lines(result["parts"])]
    return text + "\n".join(lines) + "\n"


def table(summaries: list[Summary]) -> list[str]:
    """The lines of one part's table."""
    lines = [
        f"| variant | how | step, ms | times as fast as {BASELINE} | bytes a parameter and step | formula | processor, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in summaries:
        contender = CONTENDERS[each.variant]
        formula = contender.bytes_per_parameter
        cells = [
            each.variant,
            contender.how,
            each.step_s.words(1e3, ".0f"),
            each.ratio.inverse().words(1, ".2f"),
            "" if each.sent is None else each.sent.words(1, ".3f"),
            "by shape" if formula is None else f"{formula:.3g}",
            f"{each.training_thread_s.median * 1e3:.0f} + {each.other_threads_s.median * 1e3:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
