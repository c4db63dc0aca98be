"""Variants take turns, A B C, A B C, ..., so that whatever else the machine does hits all of them."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.cells import Place, Row, RunFailedError, Variant
from benchmarks.report import window_s
from benchmarks.results import say

Runs = Mapping[str, tuple[Place, Variant]]


def take_turns(runs: Runs, model: str, repetitions: int) -> tuple[dict[str, list[list[Row]]], dict[str, str]]:
    """Each run's rows, repetition by repetition, rank by rank; and what failed, with its last words.

    A variant that failed takes no more turns, and its rows are left out; the others go on.
    """
    rows: dict[str, list[list[Row]]] = {name: [] for name in runs}
    failed: dict[str, str] = {}
    for repetition in range(repetitions):
        for name, (place, variant) in runs.items():
            if name in failed:
                continue
            turn = f"{place.cell.name} {model} {repetition + 1}/{repetitions} {name}"
            try:
                rows[name].append(place.measure(variant, model))
            except RunFailedError as error:
                failed[name] = str(error).strip().splitlines()[-1]
                say(f"{turn}: failed\n{error}")
            else:
                say(f"{turn}: {1e3 * window_s(rows[name][-1]):.0f} ms a step")
    return {name: each for name, each in rows.items() if name not in failed}, failed
