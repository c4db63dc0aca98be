"""The socket server around `Roster`: in the launcher of node 0, or in rank 0 under a foreign launcher. One thread."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import cast

from gradwire.launch.actions import Action, AskStack, Beat, Done, Refuse, Release, Stop, Warn
from gradwire.launch.gathering import Gathering, Node
from gradwire.launch.peers import Peer, Peers
from gradwire.launch.processes import is_suspended
from gradwire.launch.roster import Roster
from gradwire.launch.verdict import Exit, Verdict, rank_range, signal_name
from gradwire.launch.wire import Message, WireError, get_int, get_text

__all__ = ["Coordinator", "listen"]

TICK_S = 0.1
LINGER_S = 1.0


def listen(bind: tuple[str, int]) -> socket.socket:
    """A listening socket on `bind` (port 0: any free one), closed on exec. OSError as bind(2) has it."""
    family = socket.AF_INET6 if ":" in bind[0] else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(bind)
        listener.listen(512)
    except BaseException:
        listener.close()
        raise
    return listener


class Coordinator:
    """Hears every rank and every launcher, and tells them the verdict.

    token: what a peer must prove. world_size: known at once (rank 0 under a foreign launcher), or None with
    `gathering`, which then gives it when all nodes have joined. bind: (host, port), port 0 for any. report: gets each
    text to show, without prefix: hang reports, refused strangers. hang_s, timeout_s: see `Roster`.

    >>> coordinator = Coordinator(token="secret", world_size=2, bind=("127.0.0.1", 0), report=print)
    >>> coordinator.start(); coordinator.address[0]; coordinator.stop()
    '127.0.0.1'
    """

    def __init__(
        self,
        *,
        token: str,
        world_size: int | None = None,
        bind: tuple[str, int] = ("127.0.0.1", 0),
        report: Callable[[str], None],
        gathering: Gathering | None = None,
        listener: socket.socket | None = None,
        hang_s: float = 5.0,
        timeout_s: float = 300.0,
    ) -> None:
        listener = listener or listen(bind)
        name = cast("tuple[str, int]", listener.getsockname())
        self.address: tuple[str, int] = (name[0], name[1])
        self._host = socket.gethostname()
        self._report = report
        self._limits = (hang_s, timeout_s)
        self._gathering = gathering
        self._roster = None if world_size is None else self._new_roster(world_size)
        self._peers = Peers(listener, token=token, report=report)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gradwire-coordinator", daemon=True)
        _close_in_children(self._peers)

    @property
    def verdict(self) -> Verdict | None:
        """Why the job stops, once that is known."""
        return None if self._roster is None else self._roster.verdict

    def start(self) -> None:
        """Serve from a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is queued (for at most 1 s), close every socket, end the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(LINGER_S + 2.0)

    def missing_nodes(self) -> list[int]:
        """Node ranks that have not joined yet."""
        return [] if self._gathering is None else self._gathering.missing

    def _new_roster(self, world_size: int) -> Roster:
        hang_s, timeout_s = self._limits
        return Roster(world_size, hang_s=hang_s, timeout_s=timeout_s, launchers=self._gathering is not None)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
            deadline = time.monotonic() + LINGER_S
            while time.monotonic() < deadline and any(peer.role for peer in self._peers):
                self._turn()  # a close with unread bytes would cut off what was sent last: let them close first
        finally:
            self._peers.close()

    def _turn(self) -> None:
        for peer, message in self._peers.poll(TICK_S):
            try:
                self._gone(peer) if message is None else self._hear(peer, message)
            except WireError as error:
                self._report(f"the connection of {peer.name} is closed: {error}")
                self._peers.drop(peer)
                self._gone(peer)
        if self._roster is not None:
            now = time.monotonic()
            self._watch_local(self._roster, now)
            self._do(self._roster.tick(now))

    def _hear(self, peer: Peer, message: Message) -> None:
        kind = get_text(message, "kind")
        if not peer.role and kind == "node":
            self._join(peer, Node.parse(message))
        elif not peer.role and kind == "hello":
            self._hello(peer, message)
        elif peer.role == "rank" and self._roster is not None:
            self._hear_rank(self._roster, peer, kind, message)
        elif peer.role == "node" and self._roster is not None:
            self._hear_node(self._roster, peer, kind, message)
        else:
            raise WireError(f"a {kind[:20]} message came out of turn")

    def _join(self, peer: Peer, node: Node) -> None:
        gathering = self._gathering
        refusal = "this job has no several hosts" if gathering is None else gathering.join(node)
        if gathering is None or refusal is not None:
            self._refuse(peer, refusal or "")
            return
        peer.role, peer.number = "node", node.node_rank
        if gathering.missing:
            return
        self._roster = self._new_roster(gathering.world_size)
        for member in self._peers:
            if member.role == "node":
                self._peers.send(member, gathering.assignment(member.number).message())

    def _hello(self, peer: Peer, message: Message) -> None:
        if self._roster is None:
            self._refuse(peer, "the job has not started yet")
            return
        rank, host, pid = get_int(message, "rank"), get_text(message, "host")[:255], get_int(message, "pid")
        for action in self._roster.hello(rank, host, pid, time.monotonic()):
            if isinstance(action, Refuse):
                self._report(f"a process from {peer.name} is refused: {action.reason}")
                self._refuse(peer, action.reason)
                return
        peer.role, peer.number = "rank", rank
        self._peers.send(peer, {"kind": "welcome"})
        if self._roster.verdict is not None:
            self._peers.send(peer, self._roster.verdict.message())

    def _hear_rank(self, roster: Roster, peer: Peer, kind: str, message: Message) -> None:
        now, rank = time.monotonic(), peer.number
        if kind == "beat":
            self._do(roster.beat(rank, Beat.parse(message, now), now))
        elif kind == "fail":
            self._do(roster.fail(rank, get_text(message, "text"), now, victim=message.get("victim") is True))
        elif kind == "leave":
            code = get_int(message, "exit_code", low=0, high=255)
            self._do(roster.leave(rank, get_text(message, "reason") or None, now, exit_code=code))
        elif kind == "note":
            self._report(get_text(message, "text"))
        elif kind == "stacks":
            self._do(roster.stacks(rank, get_text(message, "text"), now))
        else:
            raise WireError(f"a {kind[:20]} message came out of turn")

    def _hear_node(self, roster: Roster, peer: Peer, kind: str, message: Message) -> None:
        now, ranks = time.monotonic(), self._ranks(peer)
        if kind == "interrupted":
            number = get_int(message, "signal", high=64)
            ended = f"node {peer.number} was ended by {signal_name(number)}"
            what = f"{ended}, and its {rank_range(ranks)} with it"
            self._do(roster.node_lost(ranks, what, now, exit_code=128 + number))
            return
        rank = get_int(message, "rank", low=ranks.start, high=ranks.stop - 1)
        if kind == "placed":
            roster.placed(rank, get_text(message, "host")[:255], get_int(message, "pid"))
        elif kind == "suspended":
            roster.suspended(rank, message.get("suspended") is True)
        elif kind == "exited":
            self._do(roster.exited(rank, Exit.parse(message), now))
        else:
            raise WireError(f"a {kind[:20]} message came out of turn")

    def _gone(self, peer: Peer) -> None:
        now = time.monotonic()
        if peer.role == "rank" and self._roster is not None:
            self._do(self._roster.lost(peer.number, now))
        elif peer.role == "node" and self._gathering is not None:
            if self._roster is None:
                self._gathering.forget(peer.number)
                return
            ranks, host = self._ranks(peer), self._gathering.joined[peer.number].host
            what = (
                f"{rank_range(ranks)} on {host} gone: the launcher of node {peer.number} ended without a word (killed, "
                "or its host or network is down)"
            )
            self._do(self._roster.node_lost(ranks, what, now))

    def _ranks(self, peer: Peer) -> range:
        return range(0) if self._gathering is None else self._gathering.ranks(peer.number)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Stop():
                    self._broadcast(action.verdict.message())
                case Release():
                    self._broadcast({"kind": "release"}, role="rank")
                case Done():
                    self._broadcast({"kind": "done"}, role="node")
                case AskStack():
                    self._broadcast({"kind": "where"}, role="rank", number=action.rank)
                case Warn():
                    self._report(action.text)
                case Refuse():
                    self._report(action.reason)

    def _broadcast(self, message: Message, *, role: str | None = None, number: int | None = None) -> None:
        for peer in self._peers:
            if peer.role and role in (None, peer.role) and number in (None, peer.number):
                self._peers.send(peer, message)

    def _refuse(self, peer: Peer, reason: str) -> None:
        self._peers.send(peer, {"kind": "refused", "reason": reason})
        self._peers.finish(peer)

    def _watch_local(self, roster: Roster, now: float) -> None:
        """Under a foreign launcher nobody else sees that a silent rank of this host is stopped."""
        for member in roster.members.values() if self._gathering is None else ():
            silent = member.alive and member.heard_at is not None and now - member.heard_at > 1.0
            if silent and member.pid is not None and member.host == self._host:
                member.suspended = is_suspended(member.pid)


def _close_in_children(peers: Peers) -> None:
    """A forked child (a loader's worker) must not keep connections open that its parent's end would close."""
    reference = weakref.ref(peers)

    def forget() -> None:
        found = reference()
        if found is not None:
            found.forget()

    os.register_at_fork(after_in_child=forget)
