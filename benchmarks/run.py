"""The driver: ``python -m benchmarks.run --cells loopback --models conv --repetitions 5`` (``make bench`` runs all).

In every cell the variants take turns, A B C, A B C, ..., each time in fresh processes, so that whatever else the
machine does hits all of them. DDP's bucket size is swept once before, and the best of the sweep takes part beside the
default. Writes benchmarks/results/NAME.json (every number) and NAME.md (the tables).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells import (
    CELLS,
    DDP,
    GRADWIRE_RUN,
    PLAIN,
    ROOT,
    Place,
    Row,
    RunFailedError,
    Variant,
    ddp_with,
    opened,
)
from benchmarks.lab import LabError
from benchmarks.lab.line import measure as measure_line
from benchmarks.models import WORKLOADS
from benchmarks.report import keep, markdown, step_s, summarize

SWEEP_MB = (1, 4, 25)
RESULTS = ROOT / "benchmarks/results"


def main() -> int:
    """Run the cells asked for; what is done is written after every part."""
    args = _arguments()
    result: dict[str, Any] = {"name": args.name, "about": _about(args.repetitions), "parts": []}
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
                _say(str(error))
                part = {"cell": cell, "model": model, "not_run": "a run failed"}
            result["parts"].append(part)
            _write(result, args.results)
    return int(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--models", nargs="+", choices=sorted(WORKLOADS), default=sorted(WORKLOADS))
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
    about: dict[str, str] = {"ranks": str(cell.ranks), "steps": f"{cell.steps} after {cell.warm_up}"}
    if place.lab is not None:
        about["line, measured"] = f"{measure_line(place.lab) * 8 / 1e6:.0f} of {cell.rate_mbit:g} Mbit/s"
    variants = [PLAIN] if cell.ranks == 1 else [DDP]
    if cell.ranks > 1:
        best, swept = _sweep(place, model)
        about["DDP sweep, ms"] = ", ".join(f"{size:g} MB {1e3 * each:.0f}" for size, each in swept.items())
        variants.append(ddp_with(best))
    if with_gradwire:
        variants.append(GRADWIRE_RUN)
    rows = _take_turns(place, model, variants, repetitions)
    baseline = variants[0].name
    summaries = [keep(summarize(name, each, rows[baseline])) for name, each in rows.items()]
    return {
        "cell": cell.name,
        "model": model,
        "baseline": baseline,
        "about": about | {"parameters": f"{rows[baseline][0][0]['parameters']:,}"},
        "summaries": summaries,
        "rows": rows,
    }


def _sweep(place: Place, model: str) -> tuple[float, dict[float, float]]:
    """Step seconds of DDP by bucket size in MB, one run each; and the best size."""
    swept: dict[float, float] = {}
    for size in SWEEP_MB:
        swept[size] = step_s(place.measure(ddp_with(size), model))
        _say(f"{place.cell.name} {model} sweep: DDP {size} MB {1e3 * swept[size]:.0f} ms")
    return min(swept, key=lambda size: swept[size]), swept


def _take_turns(place: Place, model: str, variants: list[Variant], repetitions: int) -> dict[str, list[list[Row]]]:
    rows: dict[str, list[list[Row]]] = {variant.name: [] for variant in variants}
    for repetition in range(repetitions):
        for variant in variants:
            rows[variant.name].append(place.measure(variant, model))
            took = step_s(rows[variant.name][-1])
            _say(f"{place.cell.name} {model} {repetition + 1}/{repetitions} {variant.name}: {1e3 * took:.0f} ms")
    return rows


def _about(repetitions: int) -> dict[str, str]:
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")), "unknown")
    return {
        "machine": f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f} at the start",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "network": "loopback, or namespaces with shaped wires (tbf); no delay or loss is added",
        "repetitions": str(repetitions),
        "command": f"python -m benchmarks.run {shlex.join(sys.argv[1:])}".strip(),
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _write(result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{result['name']}.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / f"{result['name']}.md").write_text(markdown(result))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
