"""Where (a cell) and what (a variant) is measured, and how one measurement is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab, LabError
from benchmarks.lab.hosts import WIRE

ROOT = Path(__file__).parent.parent
PORT = 29500
GRADWIRE = [sys.executable, "-m", "gradwire", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]

Row = dict[str, Any]  # one rank's line of JSON, as Record.report writes it


class RunFailedError(Exception):
    """A measurement ended with an error; the message holds what it printed."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A network and how long to measure on it. rate_mbit None: this machine's loopback, no lab.

    timeout_s: after which a measurement has failed.
    """

    name: str
    ranks: int
    rate_mbit: float | None
    steps: int
    warm_up: int
    timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train.

    words: more of its script's command line. num_processes: fewer than the cell's ranks, None for all of them.
    """

    name: str
    script: str
    words: tuple[str, ...] = ()
    num_processes: int | None = None


CELLS = {
    cell.name: cell
    for cell in (
        Cell(name="solo", ranks=1, rate_mbit=None, steps=10, warm_up=4),
        Cell(name="loopback", ranks=2, rate_mbit=None, steps=7, warm_up=4),
        Cell(name="lab-1000", ranks=2, rate_mbit=1000, steps=7, warm_up=4),
        Cell(name="lab-100", ranks=2, rate_mbit=100, steps=2, warm_up=1),
    )
}
PLAIN = Variant(name="plain", script="train_plain.py")
DDP = Variant(name="ddp", script="train_ddp.py")
GRADWIRE_RUN = Variant(name="gradwire", script="train_gradwire.py")


def ddp_with(bucket_cap_mb: float) -> Variant:
    """DDP with buckets of this size."""
    return Variant(
        name=f"ddp-{bucket_cap_mb:g}MB", script="train_ddp.py", words=("--bucket-cap-mb", f"{bucket_cap_mb:g}")
    )


@dataclass(frozen=True)
class Place:
    """A cell that is ready: its lab is open, or it needs none."""

    cell: Cell
    lab: Lab | None

    def measure(self, variant: Variant, model: str) -> list[Row]:
        """Train once, in fresh processes; one row per rank. Raises RunFailedError."""
        count = variant.num_processes or self.cell.ranks
        with tempfile.TemporaryDirectory() as folder:
            words = [str(ROOT / "benchmarks" / variant.script), "--model", model, "--out", folder]
            words += ["--steps", str(self.cell.steps), "--warm-up", str(self.cell.warm_up), *variant.words]
            words += ["--started", repr(time.monotonic())]
            if self.lab is None:
                _run_here(_local_command(variant, count, words), self.cell.timeout_s)
            else:
                _run_in(self.lab, variant, count, [*words, "--interface", WIRE], self.cell.timeout_s)
            files = [Path(folder) / f"rank{rank}.json" for rank in range(count)]
            if missing := [file.name for file in files if not file.exists()]:
                raise RunFailedError(f"{variant.name} on {self.cell.name} ended well but left no {', '.join(missing)}")
            return [json.loads(file.read_text()) for file in files]


@contextmanager
def opened(cell: Cell) -> Iterator[Place]:
    """Make the cell ready. Raises LabError where a lab is needed and cannot be built."""
    if cell.rate_mbit is None:
        yield Place(cell, None)
    else:
        with Lab(hosts=cell.ranks, rate_mbit=cell.rate_mbit) as lab:
            yield Place(cell, lab)


def _environment() -> dict[str, str]:
    """One thread a rank for everybody; the sources of this checkout."""
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def _local_command(variant: Variant, ranks: int, words: list[str]) -> list[str]:
    match variant.script:
        case "train_ddp.py":
            return [*TORCHRUN, "--nproc-per-node", str(ranks), *words]
        case "train_gradwire.py":
            return [*GRADWIRE, "-n", str(ranks), *words]
        case _:
            return [sys.executable, *words]


def _run_here(command: list[str], timeout_s: float) -> None:
    environment = os.environ | _environment() | {"GLOO_SOCKET_IFNAME": "lo"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            said = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its workers when it is asked to, not when it is killed
            said = process.communicate()
    if process.returncode != 0:
        raise RunFailedError(f"`{' '.join(command)}` ended with {process.returncode}:\n{said[0]}\n{said[1]}")


def _run_in(lab: Lab, variant: Variant, count: int, words: list[str], timeout_s: float) -> None:
    commands: dict[int, list[str | Path]] = {}
    for host in range(count):
        if variant.script == "train_gradwire.py":
            there = [*GRADWIRE, "-n", "1", "--nodes", str(count), "--node-rank", str(host)]
            there += ["--rendezvous", f"{lab.address(0)}:{PORT}"]
        else:
            ranks = (f"RANK={host}", f"WORLD_SIZE={count}", "LOCAL_RANK=0", f"MASTER_ADDR={lab.address(0)}")
            there = ["env", *ranks, f"MASTER_PORT={PORT}", f"GLOO_SOCKET_IFNAME={WIRE}", sys.executable]
        commands[host] = [*there, *words]
    try:
        finished = lab.run(commands, timeout_s=timeout_s, env=_environment())
    except LabError as error:
        raise RunFailedError(f"{variant.name}: {error}") from error
    for host, done in finished.items():
        if done.returncode != 0:
            raise RunFailedError(
                f"{variant.name} on host {host} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
            )
