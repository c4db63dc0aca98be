"""Length-limited JSON frames over TCP, on connections that have proved the job's token (see proof.py).

A frame is a 4-byte big-endian length and that many bytes of JSON, an object with a "kind". Frames are neither encrypted
nor signed: the token keeps other jobs and strangers out, it does not hide the traffic.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeAlias, cast

from gradwire.errors import LaunchError

__all__ = [
    "Channel",
    "FrameReader",
    "Message",
    "WireError",
    "as_message",
    "encode_frame",
    "get_float",
    "get_int",
    "get_list",
    "get_text",
]

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Message: TypeAlias = Mapping[str, Json]

MAX_FRAME_BYTES = 1 << 20
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


def as_message(value: object) -> Message:
    """A nested object, or WireError."""
    if not isinstance(value, dict):
        raise WireError("a part of a message is not an object")
    return cast(Message, value)


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
