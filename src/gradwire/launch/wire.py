"""Authenticated, length-limited JSON frames over TCP.

Both sides prove the job's token (HMAC-SHA256 over both nonces) before either parses a byte of JSON::

    server: MAGIC nonce_s      client: MAGIC nonce_c mac(client)      server: b"+" mac(server)   or   b"-" zeros

A frame is a 4-byte big-endian length and that many bytes of JSON, an object with a "kind". Frames after the proof are
neither encrypted nor signed: the token keeps other jobs and strangers out, it does not hide the traffic.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeAlias, cast

from gradwire.errors import LaunchError

__all__ = ["Channel", "Doorman", "FrameReader", "Message", "WireError", "connect", "encode_frame"]

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"
Message: TypeAlias = Mapping[str, Json]

MAGIC = b"gradwire/1\n"
NONCE_BYTES = MAC_BYTES = 32
MAX_FRAME_BYTES = 1 << 20
PROOF_S = 1.0
SEND_S = 5.0


class WireError(LaunchError):
    """A frame is not what the protocol allows."""


def encode_frame(message: Message) -> bytes:
    """One frame. Raises WireError above 1 MiB."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a {message.get('kind')} message of {len(body)} bytes is above the limit of {MAX_FRAME_BYTES}")
    return struct.pack("!I", len(body)) + body


class FrameReader:
    """Bytes in, whole messages out; no I/O."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Messages completed by `data`. Raises WireError on a frame that is too long or is no JSON object."""
        self._buffer += data
        messages: list[Message] = []
        while len(self._buffer) >= 4:
            (length,) = struct.unpack_from("!I", self._buffer)
            if length > MAX_FRAME_BYTES:
                raise WireError(f"a frame announces {length} bytes, above the limit of {MAX_FRAME_BYTES}")
            if len(self._buffer) < 4 + length:
                break
            messages.append(_parse(bytes(self._buffer[4 : 4 + length])))
            del self._buffer[: 4 + length]
        return messages


def _parse(body: bytes) -> Message:
    try:
        message: object = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame of {len(body)} bytes is not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(cast(Message, message).get("kind"), str):
        raise WireError("a frame is not a JSON object with a kind")
    return cast(Message, message)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def get_text(message: Message, key: str, default: str | None = None) -> str:
    """A string field, or WireError."""
    value = message.get(key, default)
    if not isinstance(value, str):
        raise WireError(f"{key} of a {message.get('kind')} message is not a string")
    return value


def get_int(message: Message, key: str, *, low: int = 0, high: int = 1 << 62) -> int:
    """An integer field in [low, high], or WireError."""
    value = message.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise WireError(f"{key} of a {message.get('kind')} message is not an integer from {low} to {high}")
    return value


def get_float(message: Message, key: str) -> float:
    """A finite number, 0 or more, or WireError."""
    value = message.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e300:
        raise WireError(f"{key} of a {message.get('kind')} message is not a number, 0 or more")
    return float(value)


def get_list(message: Message, key: str) -> Sequence[Json]:
    """A list field, or WireError."""
    value = message.get(key)
    if not isinstance(value, list):
        raise WireError(f"{key} of a {message.get('kind')} message is not a list")
    return cast("Sequence[Json]", value)


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


class Channel:
    """A proved connection, the client's end. Sends are safe from any thread; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = FrameReader()
        self._lock = threading.Lock()
        connection.settimeout(SEND_S)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message; OSError if the peer is gone or takes nothing for 5 s."""
        frame = encode_frame(message)
        with self._lock:
            self._socket.sendall(frame)

    def receive(self, wait_s: float) -> list[Message] | None:
        """Messages that arrive within `wait_s` seconds (perhaps none); None when the peer has closed."""
        try:
            poller = select.poll()
            poller.register(self._socket, select.POLLIN)
            if not poller.poll(max(0.0, wait_s) * 1000):
                return []
            data = self._socket.recv(65536)
        except (OSError, ValueError):  # reset, or closed by another thread
            return None
        return self._reader.feed(data) if data else None

    def forget(self) -> None:
        """In a forked child: close this process's copy of the socket, not the connection."""
        self._socket.close()

    def close(self) -> None:
        """Close; harmless twice."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer closed first
        self._socket.close()


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
            f"{where} belongs to another job (its token differs from ours): use another port, or start every node with the "
            "same script, arguments, --nodes and --rendezvous, and the same GRADWIRE_TOKEN if it is set"
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
