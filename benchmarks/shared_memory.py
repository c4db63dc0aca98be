"""All-reduce between two processes of one host: shared memory beside Gloo on loopback, in the same run.

``python -m benchmarks.shared_memory`` (``make bench-host``); about 20 s. Each process is pinned to a core of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.measure import pin
from benchmarks.report import Span
from benchmarks.results import RESULTS, about, write
from gradwire.comm.gloo import open_group
from gradwire.comm.meeting import file_store
from gradwire.comm.shared import SharedGroup, open_shared
from gradwire.core.group import Group

KIB = 1 << 10
SIZES = tuple(KIB << power for power in range(0, 17, 2))
VARIANTS = ("resident", "copied", "gloo", "copy")
NUM_RANKS = 2
ROUND_S = 0.02  # a variant's share of a round, about
CPU = torch.device("cpu")
NOTES = (
    "All-reduce, microseconds a call; median of the rounds (lowest-highest). Resident: the tensor lives in the shared memory, as",
    "buckets do; copied: it does not; gloo: over loopback; copy: a plain `copy_` of as many bytes in both processes at once,",
    "which is what the memory can do. Ratios are taken within a round.",
)


def actions(num_bytes: int, shared: Group, gloo: Group) -> dict[str, Callable[[], object]]:
    """What is timed, by variant."""
    numel = num_bytes // 4
    resident = shared.new_zeros(numel, torch.float32, CPU)
    copied, plain, source = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
    return {
        "resident": lambda: shared.all_reduce(resident),
        "copied": lambda: shared.all_reduce(copied),
        "gloo": lambda: gloo.all_reduce(plain),
        "copy": lambda: source.copy_(plain),
    }


def seconds(action: Callable[[], object], count: int) -> float:
    """Of one call, the mean of ``count``."""
    began_s = time.perf_counter()
    for _ in range(count):
        action()
    return (time.perf_counter() - began_s) / count


def rounds(num_bytes: int, shared: Group, gloo: Group, num_rounds: int) -> dict[str, list[float]]:
    """Seconds a call of every variant in every round, of the slower rank; the variants take turns."""
    timed: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for variant, action in actions(num_bytes, shared, gloo).items():
        gloo.barrier()
        first = torch.tensor([max(seconds(action, 1) for _ in range(3))], dtype=torch.float64)
        timed[variant].append(float(gloo.all_reduce(first, "max")))
    counts = {variant: max(1, min(1000, int(ROUND_S / first))) for variant, (first,) in timed.items()}
    made: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    todo = actions(num_bytes, shared, gloo)
    for variant, action in todo.items():
        seconds(action, counts[variant] // 4 + 1)  # the pages are there, the counts settled
    for _ in range(num_rounds):
        for variant, action in todo.items():
            gloo.barrier()
            mine = torch.tensor([seconds(action, counts[variant])], dtype=torch.float64)
            made[variant].append(float(gloo.all_reduce(mine, "max")))
    return made


def rank(number: int, path: str, num_rounds: int, out: Connection) -> None:
    """One of the two processes."""
    pin(number)
    store = file_store(path, NUM_RANKS)
    place = {"rank": number, "size": NUM_RANKS, "device": CPU, "timeout_s": 60.0}
    gloo = open_group(store, name="gloo", **place)
    shared = open_shared(open_group(store, name="shared", **place), timeout_s=60.0)
    if not isinstance(shared, SharedGroup):
        raise SystemExit("these two processes cannot share memory; stderr says why")
    out.send({size: rounds(size, shared, gloo, num_rounds) for size in SIZES})


def measure(num_rounds: int) -> dict[int, dict[str, list[float]]]:
    """By bytes and variant: seconds a call in each round."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        here, there = context.Pipe(duplex=False)
        args = (str(Path(folder) / "store"), num_rounds, there)
        processes = [context.Process(target=rank, args=(number, *args), daemon=True) for number in range(NUM_RANKS)]
        for process in processes:
            process.start()
        there.close()
        found: dict[int, dict[str, list[float]]] = here.recv()
        for process in processes:
            process.join(10)
    return found


def size_words(num_bytes: int) -> str:
    """1024 -> 1 KiB."""
    return f"{num_bytes // KIB} KiB" if num_bytes < KIB * KIB else f"{num_bytes // KIB // KIB} MiB"


def table(found: dict[int, dict[str, list[float]]]) -> list[str]:
    """Markdown: microseconds, median (lowest-highest)."""
    lines = [
        f"| bytes | {' | '.join(f'{variant}, us' for variant in VARIANTS)} | gloo / resident | gloo / copied |",
        f"|---|{'---|' * (len(VARIANTS) + 2)}",
    ]
    for size, by_variant in found.items():
        spans = {variant: Span.of(values) for variant, values in by_variant.items()}
        ratios = [
            Span.of([a / b for a, b in zip(by_variant["gloo"], by_variant[variant], strict=True)])
            for variant in ("resident", "copied")
        ]
        cells = [spans[variant].words(1e6, ".0f") for variant in VARIANTS] + [ratio.words(1, ".1f") for ratio in ratios]
        lines.append(f"| {size_words(size)} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the two files written")
    args = parser.parse_args()
    found = measure(args.rounds)
    print("\n".join(table(found)), flush=True)
    facts = about("benchmarks.shared_memory", "none: two processes of one host", args.rounds)
    lines = [
        "# shared-memory",
        "",
        *(f"- {key}: {value}" for key, value in facts.items()),
        "",
        *NOTES,
        "",
        *table(found),
    ]
    write({"name": "shared-memory", "about": facts, "seconds": found}, "\n".join(lines) + "\n", args.results)


if __name__ == "__main__":
    main()
