"""`Lab`: hosts as network namespaces on one switch, each with a shaped wire and a core of its own."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from benchmarks.lab.tools import LabError, call, clean, namespaces, remove, why_not

BURST = "256kb"
QUEUE = "50ms"
WIRE = "eth0"  # the one network interface of every host
MAX_HOSTS = 200
_counter = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a command ended: its exit code (negative: killed by that signal) and what it printed."""

    returncode: int
    stdout: str
    stderr: str


class Lab:
    """``hosts`` network namespaces joined by one switch; every wire carries ``rate_mbit`` each way.

    hosts: how many. rate_mbit: megabits per second, or None for as fast as the machine is. A wire so shaped carries
    about 95 % of its rate in TCP payload. No delay and no loss are added. Host i has the address ``address(i)``, one
    interface ``eth0``, and its commands run on core ``i`` modulo the number of cores.

    Everything lives inside the namespaces, whose names hold this process's id: two labs do not meet, and closing (or
    the end of the process, or SIGTERM) removes all. After a SIGKILL the next lab, or ``python -m benchmarks.lab
    clean``, does. Raises LabError without root or without ``ip`` and ``tc``.
    """

    def __init__(self, *, hosts: int, rate_mbit: float | None = 1000) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise LabError(f"a lab has 1 to {MAX_HOSTS} hosts, not {hosts}")
        if rate_mbit is not None and rate_mbit <= 0:
            raise LabError(f"rate_mbit={rate_mbit} must be positive, or None for no limit")
        self.hosts = hosts
        self.rate_mbit = rate_mbit
        self._name = f"gwlab-{os.getpid()}-{next(_counter)}"
        self._owner = os.getpid()
        self._old_handler: signal.Handlers | None = None

    def __enter__(self) -> Lab:
        reason = why_not()
        if reason is not None:
            raise LabError(reason)
        clean()
        atexit.register(self.close)
        self._catch_sigterm()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every command still running in the lab and remove it. Does nothing the second time."""
        if os.getpid() != self._owner:
            return  # a forked child does not own it
        atexit.unregister(self.close)
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)
            self._old_handler = None
        for name in namespaces():
            if name.startswith(f"{self._name}-"):
                remove(name)

    def address(self, host: int) -> str:
        """The IPv4 address of ``host``, reachable from the other hosts only."""
        return f"10.77.0.{self._known(host) + 1}"

    def namespace(self, host: int) -> str:
        """The network namespace of ``host``, for `ip netns exec`."""
        return f"{self._name}-h{self._known(host)}"

    def command(self, host: int, words: Sequence[str | Path]) -> list[str]:
        """``words`` as a command that runs on ``host``, on its core."""
        inside = ["ip", "netns", "exec", self.namespace(host)]
        core = sorted(os.sched_getaffinity(0))[host % len(os.sched_getaffinity(0))]
        return [*inside, "taskset", "-c", str(core), *(str(word) for word in words)]

    def start(
        self,
        host: int,
        words: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on ``host`` in a session of its own; what is left of it ends with the lab.

        env: added to this process's environment. stdout, stderr: as for ``subprocess.Popen``.
        """
        return subprocess.Popen(
            self.command(host, words),
            env=os.environ | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        commands: Mapping[int, Sequence[str | Path]],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> dict[int, Finished]:
        """Run one command on each host given, all at once, and wait for all of them.

        commands: host -> words. timeout_s: for all together. Returns host -> how it ended. Raises LabError at the
        timeout, with what every command had printed last; all of them are killed.
        """
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as files:
            opened = {
                host: tuple(files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)) for host in commands
            }
            running = {
                host: self.start(host, words, env=env, stdout=opened[host][0].fileno(), stderr=opened[host][1].fileno())
                for host, words in commands.items()
            }
            late = [host for host, process in running.items() if not _wait(process, deadline)]
            for process in running.values():
                _end(process)
            ended = {}
            for host, process in running.items():
                said = [(file.seek(0), file.read())[1] for file in opened[host]]
                ended[host] = Finished(returncode=process.returncode, stdout=said[0], stderr=said[1])
        if late:
            told = "\n".join(f"host {host}: {(done.stdout + done.stderr)[-2000:]}" for host, done in ended.items())
            raise LabError(f"hosts {late} were still running after {timeout_s:g} s and were killed\n{told}")
        return ended

    def cut(self, host: int) -> None:
        """Pull ``host``'s cable: nothing passes, and no connection is told."""
        call("ip", "-n", self._switch, "link", "set", self._port(host), "down")

    def restore(self, host: int) -> None:
        """Plug ``host``'s cable in again."""
        call("ip", "-n", self._switch, "link", "set", self._port(host), "up")

    def bytes(self, host: int) -> tuple[int, int]:
        """(sent, received) by ``host``'s interface since the lab was built, headers included."""
        folder = f"/sys/class/net/{WIRE}/statistics"
        inside = ("ip", "netns", "exec", self.namespace(host), "cat")
        sent, received = call(*inside, f"{folder}/tx_bytes", f"{folder}/rx_bytes").split()
        return int(sent), int(received)

    @property
    def _switch(self) -> str:
        return f"{self._name}-sw"

    def _port(self, host: int) -> str:
        return f"port{self._known(host)}"

    def _known(self, host: int) -> int:
        if not 0 <= host < self.hosts:
            raise LabError(f"host {host} is not one of this lab's 0..{self.hosts - 1}")
        return host

    def _build(self) -> None:
        call("ip", "netns", "add", self._switch)
        call("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        call("ip", "-n", self._switch, "link", "set", "switch", "up")
        for host in range(self.hosts):
            self._plug(host)

    def _plug(self, host: int) -> None:
        inside, port = self.namespace(host), self._port(host)
        call("ip", "netns", "add", inside)
        call("ip", "-n", inside, "link", "set", "lo", "up")
        call("ip", "-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", WIRE, "netns", inside)
        call("ip", "-n", self._switch, "link", "set", port, "master", "switch")
        call("ip", "-n", inside, "address", "add", f"{self.address(host)}/24", "dev", WIRE)
        for where, wire in ((inside, WIRE), (self._switch, port)):
            call("ip", "-n", where, "link", "set", wire, "addrgenmode", "none")  # no IPv6 chatter in the counters
            call("ip", "-n", where, "link", "set", wire, "up")
            if self.rate_mbit is not None:
                shape = ("tbf", "rate", f"{self.rate_mbit:g}mbit", "burst", BURST, "latency", QUEUE)
                call("tc", "-n", where, "qdisc", "replace", "dev", wire, "root", *shape)

    def _catch_sigterm(self) -> None:
        def leave(number: int, frame: FrameType | None) -> None:
            raise SystemExit(128 + number)

        with contextlib.suppress(ValueError):  # not the main thread: atexit and the next lab's clean() remain
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, leave)
                self._old_handler = signal.SIG_DFL


def _wait(process: subprocess.Popen[str], deadline: float) -> bool:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of a command's session, and collect it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
