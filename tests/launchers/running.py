"""Starts the training script with a launcher's command and reads what its ranks print."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.faults.scripts import descendants

SCRIPT = str(Path(__file__).with_name("train.py"))
SOURCES = str(Path(__file__).parents[2] / "src")
LAUNCHERS_OWN = ("GRADWIRE_", "SLURM", "OMPI_", "PMI", "PRTE_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE",
                 "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GLOO_")  # fmt: skip
LINE = re.compile(r"WEIGHTS (\d+) (\d+) ([0-9a-f]{64}) (\[.*\])")

PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable)
SRUN = ("srun", "-N2", "-n2", sys.executable)


@dataclass(frozen=True)
class Ended:
    """How a launcher ended, and the weights its ranks printed: {rank: (world size, hash, weights)}."""

    code: int
    out: str
    err: str
    weights: dict[int, tuple[int, str, list[float]]]

    @property
    def hashes(self) -> list[str]:
        return [digest for _, (_, digest, _) in sorted(self.weights.items())]


def environment(**more: str) -> dict[str, str]:
    """This process's variables without those of any launcher, as in a fresh shell."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS_OWN)}
    return {**kept, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", **more}


def launch(
    *command: str, env: dict[str, str] | None = None, failing: int | None = None, timeout_s: float = 50.0
) -> Ended:
    """Run the training script by ``command`` to its end. AssertionError, and nothing left running, after ``timeout_s``."""
    process = subprocess.Popen(
        [*command, SCRIPT, *([] if failing is None else [str(failing)])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env or environment(),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        out, err = _end(process)
        raise AssertionError(f"{command[0]} did not end within {timeout_s} s; it printed\n{out}\n{err}") from None
    lines = [LINE.search(line) for line in out.splitlines()]
    weights = {int(line[1]): (int(line[2]), line[3], json.loads(line[4])) for line in lines if line is not None}
    return Ended(process.returncode, out, err, weights)


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """SIGTERM, so that the launcher ends its ranks wherever they are; then SIGKILL for what stays."""
    family = descendants(process.pid)
    process.terminate()
    try:
        return process.communicate(timeout=5.0)
    except subprocess.TimeoutExpired:
        for pid in {process.pid, *family, *descendants(process.pid)}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return process.communicate(timeout=5.0)
