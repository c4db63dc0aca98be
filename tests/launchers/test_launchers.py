"""One training script, unchanged, under plain python, torchrun, Open MPI and Slurm: the same weights, the same errors."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator

import pytest
import torch

from gradwire.comm.meeting import meet
from gradwire.errors import LaunchError
from gradwire.launch.environment import Environment
from tests.launchers import slurm_cluster
from tests.launchers.running import MPIRUN, PYTHON, SRUN, TORCHRUN, Ended, environment, launch

LAUNCHERS = {"torchrun": TORCHRUN, "mpirun": MPIRUN, "srun": SRUN}
# srun takes the address of rank 0's host from the node list, so the nodes are named by addresses of this machine.
NODES = ("127.0.0.1", "127.0.0.2")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables with which srun finds a cluster of two nodes."""
    reason = slurm_cluster.why_not()
    if reason is not None:
        pytest.skip(reason)
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm"), nodes=NODES) as env:
        yield env


@pytest.fixture
def env(launcher: str, request: pytest.FixtureRequest) -> dict[str, str]:
    """The variables to start ``launcher`` with; skips where it is not installed."""
    if launcher == "srun":
        return request.getfixturevalue("slurm")
    if shutil.which(LAUNCHERS[launcher][0]) is None:
        pytest.skip(f"{launcher} not found: Open MPI is not installed")
    return environment()


@pytest.fixture(scope="module")
def alone() -> Ended:
    return launch(*PYTHON)


@pytest.fixture(scope="module")
def two() -> Ended:
    """Two ranks under torchrun, which is always there: what the other launchers are compared with."""
    return launch(*TORCHRUN)


def test_plain_python_is_a_world_of_one(alone: Ended) -> None:
    assert alone.code == 0, alone.err
    assert {rank: size for rank, (size, _, _) in alone.weights.items()} == {0: 1}
    assert alone.err == ""


def test_torchrun_ends_with_the_weights_of_plain_python(alone: Ended, two: Ended) -> None:
    assert two.code == 0, two.err
    assert {rank: size for rank, (size, _, _) in two.weights.items()} == {0: 2, 1: 2}
    assert len(set(two.hashes)) == 1
    torch.testing.assert_close(two.weights[0][2], alone.weights[0][2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("srun", marks=pytest.mark.slow)])
def test_every_other_launcher_ends_with_the_same_bits(launcher: str, env: dict[str, str], two: Ended) -> None:
    ended = launch(*LAUNCHERS[launcher], env=env)
    assert ended.code == 0, ended.err
    assert {rank: size for rank, (size, _, _) in ended.weights.items()} == {0: 2, 1: 2}
    assert ended.hashes == two.hashes


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun", pytest.param("srun", marks=pytest.mark.slow)])
def test_an_exception_shows_the_causes_traceback_and_one_line_of_the_victim(launcher: str, env: dict[str, str]) -> None:
    ended = launch(*LAUNCHERS[launcher], env=env, failing=1)
    assert ended.code != 0
    # torchrun adds a traceback of its own, without the ranks' prefix.
    shown = [line for line in ended.err.splitlines() if line.startswith("[rank")]
    assert shown[0] == "[rank1]: Traceback (most recent call last):"
    assert shown[-1] == "[rank1]: ValueError: the cause"
    assert sum("Traceback" in line for line in shown) == 1
    victims = [line for line in ended.err.splitlines() if line.startswith("gradwire: ")]
    headline = f"gradwire: rank 0 stops: rank 1 on {socket.gethostname()} failed at step 10: ValueError: the cause"
    assert len(victims) == 1
    assert victims[0].startswith(headline)
    assert "PeerError" not in ended.err


def test_a_node_name_without_an_address_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    with pytest.raises(LaunchError, match=r"rank 0's host n1 has no address .* set MASTER_ADDR"):
        meet(Environment(rank=0, world_size=2, launcher="slurm", store_host="n1", store_port=1), torch.device("cpu"))
