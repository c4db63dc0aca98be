"""Frames and the proof of the token."""

import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import LaunchError
from gradwire.launch.coordinator import Coordinator
from gradwire.launch.proof import MAGIC, Doorman, connect
from gradwire.launch.wire import MAX_FRAME_BYTES, FrameReader, WireError, encode_frame

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.dictionaries(st.text(), JSON, max_size=3).map(lambda fields: {**fields, "kind": "x"})


@given(st.lists(MESSAGES, max_size=4), st.integers(1, 50))
def test_messages_survive_any_cutting_of_the_stream(messages, piece):
    stream = b"".join(encode_frame(message) for message in messages)
    reader = FrameReader()
    got = [message for at in range(0, len(stream), piece) for message in reader.feed(stream[at : at + piece])]
    assert got == messages


@given(MESSAGES, st.data())
def test_a_mutated_frame_is_read_or_refused(message, data):
    frame = bytearray(encode_frame(message))
    for at in data.draw(st.lists(st.integers(0, len(frame) - 1), min_size=1, max_size=4)):
        frame[at] = data.draw(st.integers(0, 255))
    try:
        for got in FrameReader().feed(bytes(frame)):
            assert isinstance(got["kind"], str)
    except WireError:
        pass


@pytest.mark.parametrize(
    "frame",
    [
        (MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
        b"\0\0\0\x02[]",
        b"\0\0\0\x02{}",
        b'\0\0\0\x0a{"kind":1}',
        b'\0\0\0\x14{"kind":"x","a":NaN}',
        b"\0\0\0\x01\xff",
        (100_000).to_bytes(4, "big") + b"[" * 100_000,
        b'\0\0\x13\x9b{"kind":"x","a":' + b"9" * 5002 + b"}",
    ],
)
def test_a_bad_frame_is_refused(frame):
    with pytest.raises(WireError):
        FrameReader().feed(frame)


def test_a_message_above_the_limit_is_not_sent():
    with pytest.raises(WireError, match="above the limit"):
        encode_frame({"kind": "x", "text": "a" * MAX_FRAME_BYTES})


@given(st.binary(max_size=200))
def test_the_doorman_admits_no_stranger(data):
    doorman = Doorman("token")
    doorman.feed(data)
    assert not doorman.admitted
    doorman = Doorman("token")
    doorman.feed(MAGIC + data + bytes(64))
    assert doorman.admitted is False


@pytest.fixture
def coordinator():
    said = []
    one = Coordinator(token="right", world_size=2, report=said.append)
    one.start()
    yield one
    one.stop()


def test_a_wrong_token_is_refused_within_a_second(coordinator):
    start = time.monotonic()
    with pytest.raises(LaunchError, match="belongs to another job"):
        connect(coordinator.address, "wrong")
    assert time.monotonic() - start < 1.0
    connect(coordinator.address, "right").close()


@pytest.mark.parametrize("bytes_sent", [b"GET / HTTP/1.1\r\n\r\n", MAGIC, b"", MAGIC + bytes(64) + b"\0\0\0\x02{}"])
def test_a_stranger_does_not_disturb_the_coordinator(coordinator, bytes_sent):
    with socket.create_connection(coordinator.address, timeout=5) as stranger:
        stranger.sendall(bytes_sent)
        connect(coordinator.address, "right").close()


def test_a_server_without_the_token_is_not_believed():
    """The proof goes both ways: a listener that says yes to everybody is found out."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        with connection:
            connection.sendall(MAGIC + bytes(32))
            connection.recv(1000)
            connection.sendall(b"+" + bytes(32))

    thread = threading.Thread(target=serve)
    thread.start()
    with listener, pytest.raises(LaunchError, match="belongs to another job"):
        connect(listener.getsockname(), "token")
    thread.join(5)


def test_a_listener_that_is_no_gradwire_job_is_named():
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"220 mail.example.org ESMTP ready, how do you do today?\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    with listener, pytest.raises(LaunchError, match="not a gradwire job"):
        connect(listener.getsockname(), "token")
    thread.join(5)
