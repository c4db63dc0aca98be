"""Launchers' variables become one Environment, or an error that names the variable."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import LaunchError
from gradwire.launch.environment import Environment, read_environment, worker_environment
from gradwire.launch.slurm import expand_counts, expand_hosts

BARE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "2950"}
TORCHRUN = {**BARE, "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "n[01-02,7]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prte-4711",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "world_size", "local", "node_rank", "host"),
    [
        ({}, "solo", 0, 1, (0, 1), 0, "127.0.0.1"),
        ({"WORLD_SIZE": "1"}, "solo", 0, 1, (0, 1), 0, "127.0.0.1"),
        (BARE, "environment", 1, 4, (0, 1), 0, "h"),
        ({**BARE, "LOCAL_RANK": "1"}, "environment", 1, 4, (1, 4), 0, "h"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "environment", 0, 1, (0, 1), 0, "127.0.0.1"),
        (TORCHRUN, "torchrun", 1, 4, (1, 2), 0, "h"),
        ({**SLURM, **TORCHRUN}, "torchrun", 1, 4, (1, 2), 0, "h"),
        (SLURM, "slurm", 3, 5, (1, 2), 1, "n01"),
        ({**SLURM, "MASTER_ADDR": "h"}, "slurm", 3, 5, (1, 2), 1, "h"),
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, "solo", 0, 1, (0, 1), 0, "127.0.0.1"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, "solo", 0, 1, (0, 1), 0, "127.0.0.1"),
        ({**SLURM, "SLURM_STEP_ID": "4294967290"}, "solo", 0, 1, (0, 1), 0, "127.0.0.1"),
        ({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, "solo", 0, 1, (0, 1), 0, "127.0.0.1"),
        (MPI, "mpi", 1, 2, (1, 2), 0, "127.0.0.1"),
        ({**SLURM, **MPI}, "mpi", 1, 2, (1, 2), 0, "127.0.0.1"),
    ],
)
def test_each_launcher_is_recognised(environ, launcher, rank, world_size, local, node_rank, host):
    read = read_environment(environ)
    assert (read.launcher, read.rank, read.world_size, read.node_rank) == (launcher, rank, world_size, node_rank)
    assert (read.local_rank, read.local_world_size) == local
    assert read.store_host == host


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (without(BARE, "WORLD_SIZE"), "WORLD_SIZE is not set although RANK=1"),
        (without(BARE, "RANK"), "WORLD_SIZE is 4 but RANK is not set"),
        ({**BARE, "RANK": "one"}, "RANK is 'one': it must be a whole number"),
        ({**BARE, "RANK": "-1"}, "RANK is '-1'"),
        ({**BARE, "RANK": "4"}, "RANK is 4 but WORLD_SIZE is 4: RANK must be 0 to 3"),
        ({**BARE, "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        (without(BARE, "MASTER_ADDR"), "MASTER_ADDR is not set"),
        (without(BARE, "MASTER_PORT"), "MASTER_PORT is not set"),
        ({**BARE, "MASTER_PORT": "99999"}, "MASTER_PORT is '99999': it must be a port, 1 to 65535"),
        ({**BARE, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK is 2 but LOCAL_WORLD_SIZE is 2"),
        ({**SLURM, "SLURM_STEP_NODELIST": "n[1-"}, "node list 'n[1-'"),
        ({**SLURM, "SLURM_PROCID": "5"}, "SLURM_PROCID is 5 but SLURM_NTASKS is 5"),
        ({**MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "-x MASTER_ADDR="),
        (without(MPI, "PMIX_NAMESPACE"), "MASTER_PORT is not set"),
        ({"GRADWIRE_TIMEOUT_S": "soon"}, "GRADWIRE_TIMEOUT_S is 'soon': it must be a number of seconds"),
        ({"GRADWIRE_CONTROL": "nowhere"}, "GRADWIRE_CONTROL is 'nowhere'"),
    ],
)
def test_a_bad_value_is_named(environ, words):
    with pytest.raises(LaunchError, match=re.escape(words)):
        read_environment(environ)


def test_ports_agree_over_the_ranks_of_a_job_and_differ_between_jobs():
    ports = {read_environment({**SLURM, "SLURM_PROCID": str(rank)}).store_port for rank in range(5)}
    assert len(ports) == 1
    assert read_environment({**SLURM, "SLURM_JOB_ID": "78"}).store_port not in ports


def test_torchruns_own_store_is_not_served_twice():
    read = read_environment({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert (read.store_served, read.attempt) == (True, 2)


@given(
    rank=st.integers(0, 9),
    more=st.integers(1, 9),
    plan=st.none() | st.text(min_size=1),
    token=st.none() | st.text(min_size=1),
    fd=st.none() | st.integers(3, 99),
    timeout_s=st.floats(0.1, 1e6),
)
def test_a_worker_reads_what_its_launcher_wrote(rank, more, plan, token, fd, timeout_s):
    worker = Environment(
        rank=rank, world_size=rank + more, local_rank=rank, local_world_size=rank + more, node_rank=2,
        launcher="gradwire", store_host="10.0.0.1", store_port=2000, store_fd=fd, control=("10.0.0.1", 1000),
        token=token, plan_text=plan, timeout_s=timeout_s,
    )  # fmt: skip
    assert read_environment(worker_environment(worker, foreign_port=7, interface="lo", environ=TORCHRUN)) == worker


def test_the_users_own_settings_stay():
    worker = Environment(launcher="gradwire", control=("h", 1), store_port=5, local_world_size=64)
    mine = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9", "HOME": "x"}
    made = worker_environment(worker, foreign_port=7, interface="lo", environ=mine)
    assert mine.items() <= made.items()
    ours = worker_environment(worker, foreign_port=7, interface="lo", environ={})
    assert (ours["OMP_NUM_THREADS"], ours["GLOO_SOCKET_IFNAME"]) == ("1", "lo")


def test_node_lists_are_expanded():
    assert expand_hosts("n[01-03,7],gpu5") == ["n01", "n02", "n03", "n7", "gpu5"]
    assert expand_hosts("r[1-2]n[8-9]x") == ["r1n8x", "r1n9x", "r2n8x", "r2n9x"]
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("many") == []


@given(st.text(alphabet="n019[]-,", max_size=20))
def test_any_node_list_is_expanded_or_refused(text):
    try:
        assert expand_hosts(text)
    except LaunchError as error:
        assert "node list" in str(error)
