"""What compression costs: the loss on held-out data after equal training, on two ranks of this machine.

One run: ``python -m benchmarks.quality --task text --sync q4 --seed 0 --steps 1000`` prints one line of JSON.
All of them: ``python -m benchmarks.quality --all --seeds 3`` (``make quality``) lets the variants take turns, writes
benchmarks/results/quality.json and .md after each run, and skips the runs that are there already.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.baselines import Hook
from benchmarks.cells import CELLS, Place, Row, RunFailedError, Variant
from benchmarks.contenders import CONTENDERS, EVERY, for_quality
from benchmarks.data import MissingDataError, text_path
from benchmarks.quality_report import BASELINE, words
from benchmarks.results import RESULTS, about, read, say, write
from gradwire.core.spelling import parse
from gradwire.errors import PlanError

TASKS = ("text", "images")
VARIANTS = (BASELINE, "q8", "q4", "q4-h8", "lowrank-r16", "ddp-powersgd-r4-one-bucket", "ddp-fp16")
EVALUATIONS = 25
TIMEOUT_S = 3600.0


def main() -> int:
    """Run what was asked for."""
    args = _arguments()
    try:
        if args.all:
            return _all(args)
        print(json.dumps(one(_variant(args), args.task, args.seed, args.steps)))
    except (RunFailedError, MissingDataError) as error:
        say(str(error))
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, help="one run: what is learnt")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--sync", type=_sync, help="one run: gradwire's plan")
    how.add_argument("--hook", type=_hook, help="one run: DDP with this hook instead")
    parser.add_argument("--seed", type=int, default=0, help="one run: of the weights and of the data")
    parser.add_argument("--steps", type=int, default=1000, help=f"a multiple of {EVERY}")
    parser.add_argument("--all", action="store_true", help="every variant, task and seed")
    parser.add_argument("--seeds", type=int, default=3, help="--all: how many")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="--all: which")
    parser.add_argument("--variants", nargs="+", choices=list(CONTENDERS), default=list(VARIANTS), help="--all: which")
    parser.add_argument("--results", type=Path, default=RESULTS, help="--all: folder they go to")
    args = parser.parse_args()
    if args.steps < 2 * EVERY or args.steps % EVERY:
        parser.error(f"--steps {args.steps} must be a multiple of {EVERY}, so that plans with local steps end agreed")
    if not args.all and args.task is None:
        parser.error("say --task for one run, or --all")
    return args


def _sync(text: str) -> str:
    try:
        parse(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _hook(text: str) -> str:
    Hook.parse(text)
    return text


def evaluate_every(steps: int) -> int:
    """How many steps lie between evaluations: about EVALUATIONS in a run, only where the ranks agree.

    >>> evaluate_every(1000)
    40
    """
    return max(1, round(steps / EVALUATIONS / EVERY)) * EVERY


def _variant(args: argparse.Namespace) -> Variant:
    if args.hook is not None:
        return Variant(name=f"DDP, {args.hook}", script="train_ddp.py", words=("--hook", args.hook))
    sync = args.sync or "exact"
    return Variant(name=sync, script="train_gradwire.py", words=("--sync", sync))


def one(variant: Variant, task: str, seed: int, steps: int) -> dict[str, Any]:
    """Train once and evaluate. Raises RunFailedError."""
    cell = replace(CELLS["loopback"], steps=steps - 1, warm_up=1, timeout_s=TIMEOUT_S)
    more = ("--seed", str(seed), "--evaluate-every", str(evaluate_every(steps)))
    rows = Place(cell, None).measure(replace(variant, words=(*variant.words, *more)), task)
    return {"task": task, "variant": variant.name, "seed": seed, "steps": steps} | summary(rows)


def summary(rows: list[Row]) -> dict[str, Any]:
    """One run's curve, [step, seconds trained, held-out loss]: the mean over the ranks, each with its share of the data."""
    points = zip(*(row["curve"] for row in rows), strict=True)
    curve = [[ranks[0][0], max(r[1] for r in ranks), mean(r[2] for r in ranks)] for ranks in points]
    return {
        "loss": curve[-1][2],
        "curve": curve,
        "parameters": rows[0]["parameters"],
        "step_s": max(mean(row["step_s"]) for row in rows),
    }


def _all(args: argparse.Namespace) -> int:
    result = read(args.results / "quality.json")
    runs: list[dict[str, Any]] = result.get("runs", [])
    done = {(run["task"], run["variant"], run["seed"], run["steps"]) for run in runs}
    facts = about("benchmarks.quality", "loopback: the loss does not depend on the network", 1)
    facts = {key: value for key, value in facts.items() if key != "repetitions"} | {"text": text_path().name}
    result = {"name": "quality", "about": result.get("about", facts), "runs": runs}
    failed = False
    for seed in range(args.seeds):
        for task in args.tasks:
            for name in args.variants:
                if (task, name, seed, args.steps) in done:
                    continue
                variant = for_quality(CONTENDERS[name], args.steps).variant
                try:
                    runs.append(one(variant, task, seed, args.steps))
                except RunFailedError as error:
                    failed = True
                    say(f"{task} {name} seed {seed}: failed\n{error}")
                    continue
                say(f"{task} {name} seed {seed}: loss {runs[-1]['loss']:.4f}, {1e3 * runs[-1]['step_s']:.0f} ms a step")
                write(result, words(result), args.results)
    write(result, words(result), args.results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
