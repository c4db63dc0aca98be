"""Launchers as real processes; every wait has a deadline."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PREAMBLE = """
import os, sys, time, signal, threading
from pathlib import Path
from gradwire.errors import PeerError
from gradwire.launch.environment import read_environment
from gradwire.launch.heartbeat import Heartbeat
from gradwire.launch.excepthook import install_excepthook
here = Path(__file__).parent
env = read_environment()
rank = env.rank
heart = Heartbeat(address=env.control, token=env.token, rank=rank, world_size=env.world_size, host="testhost")
install_excepthook(heart)
def meet(name):
    (here / f"{name}-{rank}").write_text(str(os.getpid()))
    end = time.monotonic() + 20
    while not all((here / f"{name}-{r}").exists() for r in range(env.world_size)):
        if time.monotonic() > end: raise TimeoutError(name)
        time.sleep(0.01)
def wait_for_peers():
    stopped = threading.Event()
    heart.on_stop(stopped.set)
    if not stopped.wait(30): raise TimeoutError("no verdict")
    raise PeerError("a peer is gone")
heart.step = 12
meet("ready")
"""


def wait_until(condition: Callable[[], object], what: str, *, timeout_s: float = 20.0) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {timeout_s} s")
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


class Launched:
    """One running `gradwire run`."""

    def __init__(self, folder: Path, process: subprocess.Popen[str], log: Path) -> None:
        self.folder, self.process, self.log = folder, process, log

    def pids(self, count: int, name: str = "ready") -> list[int]:
        """Process ids that the workers wrote when they met."""
        files = [self.folder / f"{name}-{rank}" for rank in range(count)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), "the start of the workers")
        return [int(file.read_text()) for file in files]

    def err(self) -> str:
        """What the launcher has written on stderr."""
        return self.log.read_text()

    def wait(self, timeout_s: float = 30.0) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    def out(self) -> str:
        """Its stdout, after the end."""
        return self.log.with_suffix(".out").read_text()


Launch = Callable[..., Launched]
