"""Starts and ends the worker processes of this host. Each has a process group of its own and dies with the launcher."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from gradwire.errors import LaunchError
from gradwire.launch.output import Output, Stream
from gradwire.launch.processes import MemoryKills, die_with_parent, is_suspended
from gradwire.launch.verdict import Exit

__all__ = ["Workers"]

READ_BYTES = 1 << 16


@dataclass(kw_only=True, eq=False)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    pipes: dict[int, Stream]
    suspended: bool = False


class Workers:
    """The workers of one host.

    command: program and arguments, the same for all. selector: the workers' pipes are registered there, with a callable
    as data that reads them. output: takes what they print.
    """

    def __init__(self, command: Sequence[str], *, selector: selectors.BaseSelector, output: Output) -> None:
        self._command, self._selector, self._output = command, selector, output
        self._running: dict[int, _Worker] = {}
        self._memory_kills = MemoryKills.read()

    @property
    def running(self) -> Mapping[int, int]:
        """Process id of each rank that has not ended."""
        return {rank: worker.process.pid for rank, worker in self._running.items()}

    def start(self, rank: int, environ: Mapping[str, str], *, pass_fds: Iterable[int] = ()) -> int:
        """Start one worker and return its process id. Raises LaunchError if the program cannot be run."""
        parent = os.getpid()
        piped = self._output.wants(rank, "stdout")
        try:
            process = subprocess.Popen(
                self._command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent),
                pass_fds=tuple(pass_fds),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(f"rank {rank} cannot be started ({error}): see limits on processes and memory") from error
        streams: list[tuple[Stream, IO[bytes] | None]] = [("stdout", process.stdout), ("stderr", process.stderr)]
        worker = _Worker(rank=rank, process=process, pipes={})
        for name, pipe in streams:
            if pipe is not None:
                worker.pipes[self._watch(worker, pipe)] = name
        self._running[rank] = worker
        return process.pid

    def reap(self) -> Iterator[tuple[int, Exit]]:
        """Workers that have ended since; what is left of their process groups (loader workers) is killed."""
        for rank, worker in list(self._running.items()):
            pid = worker.process.pid
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            _signal_group(pid, signal.SIGKILL)  # before the wait below frees the number of the group
            code = worker.process.wait()
            self._drain(worker)
            del self._running[rank]
            note = self._memory_kills.note() if code == -signal.SIGKILL else ""
            yield rank, Exit(code=code, note=note, tail=self._output.tail(rank), shown=self._output.shows(rank))

    def suspended(self) -> Iterator[tuple[int, bool]]:
        """Ranks that have been stopped (SIGSTOP) or resumed since the last call."""
        for rank, worker in self._running.items():
            state = is_suspended(worker.process.pid)
            if state != worker.suspended:
                worker.suspended = state
                yield rank, state

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every worker; SIGKILL goes to their whole process groups."""
        for worker in self._running.values():
            if number == signal.SIGKILL:
                _signal_group(worker.process.pid, number)
            else:
                os.kill(worker.process.pid, number)  # not send_signal, which would reap behind the back of `reap`

    def _watch(self, worker: _Worker, pipe: IO[bytes]) -> int:
        descriptor = pipe.fileno()
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._read(worker, descriptor))
        return descriptor

    def _read(self, worker: _Worker, descriptor: int) -> bool:
        """Pass on what is there; False at the end of the stream or when there is nothing."""
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        self._output.feed(worker.rank, worker.pipes[descriptor], data)
        if not data:
            self._forget(worker, descriptor)
        return bool(data)

    def _drain(self, worker: _Worker) -> None:
        """Read to the end, but do not wait for an end that a surviving grandchild holds open."""
        for descriptor, stream in list(worker.pipes.items()):
            while descriptor in worker.pipes and self._read(worker, descriptor):
                pass
            if descriptor in worker.pipes:
                self._output.feed(worker.rank, stream, b"")
                self._forget(worker, descriptor)

    def _forget(self, worker: _Worker, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        del worker.pipes[descriptor]
        for pipe in (worker.process.stdout, worker.process.stderr):
            if pipe is not None and not pipe.closed and pipe.fileno() == descriptor:
                pipe.close()


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        pass  # nobody is left in it
