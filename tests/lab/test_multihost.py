"""Training over several hosts, each with its own network, started as a user starts it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.lab import Lab

TRAIN = Path(__file__).parent / "train_mlp.py"
GRADWIRE = [sys.executable, "-m", "gradwire", "run", "--output", "all"]
ROOT = Path(__file__).parent.parent.parent
PORT = 29400


def commands(lab: Lab, *, workers: int = 1, sync: str = "exact") -> dict[int, list[str]]:
    there = ["--sync", sync, "--nodes", str(lab.hosts), "--rendezvous", f"{lab.address(0)}:{PORT}"]
    return {
        host: [*GRADWIRE, "-n", str(workers), *there, "--node-rank", str(host), str(TRAIN)] for host in range(lab.hosts)
    }


@pytest.mark.parametrize(
    ("hosts", "workers", "sync"),
    [(2, 1, "exact"), (3, 1, "exact"), (2, 2, "exact"), (3, 1, "q4"), (2, 2, "q4"), (2, 2, "delayed:codec=q8")],
)
def test_all_ranks_on_all_hosts_end_with_the_same_weights(hosts: int, workers: int, sync: str) -> None:
    with Lab(hosts=hosts, rate_mbit=1000) as lab:
        ended = lab.run(commands(lab, workers=workers, sync=sync), timeout_s=120)
    for host, done in ended.items():
        assert done.returncode == 0, f"host {host}:\n{done.stdout}\n{done.stderr}"
    said = "\n".join(done.stdout for done in ended.values())
    found = re.findall(r"rank (\d+) of (\d+) has (\w+)", said)
    ranks = hosts * workers
    assert sorted((int(rank), int(size)) for rank, size, _ in found) == [(rank, ranks) for rank in range(ranks)]
    assert len({digest for _, _, digest in found}) == 1


@pytest.mark.parametrize(
    ("workers", "sync", "bytes_per_parameter"), [(1, "q4", 0.516), (1, "q8", 1.016), (2, "exact", 4.0)]
)
def test_one_worker_a_host_sends_what_the_formula_says(workers: int, sync: str, bytes_per_parameter: float) -> None:
    """The interface's own counter, over 6 steps of a matrix of 4 million numbers; 2 hosts, so k = 2(n-1)/n is 1."""
    program = Path(__file__).parent / "train_matrix.py"
    with Lab(hosts=2, rate_mbit=1000) as lab:
        started = {
            host: [*words[:-1], str(program)] for host, words in commands(lab, workers=workers, sync=sync).items()
        }
        ended = lab.run(started, timeout_s=120, env={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"})
    said = "\n".join(done.stdout + done.stderr for done in ended.values())
    found = [float(value) for value in re.findall(r"sent ([\d.]+) bytes per parameter and step", said)]
    assert len(found) == 2, said
    assert found == pytest.approx([bytes_per_parameter] * 2, rel=0.03)
