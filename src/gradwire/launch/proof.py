"""Both sides of a connection prove the job's token (HMAC-SHA256 over both nonces) before either parses a byte.

server: MAGIC nonce_s      client: MAGIC nonce_c mac(client)      server: b"+" mac(server)   or   b"-" zeros
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time

from gradwire.errors import LaunchError
from gradwire.launch.wire import Channel

__all__ = ["Doorman", "connect", "keep_alive"]

MAGIC = b"gradwire/1\n"
NONCE_BYTES = MAC_BYTES = 32
PROOF_S = 1.0


class Doorman:
    """The server's side of the proof, without I/O: send `greeting`, feed what comes, send what `feed` returns."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._buffer = b""
        self.admitted: bool | None = None
        self.greeting = MAGIC + self._nonce

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """(reply to send, bytes that follow the proof); `admitted` is None until the proof is whole."""
        self._buffer += data
        size = len(MAGIC) + NONCE_BYTES + MAC_BYTES
        if not self._buffer.startswith(MAGIC[: len(self._buffer)]):
            self.admitted = False
            return b"", b""
        if len(self._buffer) < size:
            return b"", b""
        theirs = self._buffer[len(MAGIC) : len(MAGIC) + NONCE_BYTES]
        proof = self._buffer[len(MAGIC) + NONCE_BYTES : size]
        self.admitted = hmac.compare_digest(proof, _mac(self._token, b"client", self._nonce, theirs))
        if not self.admitted:
            return b"-" + bytes(MAC_BYTES), b""
        return b"+" + _mac(self._token, b"server", self._nonce, theirs), self._buffer[size:]


def _mac(token: str, side: bytes, nonce_s: bytes, nonce_c: bytes) -> bytes:
    return hmac.new(token.encode(), MAGIC + side + nonce_s + nonce_c, hashlib.sha256).digest()


def connect(address: tuple[str, int], token: str, *, timeout_s: float = PROOF_S) -> Channel:
    """Connect and prove the token both ways within `timeout_s` seconds.

    Raises OSError if nobody listens or the listener stays silent, LaunchError if it belongs to another job or is no
    gradwire job.
    """
    deadline = time.monotonic() + timeout_s
    connection = socket.create_connection(address, timeout=timeout_s)
    try:
        keep_alive(connection)
        _prove(connection, address, token, deadline)
        return Channel(connection)
    except BaseException:
        connection.close()
        raise


def keep_alive(connection: socket.socket) -> None:
    """No delays, and an end after about 30 s without the peer's kernel (a cut link): a shorter cut survives."""
    options = {
        socket.SO_KEEPALIVE: (socket.SOL_SOCKET, 1),
        socket.TCP_NODELAY: (socket.IPPROTO_TCP, 1),
        socket.TCP_KEEPIDLE: (socket.IPPROTO_TCP, 10),
        socket.TCP_KEEPINTVL: (socket.IPPROTO_TCP, 5),
        socket.TCP_KEEPCNT: (socket.IPPROTO_TCP, 4),
        socket.TCP_USER_TIMEOUT: (socket.IPPROTO_TCP, 30_000),
    }
    for option, (level, value) in options.items():
        connection.setsockopt(level, option, value)


def _prove(connection: socket.socket, address: tuple[str, int], token: str, deadline: float) -> None:
    where = f"{address[0]}:{address[1]}"
    greeting = _read(connection, len(MAGIC) + NONCE_BYTES, deadline)
    if not greeting.startswith(MAGIC):
        raise LaunchError(f"{where} is not a gradwire job (it did not greet as one): use another host or port")
    nonce = secrets.token_bytes(NONCE_BYTES)
    nonce_s = greeting[len(MAGIC) :]
    try:
        connection.sendall(MAGIC + nonce + _mac(token, b"client", nonce_s, nonce))
    except OSError:
        pass  # it hung up on us: the missing answer says so below
    answer = _read(connection, 1 + MAC_BYTES, deadline)
    expected = b"+" + _mac(token, b"server", nonce_s, nonce)
    if not hmac.compare_digest(answer, expected):
        raise LaunchError(
            f"{where} belongs to another job (its token differs from ours): use another port, or start every node with "
            "the same script, arguments, --nodes and --rendezvous, and the same GRADWIRE_TOKEN if it is set"
        )


def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
    """`count` bytes, or fewer at end of file or on a reset; TimeoutError at the deadline."""
    data = b""
    while len(data) < count:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("it accepts connections but says nothing")
        connection.settimeout(remaining)
        try:
            piece = connection.recv(count - len(data))
        except ConnectionError:
            break
        if not piece:
            break
        data += piece
    return data
