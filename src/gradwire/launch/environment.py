"""Who am I: variables of gradwire, torchrun, Slurm or MPI become one `Environment`. Only this file reads os.environ."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gradwire.errors import LaunchError
from gradwire.launch.slurm import expand_counts, expand_hosts

__all__ = [
    "Environment",
    "prefer_interface",
    "read_cache_folder",
    "read_environment",
    "read_limits",
    "read_token",
    "worker_environment",
]

Launcher = Literal["solo", "gradwire", "torchrun", "slurm", "mpi", "environment"]
TIMEOUT_S, HANG_S = 300.0, 5.0
_FIRST_PORT, _NUM_PORTS = 15000, 17000  # below Linux's ephemeral range, which starts at 32768
_NOT_A_STEP = {
    "4294967290",
    "4294967291",
}  # Slurm's interactive and batch pseudo-steps: one process, whatever NTASKS says


@dataclass(frozen=True, kw_only=True)
class Environment:
    """This process among its peers, before anything is connected.

    store_host, store_port: where rank 0's key-value store is or shall be.
    store_fd: a bound, listening socket that the launcher handed to rank 0 for it.
    store_served: the store is already served (by torchrun's agent): every rank, 0 too, is its client.
    attempt: how often torchrun has restarted the job; keys in its store need it as a prefix.
    control: the coordinator's address when gradwire's launcher runs one; token proves membership to it.
    plan_text: TOML from the launcher. timeout_s: a hang this long stops the job. hang_s: one this long is reported.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    launcher: Launcher = "solo"
    store_host: str = "127.0.0.1"
    store_port: int = 0
    store_fd: int | None = None
    store_served: bool = False
    attempt: int = 0
    control: tuple[str, int] | None = None
    token: str | None = None
    plan_text: str | None = None
    timeout_s: float = TIMEOUT_S
    hang_s: float = HANG_S


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read the launcher's variables; a world of one if there is none.

    The first that applies: gradwire run, torchrun, RANK, Open MPI, srun. Raises LaunchError naming the variable, its
    value and what is allowed.
    """
    environ = os.environ if environ is None else environ
    if "GRADWIRE_CONTROL" in environ:
        return _gradwire(environ)
    if "TORCHELASTIC_RUN_ID" in environ:
        return _torchrun(environ)
    if "RANK" in environ:
        return _bare(environ, "environment")
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _mpi(environ)
    if _is_slurm_step(environ):
        return _slurm(environ)
    if _integer(environ, "WORLD_SIZE", default=1, low=1) > 1:
        raise LaunchError(
            f"WORLD_SIZE is {environ['WORLD_SIZE']} but RANK is not set: set RANK (0 to WORLD_SIZE - 1), MASTER_ADDR "
            "and MASTER_PORT too, or unset WORLD_SIZE to train alone"
        )
    return _environment(environ, "solo")


def prefer_interface(name: str) -> None:
    """Have Gloo use this network interface, unless GLOO_SOCKET_IFNAME says another; "" leaves the choice to Gloo."""
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def read_token(environ: Mapping[str, str] | None = None) -> str | None:
    """The user's secret GRADWIRE_TOKEN, or None."""
    return (os.environ if environ is None else environ).get("GRADWIRE_TOKEN") or None


def read_limits(environ: Mapping[str, str] | None = None) -> tuple[float, float]:
    """GRADWIRE_TIMEOUT_S and GRADWIRE_HANG_S in seconds (300 and 5 if unset); LaunchError unless positive numbers."""
    environ = os.environ if environ is None else environ
    return _seconds(environ, "GRADWIRE_TIMEOUT_S", TIMEOUT_S), _seconds(environ, "GRADWIRE_HANG_S", HANG_S)


def read_cache_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where this user's caches are: gradwire's folder in XDG_CACHE_HOME or in ~/.cache; None without a home."""
    environ = os.environ if environ is None else environ
    given = environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")
    base = Path(given) if os.path.isabs(given) else Path(home, ".cache")
    return base / "gradwire" if base.is_absolute() else None


def worker_environment(
    worker: Environment, *, foreign_port: int, interface: str, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables a worker is started with: `read_environment` gives `worker` back.

    foreign_port: MASTER_PORT for scripts that call torch's env:// themselves; it differs from gradwire's own store.
    interface: network interface that Gloo uses. OMP_NUM_THREADS and GLOO_SOCKET_IFNAME stay as the user set them.
    """
    base = os.environ if environ is None else environ
    made = {name: value for name, value in base.items() if not name.startswith(("GRADWIRE_", "TORCHELASTIC_"))}
    made.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // worker.local_world_size)))
    made.setdefault("GLOO_SOCKET_IFNAME", interface)
    made.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else every death buries its report under c10d's warnings
    made |= {
        "RANK": str(worker.rank),
        "WORLD_SIZE": str(worker.world_size),
        "LOCAL_RANK": str(worker.local_rank),
        "LOCAL_WORLD_SIZE": str(worker.local_world_size),
        "GROUP_RANK": str(worker.node_rank),
        "MASTER_ADDR": worker.store_host,
        "MASTER_PORT": str(foreign_port),
        "PYTHONUNBUFFERED": "1",
        "GRADWIRE_STORE_PORT": str(worker.store_port),
        "GRADWIRE_TIMEOUT_S": repr(worker.timeout_s),
        "GRADWIRE_HANG_S": repr(worker.hang_s),
    }
    if worker.control is not None:
        made["GRADWIRE_CONTROL"] = f"{worker.control[0]}:{worker.control[1]}"
    optional = {"TOKEN": worker.token, "PLAN": worker.plan_text, "STORE_FD": worker.store_fd}
    return made | {f"GRADWIRE_{name}": str(value) for name, value in optional.items() if value is not None}


def _gradwire(environ: Mapping[str, str]) -> Environment:
    host, _, port = environ["GRADWIRE_CONTROL"].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise _bad(environ, "GRADWIRE_CONTROL", "HOST:PORT, as gradwire run sets it")
    fd = _integer(environ, "GRADWIRE_STORE_FD", default=-1, low=0)
    return _environment(
        environ,
        "gradwire",
        *_rank_and_size(environ, "RANK", "WORLD_SIZE"),
        local=_rank_and_size(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        node_rank=_integer(environ, "GROUP_RANK", default=0, low=0),
        store=(_required(environ, "MASTER_ADDR"), _port(environ, "GRADWIRE_STORE_PORT")),
        store_fd=None if fd < 0 else fd,
        control=(host, int(port)),
    )


def _torchrun(environ: Mapping[str, str]) -> Environment:
    served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = _integer(environ, "TORCHELASTIC_RESTART_COUNT", default=0, low=0)
    return _bare(environ, "torchrun", store_served=served, attempt=attempt)


def _bare(
    environ: Mapping[str, str], launcher: Launcher, *, store_served: bool = False, attempt: int = 0
) -> Environment:
    rank, world_size = _rank_and_size(environ, "RANK", "WORLD_SIZE")
    store = ("127.0.0.1", 0)
    if world_size > 1 or "MASTER_ADDR" in environ:
        store = (_required(environ, "MASTER_ADDR"), _port(environ, "MASTER_PORT"))
    local = (0, 1)
    if "LOCAL_RANK" in environ:
        size_name = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in environ else "WORLD_SIZE"
        local = _rank_and_size(environ, "LOCAL_RANK", size_name)
    node_rank = _integer(environ, "GROUP_RANK", default=0, low=0)
    return _environment(
        environ, launcher, rank, world_size, local=local, node_rank=node_rank, store=store,
        store_served=store_served, attempt=attempt,
    )  # fmt: skip


def _mpi(environ: Mapping[str, str]) -> Environment:
    rank, world_size = _rank_and_size(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    local = _rank_and_size(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if "MASTER_ADDR" not in environ and local[1] < world_size:
        raise LaunchError(
            f"MASTER_ADDR is not set and mpirun started {world_size} ranks on several hosts ({local[1]} here): add "
            "-x MASTER_ADDR=ADDRESS, the address of the host of rank 0, to mpirun"
        )
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid", "PMIX_SERVER_URI2", "PMIX_ID")
    job = next((environ[name] for name in names if name in environ), None)
    if job is not None and "MASTER_PORT" not in environ:
        environ = {**environ, "MASTER_PORT": str(_derived_port(job))}
    store = (environ.get("MASTER_ADDR", "127.0.0.1"), _port(environ, "MASTER_PORT"))
    # Open MPI does not number its nodes; with equal nodes and ranks placed by node this is the number.
    return _environment(environ, "mpi", rank, world_size, local=local, node_rank=rank // local[1], store=store)


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    if "SLURM_PROCID" not in environ or environ.get("SLURM_STEP_ID") in _NOT_A_STEP:
        return False
    if not {"SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS"} & environ.keys():
        return False  # the shell of sbatch or salloc, outside any srun
    return _integer(environ, _slurm_size(environ), default=1, low=1) > 1


def _slurm_size(environ: Mapping[str, str]) -> str:
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"


def _slurm(environ: Mapping[str, str]) -> Environment:
    rank, world_size = _rank_and_size(environ, "SLURM_PROCID", _slurm_size(environ))
    node_rank = _integer(environ, "SLURM_NODEID", default=0, low=0)
    local_rank = _integer(environ, "SLURM_LOCALID", default=0, low=0)
    name = "SLURM_STEP_NODELIST" if "SLURM_STEP_NODELIST" in environ else "SLURM_JOB_NODELIST"
    hosts = expand_hosts(_required(environ, name))
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "")))
    local_size = counts[node_rank] if node_rank < len(counts) else max(local_rank + 1, world_size // max(1, len(hosts)))
    job = f"{environ.get('SLURM_JOB_ID', environ.get('SLURM_JOBID', '0'))}.{environ.get('SLURM_STEP_ID', '0')}"
    port = _port(environ, "MASTER_PORT") if "MASTER_PORT" in environ else _derived_port(job)
    store = (environ["MASTER_ADDR"] if "MASTER_ADDR" in environ else hosts[0], port)
    return _environment(
        environ, "slurm", rank, world_size, local=(local_rank, local_size), node_rank=node_rank, store=store
    )


def _environment(
    environ: Mapping[str, str],
    launcher: Launcher,
    rank: int = 0,
    world_size: int = 1,
    *,
    local: tuple[int, int] = (0, 1),
    node_rank: int = 0,
    store: tuple[str, int] = ("127.0.0.1", 0),
    store_fd: int | None = None,
    store_served: bool = False,
    attempt: int = 0,
    control: tuple[str, int] | None = None,
) -> Environment:
    timeout_s, hang_s = read_limits(environ)
    return Environment(
        rank=rank, world_size=world_size, local_rank=local[0], local_world_size=local[1], node_rank=node_rank,
        launcher=launcher, store_host=store[0], store_port=store[1], store_fd=store_fd, store_served=store_served,
        attempt=attempt, control=control, token=read_token(environ), plan_text=environ.get("GRADWIRE_PLAN"),
        timeout_s=timeout_s, hang_s=hang_s,
    )  # fmt: skip


def _derived_port(job: str) -> int:
    """The same port on all ranks of a job, and most likely another for another job."""
    return _FIRST_PORT + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") % _NUM_PORTS


def _rank_and_size(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank = _integer(environ, rank_name, low=0)
    world_size = _integer(environ, size_name, low=1)
    if rank >= world_size:
        raise LaunchError(
            f"{rank_name} is {rank} but {size_name} is {world_size}: {rank_name} must be 0 to {world_size - 1}"
        )
    return rank, world_size


def _required(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        also = ", ".join(f"{key}={environ[key]}" for key in ("RANK", "WORLD_SIZE") if key in environ)
        raise LaunchError(
            f"{name} is not set{f' although {also}' if also else ''}: set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT together, or start the script with gradwire run"
        )
    return environ[name]


def _integer(environ: Mapping[str, str], name: str, *, low: int, default: int | None = None) -> int:
    if default is not None and name not in environ:
        return default
    value = _required(environ, name)
    if not value.isascii() or not value.isdecimal() or len(value) > 9 or int(value) < low:
        raise _bad(environ, name, f"a whole number, {low} or more")
    return int(value)


def _port(environ: Mapping[str, str], name: str) -> int:
    port = _integer(environ, name, low=1)
    if port > 65535:
        raise _bad(environ, name, "a port, 1 to 65535")
    return port


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(environ.get(name, default))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise _bad(environ, name, "a number of seconds above 0")
    return value


def _bad(environ: Mapping[str, str], name: str, allowed: str) -> LaunchError:
    return LaunchError(f"{name} is {environ[name][:100]!r}: it must be {allowed}; correct or unset it")
