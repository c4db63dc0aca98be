"""The sockets of a server that proves the job's token first: bytes of many peers in, their messages out."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gradwire.launch.proof import Doorman, keep_alive
from gradwire.launch.wire import FrameReader, Message, WireError, encode_frame

__all__ = ["Peer", "Peers"]

PROOF_S = 3.0
MAX_UNPROVED = 256
MAX_BACKLOG_BYTES = 8 << 20


@dataclass(kw_only=True, eq=False)
class Peer:
    """One connection. role is "" until its first message; number is its rank or node rank."""

    socket: socket.socket
    doorman: Doorman
    name: str
    deadline: float
    reader: FrameReader = field(default_factory=FrameReader)
    out: bytearray = field(default_factory=bytearray)
    role: str = ""
    number: int = -1
    closing: bool = False


class Peers:
    """All connections of one listening socket, non-blocking; used from one thread.

    report: told about strangers and broken peers, a line each.
    """

    def __init__(self, listener: socket.socket, *, token: str, report: Callable[[str], None]) -> None:
        self._listener = listener
        self._token, self._report = token, report
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._all: set[Peer] = set()
        self._strangers: set[str] = set()
        self._complained_at = 0.0
        listener.setblocking(False)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._all))

    def poll(self, wait_s: float) -> Iterator[tuple[Peer, Message | None]]:
        """Messages that come within `wait_s`; None when a proved peer is gone. Strangers are refused here."""
        for key, events in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
                continue
            peer = key.data
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            if events & selectors.EVENT_READ:
                yield from self._receive(peer)
        now = time.monotonic()
        for peer in self:
            if peer.doorman.admitted is None and now > peer.deadline:
                self.drop(peer)

    def send(self, peer: Peer, message: Message) -> None:
        """Queue a message and send what the socket takes."""
        if peer in self._all and not peer.closing:
            peer.out += encode_frame(message)
            self._flush(peer)

    def finish(self, peer: Peer) -> None:
        """Close `peer` once what is queued for it has been sent."""
        peer.closing = True
        self._flush(peer)

    def drop(self, peer: Peer) -> None:
        """Close a connection at once."""
        if peer in self._all:
            self._all.discard(peer)
            self._selector.unregister(peer.socket)
            peer.socket.close()

    def close(self) -> None:
        """Close everything, the listener too."""
        for peer in self:
            self.drop(peer)
        self._selector.close()
        self._listener.close()

    def forget(self) -> None:
        """In a forked child: close this process's copies of the sockets, not the connections."""
        self._listener.close()
        for peer in self._all:
            peer.socket.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if time.monotonic() - self._complained_at > 10.0:
                self._complained_at = time.monotonic()
                self._report(
                    f"a connection could not be accepted: {error}; raise the limit on open files if it is that"
                )
            time.sleep(0.01)  # it stays ready to be accepted: do not spin
            return
        unproved = sum(peer.doorman.admitted is None for peer in self._all)
        if unproved >= MAX_UNPROVED:
            connection.close()
            self._report(
                f"a connection from {address[0]} is turned away: {unproved} others have not proved the token yet"
            )
            return
        connection.setblocking(False)
        keep_alive(connection)
        doorman = Doorman(self._token)
        name = f"{address[0]}:{address[1]}"
        peer = Peer(socket=connection, doorman=doorman, name=name, deadline=time.monotonic() + PROOF_S)
        peer.out += doorman.greeting
        self._all.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)
        self._flush(peer)

    def _receive(self, peer: Peer) -> Iterator[tuple[Peer, Message | None]]:
        data = self._read(peer)
        if data is None:
            return
        if data and peer.doorman.admitted is None:
            data = self._prove(peer, data)
            if not data:
                return
        if peer.closing and data:
            return
        try:
            messages = peer.reader.feed(data) if data else [None]
        except WireError as error:
            self._report(f"the connection of {peer.name} is closed: {error}")
            messages = [None]
        for message in messages:
            if message is None:
                self.drop(peer)
            if peer.doorman.admitted:
                yield peer, message

    def _prove(self, peer: Peer, data: bytes) -> bytes:
        """Feed the doorman; what follows a good proof."""
        reply, rest = peer.doorman.feed(data)
        peer.out += reply
        self._flush(peer)
        if peer.doorman.admitted is False:
            self._refuse_stranger(peer)
        return rest

    def _read(self, peer: Peer) -> bytes | None:
        if peer not in self._all:
            return None
        try:
            return peer.socket.recv(65536)
        except BlockingIOError:
            return None
        except OSError:
            return b""  # reset by the peer: the same as its end

    def _refuse_stranger(self, peer: Peer) -> None:
        host = peer.name.rpartition(":")[0]
        if host not in self._strangers and len(self._strangers) < MAX_UNPROVED:
            self._strangers.add(host)
            self._report(
                f"a connection from {host} is refused: it belongs to another job (its token differs from ours)"
            )
        self.finish(peer)

    def _flush(self, peer: Peer) -> None:
        if peer not in self._all:
            return
        try:
            while peer.out:
                del peer.out[: peer.socket.send(peer.out)]
        except BlockingIOError:
            pass  # the selector says when there is room again
        except OSError:
            peer.out.clear()  # it is gone; the next read tells
        if peer.closing and not peer.out:
            self.drop(peer)
            return
        if len(peer.out) > MAX_BACKLOG_BYTES:
            self._report(f"the connection of {peer.name} is closed: it takes nothing any more")
            peer.out.clear()
            peer.socket.shutdown(socket.SHUT_RDWR)
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        self._selector.modify(peer.socket, wanted, peer)
