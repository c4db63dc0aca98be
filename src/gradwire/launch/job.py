"""One launcher's part of a job, from the meeting of the hosts to the exit code."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gradwire.launch.coordinator import Coordinator, listen
from gradwire.launch.environment import Environment, read_limits, read_token, worker_environment
from gradwire.launch.gathering import Assignment, Gathering, Node
from gradwire.launch.hosts import Meeting, derived_token, join
from gradwire.launch.local import Workers
from gradwire.launch.network import bind_rendezvous, free_port, interface_for, resolve
from gradwire.launch.output import Output, OutputMode
from gradwire.launch.signals import Interrupted, Signals
from gradwire.launch.verdict import Verdict
from gradwire.launch.wire import Channel, Message

__all__ = ["Job", "run_job"]

POLL_S = 0.5
TERM_AFTER_S, KILL_AFTER_S, KILL_AFTER_INTERRUPT_S = 1.0, 1.6, 4.5


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `gradwire run` was asked to do.

    program: a script's path, or a module's name with `module`. nodes, node_rank, rendezvous: None for one host.
    timeout_s: None for the default. plan_text: TOML for the workers.
    """

    program: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    num_local: int = 1
    nodes: int = 1
    node_rank: int = 0
    rendezvous: tuple[str, int] | None = None
    join_timeout_s: float = 300.0
    output: OutputMode = "rank0"
    plan_text: str | None = None
    timeout_s: float | None = None

    def command(self) -> list[str]:
        """Program and arguments of every worker."""
        return [sys.executable, *(["-m"] if self.module else []), self.program, *self.arguments]


def run_job(job: Job) -> int:
    """Run this host's workers to their end; returns the exit code. Raises LaunchError if the job cannot start.

    0 if every rank of the job ended with 0; a rank's own code; 1 for a rank that raised or was killed; 128 + N for
    signal N to the launcher.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(Signals())
        try:
            return _Run(job, signals, stack).run()
        except Interrupted as interrupted:
            say(f"{interrupted.number.name}: no worker was started")
            return 128 + interrupted.number


def say(text: str) -> None:
    """A line, or a report, of the launcher on stderr."""
    print(f"gradwire: {text}", file=sys.stderr, flush=True)


class _Run:
    def __init__(self, job: Job, signals: Signals, stack: ExitStack) -> None:
        self._job, self._signals = job, signals
        self._host = socket.gethostname()
        timeout_s, self._hang_s = read_limits()
        self._timeout_s = timeout_s if job.timeout_s is None else job.timeout_s
        self._token = _token(job)
        self._store: socket.socket | None = None
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._selector.register(signals, selectors.EVENT_READ, self._signalled)
        self._channel, self._assignment, self._control = self._meet(stack)
        stack.callback(self._channel.close)
        self._selector.register(self._channel, selectors.EVENT_READ, self._told)
        self._ranks = range(self._assignment.offset, self._assignment.offset + job.num_local)
        output = Output(job.output, self._ranks)
        stack.callback(output.close)
        self._workers = Workers(job.command(), selector=self._selector, output=output)
        stack.callback(lambda: self._workers.signal(signal.SIGKILL))
        self._verdict: Verdict | None = None
        self._done = False
        self._heeded = 0  # ending signals
        self._looked_at = 0.0
        self._steps: list[tuple[float, Callable[[], None]]] = []

    def run(self) -> int:
        self._start()
        while self._workers.running or not (self._done or self._verdict or self._signals.received):
            wait_s = min([POLL_S, *(at - time.monotonic() for at, _ in self._steps)])
            for key, _ in self._selector.select(max(0.0, wait_s)):
                cast("Callable[[], object]", key.data)()
            for rank, exit in self._workers.reap():
                self._send(exit.message(rank))
            self._look_for_suspended()
            self._escalate()
        if self._signals.received:
            return 128 + self._signals.received[0]
        return self._verdict.exit_code if self._verdict else 0

    def _meet(self, stack: ExitStack) -> tuple[Channel, Assignment, tuple[str, int]]:
        """Meet the other launchers, at a coordinator of our own if this is node 0."""
        job = self._job
        coordinator: Coordinator | None = None
        if job.node_rank == 0:
            coordinator = self._coordinate()
            coordinator.start()
            stack.callback(coordinator.stop)
            control = coordinator.address
        else:
            host, port = job.rendezvous or ("127.0.0.1", 0)
            control = (resolve(host), port)
        node = Node(
            node_rank=job.node_rank,
            nodes=job.nodes,
            num_local=job.num_local,
            host=self._host,
            pid=os.getpid(),
            plan=job.plan_text or "",
        )
        meeting = Meeting(
            address=control,
            token=self._token,
            timeout_s=job.join_timeout_s,
            pause=self._signals.pause,
            report=say,
            missing=None if coordinator is None else coordinator.missing_nodes,
        )
        channel, assignment = join(node, meeting)
        return channel, assignment, control

    def _coordinate(self) -> Coordinator:
        """Node 0 listens at the rendezvous, and nowhere else; rank 0's store gets a socket of the same address."""
        rendezvous = self._job.rendezvous
        listener = listen(("127.0.0.1", 0)) if rendezvous is None else bind_rendezvous(*rendezvous)
        host = str(listener.getsockname()[0])
        self._store = listen((host, 0))
        store = (host, int(self._store.getsockname()[1]))
        return Coordinator(
            token=self._token,
            listener=listener,
            report=say,
            gathering=Gathering(self._job.nodes, store=store, foreign_port=free_port(host)),
            hang_s=self._hang_s,
            timeout_s=self._timeout_s,
        )

    def _start(self) -> None:
        interface = interface_for(self._control[0])
        for rank in self._ranks:
            fds = [] if self._store is None or rank != 0 else [self._store.fileno()]
            worker = Environment(
                rank=rank,
                world_size=self._assignment.world_size,
                local_rank=rank - self._ranks.start,
                local_world_size=len(self._ranks),
                node_rank=self._job.node_rank,
                launcher="gradwire",
                store_host=self._assignment.store_host,
                store_port=self._assignment.store_port,
                store_fd=fds[0] if fds else None,
                control=self._control,
                token=self._token,
                plan_text=self._job.plan_text,
                timeout_s=self._timeout_s,
                hang_s=self._hang_s,
            )
            environ = worker_environment(worker, foreign_port=self._assignment.foreign_port, interface=interface)
            pid = self._workers.start(rank, environ, pass_fds=fds)
            self._send({"kind": "placed", "rank": rank, "host": self._host, "pid": pid})
        if self._store is not None:
            self._store.close()

    def _look_for_suspended(self) -> None:
        now = time.monotonic()
        if now - self._looked_at >= POLL_S:
            self._looked_at = now
            for rank, state in self._workers.suspended():
                self._send({"kind": "suspended", "rank": rank, "suspended": state})

    def _told(self) -> None:
        messages = self._channel.receive(0.0)
        if messages is None:
            self._selector.unregister(self._channel)
            if not self._done and self._verdict is None:
                headline = f"node 0 at {self._control[0]}:{self._control[1]} is gone: its launcher ended without a word"
                self._judge(Verdict(rank=0, host=self._control[0], step=None, headline=headline))
            return
        for message in messages:
            if message["kind"] == "stop":
                self._judge(Verdict.parse(message))
            elif message["kind"] == "done":
                self._done = True

    def _judge(self, verdict: Verdict) -> None:
        """Say who failed, and end the rest: those who hear it themselves get a moment to unwind."""
        self._verdict = self._verdict or verdict
        if self._signals.received:
            return
        say(verdict.text() if self._job.node_rank == 0 or verdict.rank in self._ranks else verdict.headline)
        self._end(TERM_AFTER_S, signal.SIGTERM, KILL_AFTER_S)

    def _signalled(self) -> None:
        self._signals.clear()
        received = self._signals.received
        heeded, self._heeded = self._heeded, len(received)
        if heeded == len(received):
            return  # SIGCHLD: the loop reaps
        if len(received) > 1:
            self._end(0.0, signal.SIGKILL, 0.0)
            return
        number = received[0]
        say(f"{number.name}: ending {len(self._workers.running)} workers")
        self._send({"kind": "interrupted", "signal": int(number)})
        self._end(0.0, number, KILL_AFTER_INTERRUPT_S if number == signal.SIGINT else KILL_AFTER_S)

    def _end(self, after_s: float, number: signal.Signals, kill_after_s: float) -> None:
        now = time.monotonic()
        self._steps.append((now + after_s, lambda: self._workers.signal(number)))
        self._steps.append((now + kill_after_s, lambda: self._workers.signal(signal.SIGKILL)))

    def _escalate(self) -> None:
        due = [step for step in self._steps if step[0] <= time.monotonic()]
        self._steps = [step for step in self._steps if step not in due]
        for _, act in due:
            act()

    def _send(self, message: Message) -> None:
        with suppress(OSError):  # node 0 is gone: reading the channel says so and ends this node
            self._channel.send(message)


def _token(job: Job) -> str:
    """The user's secret, else a random one for one host, else one that every node derives alike."""
    secret = read_token()
    if secret is not None:
        return secret
    if job.rendezvous is None:
        return secrets.token_hex(32)
    program = job.program.encode() if job.module else Path(job.program).read_bytes()
    return derived_token(rendezvous=job.rendezvous, nodes=job.nodes, program=program, arguments=job.arguments)
