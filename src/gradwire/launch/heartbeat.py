"""The worker's end: says every 0.2 s where this rank is, hears verdicts, shows its stacks when asked."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gradwire.errors import LaunchError
from gradwire.launch.proof import connect
from gradwire.launch.stacks import all_stacks, thread_stack
from gradwire.launch.verdict import Verdict, shortened
from gradwire.launch.wire import Channel, Message, get_text

__all__ = ["Heartbeat"]

BEAT_S = 0.2
UNWIND_S = 2.0
CONNECT_S = 5.0


@dataclass(kw_only=True)
class _Progress:
    """One group: the last collective entered, and since when it has been running (None: it has ended).

    ranks: the group's, None for all of the job.
    """

    op: str
    seq: int
    since: float | None
    ranks: tuple[int, ...] | None


class Heartbeat:
    """This rank's line to the coordinator; a daemon thread keeps it. All methods are safe from any thread.

    address: the coordinator. reports: no launcher of ours prints the report, so this rank prints a line as a victim.
    step, step_s: where the loop is and its usual seconds a step; the loop sets them.
    Raises LaunchError within 1 s if the address belongs to another job or the rank is taken, after 5 s of silence.
    When the job must stop, the process has 2 s to unwind and `close`; then it is ended with exit code 1.
    """

    def __init__(
        self, *, address: tuple[str, int], token: str, rank: int, world_size: int, host: str, reports: bool = False
    ) -> None:
        self.rank, self.world_size, self.reports = rank, world_size, reports
        self.step = 0
        self.step_s = 0.0
        self._address = address
        self._pid = os.getpid()
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        self._groups: dict[str, _Progress] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._verdict: Verdict | None = None
        self._decided, self._released, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._settled = threading.Event()  # a verdict or the release, for leave()
        self._told = False
        self._channel = _connect(address, token)
        self._channel.send({"kind": "hello", "rank": rank, "host": host, "pid": self._pid})
        waiting = self._await_welcome()
        _close_in_children(self._channel)
        self._thread = threading.Thread(target=self._run, args=(waiting,), name="gradwire-heartbeat", daemon=True)
        self._thread.start()

    def arrive(self, group: str, op: str, seq: int, ranks: tuple[int, ...] | None = None) -> None:
        """A collective begins on this rank; `seq` counts per group, from 1. ranks: the group's, None for all of the job."""
        with self._lock:
            self._groups[group] = _Progress(op=op, seq=seq, since=time.monotonic(), ranks=ranks)

    def complete(self, group: str) -> None:
        """The collective that `group` was in has ended."""
        with self._lock:
            if group in self._groups:
                self._groups[group].since = None

    def forget(self, group: str) -> None:
        """This rank has closed `group`: beats need not tell of it any more."""
        with self._lock:
            self._groups.pop(group, None)

    def fail(self, text: str, *, victim: bool = False) -> bool:
        """Say that an exception is about to end this rank: its traceback, and whether it only met another's failure.

        Only the first call counts. Returns whether the coordinator has been told.
        """
        if os.getpid() != self._pid:
            return False
        with self._lock:
            if self._told:
                return True
            self._told = True
        message: Message = {"kind": "fail", "text": shortened(text), "victim": victim}
        self._told = self._send(self._beat()) and self._send(message)
        return self._told

    def note(self, text: str) -> None:
        """Have a line shown where the job's reports are shown."""
        self._send({"kind": "note", "text": shortened(text)})

    @property
    def failed(self) -> bool:
        """Whether the coordinator has been told by `fail`."""
        return self._told

    def leave(self, reason: str | None = None, *, exit_code: int = 0) -> Verdict | None:
        """This rank is done (None: its script ended well), and its process will end with `exit_code`.

        Blocks until all are, or a verdict: then returns that.
        """
        goodbye: Message = {"kind": "leave", "reason": reason or "", "exit_code": exit_code & 255}
        if self._send(self._beat()) and self._send(goodbye):
            self._settled.wait()
        return self._verdict

    def verdict(self, wait_s: float = 0.0) -> Verdict | None:
        """Why the job stops, waiting at most `wait_s` seconds for the coordinator's word."""
        self._decided.wait(wait_s)
        return self._verdict

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once, from the heartbeat's thread, when the job must stop; at once if it must."""
        with self._lock:
            late = self._verdict is not None
            if not late:
                self._callbacks.append(callback)
        if late:
            callback()

    def close(self) -> None:
        """Hang up. Does not say that the rank has left: `leave` or `fail` do. Harmless twice."""
        self._closed.set()
        self._channel.close()
        if threading.current_thread() is not self._thread and os.getpid() == self._pid:
            self._thread.join(UNWIND_S)

    def _await_welcome(self) -> list[Message]:
        deadline = time.monotonic() + CONNECT_S
        while time.monotonic() < deadline:
            messages = self._channel.receive(deadline - time.monotonic())
            if messages is None:
                break
            if messages and messages[0]["kind"] == "refused":
                self._channel.close()
                raise LaunchError(f"rank {self.rank} is refused: {get_text(messages[0], 'reason')}")
            if messages:
                return messages[1:]
        self._channel.close()
        raise LaunchError(
            f"rank {self.rank} got no answer from the coordinator at {self._address[0]}:{self._address[1]} within "
            f"{CONNECT_S:g} s: see whether the launcher (or rank 0) still runs"
        )

    def _run(self, messages: list[Message]) -> None:
        due = time.monotonic()
        while True:
            for message in messages:
                self._hear(message)
            if self._closed.is_set():
                return
            if time.monotonic() >= due:
                due = time.monotonic() + BEAT_S
                self._send(self._beat())
            received = self._channel.receive(due - time.monotonic())
            if received is None:
                self._lost()
                return
            messages = received

    def _hear(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "stop":
            self._stop(Verdict.parse(message))
        elif kind == "release":
            self._released.set()
            self._settled.set()
        elif kind == "where":
            self._send({"kind": "stacks", "text": all_stacks(self._owner)})

    def _lost(self) -> None:
        if self._closed.is_set() or self._released.is_set():
            return
        host, port = self._address
        headline = f"the launcher (or rank 0, if another launcher is used) is gone: its connection {host}:{port} closed"
        self._stop(Verdict(rank=0, host=host, step=self.step, headline=headline))

    def _stop(self, verdict: Verdict) -> None:
        with self._lock:
            if self._verdict is not None:
                return
            self._verdict = verdict
            callbacks, self._callbacks = self._callbacks, []
        self._decided.set()
        self._settled.set()
        threading.Thread(target=self._end_late, name="gradwire-end", daemon=True).start()
        if self.reports and verdict.rank != self.rank:
            with suppress(OSError):  # a closed stderr must not keep the callbacks from being called
                line = f"gradwire: rank {self.rank} stops: {verdict.headline}\n"
                print(line, end="", file=sys.stderr, flush=True)  # one write: the ranks share this stderr
        for callback in callbacks:
            try:
                callback()
            except Exception:  # the others must still be called
                traceback.print_exc()

    def _end_late(self) -> None:
        """A main thread that hangs in a collective, or computes on, does not keep the job from ending."""
        if not self._closed.wait(UNWIND_S):
            sys.stderr.flush()
            os._exit(1)

    def _send(self, message: Message) -> bool:
        try:
            self._channel.send(message)
        except OSError:
            return False  # the reading side meets the same end and says so
        return True

    def _beat(self) -> Message:
        now = time.monotonic()
        with self._lock:
            groups = [
                {
                    "group": name,
                    "op": progress.op,
                    "seq": progress.seq,
                    "waited_s": None if progress.since is None else now - progress.since,
                    "ranks": progress.ranks,
                }
                for name, progress in self._groups.items()
            ]
        stack = thread_stack(self._owner)
        return {"kind": "beat", "step": self.step, "step_s": self.step_s, "groups": groups, "stack": stack}


def _connect(address: tuple[str, int], token: str) -> Channel:
    """Retry silence for 5 s: on a busy machine a coordinator may answer late; a refusal comes at once."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            return connect(address, token)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) or time.monotonic() > deadline:
                raise LaunchError(
                    f"the coordinator at {address[0]}:{address[1]} cannot be reached: {error}; see whether the "
                    "launcher (or rank 0) still runs, and whether a firewall is between"
                ) from error


def _close_in_children(channel: Channel) -> None:
    """A forked child (a loader's worker) must not keep the connection open that its parent's end would close."""
    reference = weakref.ref(channel)

    def forget() -> None:
        found = reference()
        if found is not None:
            found.forget()

    os.register_at_fork(after_in_child=forget)
