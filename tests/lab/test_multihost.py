"""Training over several hosts, each with its own network, started as a user starts it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from benchmarks.lab import Lab

TRAIN = Path(__file__).parent / "train_mlp.py"
GRADWIRE = [sys.executable, "-m", "gradwire", "run", "--output", "all"]
PORT = 29400


def commands(lab: Lab, *, workers: int = 1) -> dict[int, list[str]]:
    there = ["--nodes", str(lab.hosts), "--rendezvous", f"{lab.address(0)}:{PORT}"]
    return {
        host: [*GRADWIRE, "-n", str(workers), *there, "--node-rank", str(host), str(TRAIN)] for host in range(lab.hosts)
    }


@pytest.mark.parametrize(("hosts", "workers"), [(2, 1), (3, 1), (2, 2)])
def test_all_ranks_on_all_hosts_end_with_the_same_weights(hosts: int, workers: int) -> None:
    with Lab(hosts=hosts, rate_mbit=1000) as lab:
        ended = lab.run(commands(lab, workers=workers), timeout_s=120)
    for host, done in ended.items():
        assert done.returncode == 0, f"host {host}:\n{done.stdout}\n{done.stderr}"
    said = "\n".join(done.stdout for done in ended.values())
    found = re.findall(r"rank (\d+) of (\d+) has (\w+)", said)
    ranks = hosts * workers
    assert sorted((int(rank), int(size)) for rank, size, _ in found) == [(rank, ranks) for rank in range(ranks)]
    assert len({digest for _, _, digest in found}) == 1
