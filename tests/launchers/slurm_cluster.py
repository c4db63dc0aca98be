"""A Slurm cluster of two nodes that are both this machine, with its own munge, ports and files; nothing is installed."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.faults.scripts import gone_within
from tests.launchers.running import environment

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun")
WAIT_S = 20.0
CONFIG = """
ClusterName=gradwire
SlurmctldHost={hostname}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldSyslogDebug=quiet
SlurmdSyslogDebug=quiet
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/builtin
SchedulerParameters=sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MailProg=/bin/true
NodeName={first} NodeHostname={hostname} NodeAddr=127.0.0.1 Port={first_port} CPUs=2
NodeName={second} NodeHostname={hostname} NodeAddr=127.0.0.1 Port={second_port} CPUs=2
PartitionName=all Nodes={first},{second} Default=YES State=UP
"""


def why_not() -> str | None:
    """Why no cluster can be started here, or None."""
    missing = [name for name in PROGRAMS if find(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: Slurm or munge is not installed"
    return None if os.geteuid() == 0 else "slurmd and slurmctld of a test need root"


def find(program: str) -> str | None:
    """Daemons stand in sbin, which is not on every PATH."""
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


@contextmanager
def cluster(folder: Path, *, nodes: tuple[str, str]) -> Iterator[dict[str, str]]:
    """Two nodes of these names; yields the variables with which srun finds them. Every daemon has ended afterwards."""
    key, config = folder / "munge.key", folder / "slurm.conf"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    for name in ("state", *nodes):
        (folder / name).mkdir()
    port, first_port, second_port = free_ports(3)
    config.write_text(
        CONFIG.format(
            folder=folder,
            hostname=socket.gethostname().partition(".")[0],
            port=port,
            first=nodes[0],
            second=nodes[1],
            first_port=first_port,
            second_port=second_port,
        )
    )
    env = environment(SLURM_CONF=str(config))
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed")]
    with ExitStack() as stack:
        stack.callback(end_strays, f"SLURM_CONF={config}")
        # --force: pytest's folders are closed to other users, which munged would refuse.
        munged = daemon("munged", "--foreground", "--force", *munge, f"--socket={folder}/munge.socket", env=env)
        stack.enter_context(munged).wait_for("work threads")
        stack.enter_context(daemon("slurmctld", "-D", "-c", env=env)).wait_for("Running as primary controller")
        slurmds = [stack.enter_context(daemon("slurmd", "-D", "-N", node, env=env)) for node in nodes]
        for slurmd in slurmds:
            slurmd.wait_for("slurmd started on")
        yield env


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def daemon(program: str, *args: str, env: dict[str, str]) -> Daemon:
    path = find(program)
    assert path is not None
    return Daemon([path, *args], env)


class Daemon:
    """A daemon in the foreground, so that it is a child; a context manager that ends it. What it logs is kept."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self._name = Path(command[0]).name
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
        )
        self._lines: list[str] = []
        self._more = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._more:
                self._lines.append(line)
                self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    def wait_for(self, words: str) -> None:
        """Until it has logged ``words``; AssertionError with its log if it ends or is late."""
        with self._more:
            self._more.wait_for(lambda: self._ended or any(words in line for line in self._lines), WAIT_S)
            said = any(words in line for line in self._lines)
        assert said, f"{self._name} did not say {words!r} within {WAIT_S} s:\n{''.join(self._lines)}"

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10.0)
        self._reader.join(timeout=10.0)


def end_strays(variable: str) -> None:
    """Kill what still carries this cluster's variable: slurmstepd and ranks, which are no children of ours."""
    strays = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal() and has(entry, variable)}
    for pid in strays:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert gone_within(strays, 10.0) == set()


def has(process: Path, variable: str) -> bool:
    try:
        return variable.encode() in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
