"""The driver: ``python -m benchmarks.run --cells loopback --models conv --repetitions 5`` (``make bench`` runs all).

In every cell the variants take turns, A B C, A B C, ..., each time in fresh processes, so that whatever else the
machine does hits all of them. DDP's bucket size is swept once before, and the best of the sweep takes part beside the
default. Writes benchmarks/results/NAME.json (every number) and NAME.md (the tables).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks.cells import (
    CELLS,
    DDP,
    GRADWIRE_RUN,
    PLAIN,
    Place,
    RunFailedError,
    ddp_with,
    opened,
)
from benchmarks.lab import LabError
from benchmarks.lab.line import measure as measure_line
from benchmarks.report import keep, markdown, step_s, summarize
from benchmarks.results import RESULTS, about, say, write
from benchmarks.turns import take_turns
from benchmarks.workloads import WORKLOADS

SWEEP_MB = (1, 4, 25)
MODELS = ("conv", "transformer")
NETWORK = "loopback, or namespaces with shaped wires (tbf); no delay or loss is added"


def main() -> int:
    """Run the cells asked for; what is done is written after every part."""
    args = _arguments()
    result: dict[str, Any] = {
        "name": args.name,
        "about": about("benchmarks.run", NETWORK, args.repetitions),
        "parts": [],
    }
    failed = False
    for cell in args.cells:
        for model in args.models:
            try:
                with opened(CELLS[cell]) as place:
                    part = _part(place, model, args.repetitions, with_gradwire=not args.ddp_only)
            except LabError as error:
                part = {"cell": cell, "model": model, "not_run": str(error)}
            except RunFailedError as error:
                failed = True
                say(str(error))
                part = {"cell": cell, "model": model, "not_run": "a run failed"}
            failed = failed or bool(part.get("failures"))
            result["parts"].append(part)
            write(result, markdown(result), args.results)
    return int(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--models", nargs="+", choices=sorted(WORKLOADS), default=list(MODELS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--name", default="ddp-and-gradwire", help="of the two files written")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder they go to")
    parser.add_argument("--ddp-only", action="store_true", help="leave gradwire out (to try the machine)")
    args = parser.parse_args()
    if args.repetitions < 1:
        parser.error("--repetitions must be at least 1; 5 or more for a result that can be believed")
    return args


def _part(place: Place, model: str, repetitions: int, *, with_gradwire: bool) -> dict[str, Any]:
    """One cell and model: measure the line, sweep DDP, take turns."""
    cell = place.cell
    facts: dict[str, str] = {"ranks": str(cell.ranks), "steps": f"{cell.steps} after {cell.warm_up}"}
    if place.lab is not None:
        facts["line, measured"] = f"{measure_line(place.lab) * 8 / 1e6:.0f} of {cell.rate_mbit:g} Mbit/s"
    variants = [PLAIN] if cell.ranks == 1 else [DDP]
    if cell.ranks > 1:
        best, swept = _sweep(place, model)
        facts["DDP sweep, ms"] = ", ".join(f"{size:g} MB {1e3 * each:.0f}" for size, each in swept.items())
        variants.append(ddp_with(best))
    if with_gradwire:
        variants.append(GRADWIRE_RUN)
    rows, failures = take_turns({variant.name: (place, variant) for variant in variants}, model, repetitions)
    baseline = variants[0].name
    if baseline not in rows:
        raise RunFailedError(f"the baseline failed: {failures[baseline]}")
    facts |= {f"{name} failed": last for name, last in failures.items()}
    summaries = [keep(summarize(name, each, rows[baseline])) for name, each in rows.items()]
    return {
        "cell": cell.name,
        "model": model,
        "baseline": baseline,
        "about": facts | {"parameters": f"{rows[baseline][0][0]['parameters']:,}"},
        "summaries": summaries,
        "rows": rows,
        "failures": failures,
    }


def _sweep(place: Place, model: str) -> tuple[float, dict[float, float]]:
    """Step seconds of DDP by bucket size in MB, one run each; and the best size."""
    swept: dict[float, float] = {}
    for size in SWEEP_MB:
        swept[size] = step_s(place.measure(ddp_with(size), model))
        say(f"{place.cell.name} {model} sweep: DDP {size} MB {1e3 * swept[size]:.0f} ms")
    return min(swept, key=lambda size: swept[size]), swept


if __name__ == "__main__":
    sys.exit(main())
