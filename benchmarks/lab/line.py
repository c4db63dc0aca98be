"""The rate of a line as TCP sees it, between two hosts of a lab; as a script it is what runs on both."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.lab.hosts import Lab

PORT = 7007
CHUNK_BYTES = 1 << 18
CONNECT_S = 10.0


def measure(lab: Lab, *, src: int = 0, dst: int = 1, num_bytes: int | None = None) -> float:
    """Bytes per second of payload from host ``src`` to host ``dst``.

    num_bytes: how much to send; by default about two seconds' worth of the shaped rate, 256 MiB without one.
    """
    from benchmarks.lab.tools import LabError  # not at the top: as a script this file stands alone

    if num_bytes is None:
        num_bytes = 1 << 28 if lab.rate_mbit is None else int(lab.rate_mbit * 1e6 / 8 * 2)
    script = Path(__file__).resolve()
    timeout_s = 30.0 if lab.rate_mbit is None else 30.0 + num_bytes * 8 / lab.rate_mbit / 1e6
    ended = lab.run(
        {
            dst: [sys.executable, script, "receive", lab.address(dst), str(num_bytes)],
            src: [sys.executable, script, "send", lab.address(dst), str(num_bytes)],
        },
        timeout_s=timeout_s,
    )
    for host, done in ended.items():
        if done.returncode != 0:
            raise LabError(f"measuring the line failed on host {host}: {done.stderr}")
    return float(json.loads(ended[dst].stdout)["bytes_per_s"])


def receive(address: str, num_bytes: int) -> float:
    """Take one connection, read ``num_bytes``, return bytes per second; the first eighth (a burst) not counted."""
    with socket.create_server((address, PORT)) as server:
        server.settimeout(CONNECT_S)
        line, _ = server.accept()
        with line:
            line.settimeout(CONNECT_S)
            skip = num_bytes // 8
            got, start, counted_from = 0, 0.0, 0
            while got < num_bytes:
                chunk = line.recv(CHUNK_BYTES)
                if not chunk:
                    raise ConnectionError(f"the line closed after {got} of {num_bytes} bytes")
                got += len(chunk)
                if not start and got >= skip:
                    start, counted_from = time.monotonic(), got
            line.sendall(b"k")
            return (got - counted_from) / (time.monotonic() - start)


def send(address: str, num_bytes: int) -> None:
    """Connect (waiting for the receiver to be there) and send ``num_bytes``."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            line = socket.create_connection((address, PORT), timeout=CONNECT_S)
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    with line:
        chunk = bytes(CHUNK_BYTES)
        left = num_bytes
        while left > 0:
            line.sendall(chunk[: min(left, CHUNK_BYTES)])
            left -= CHUNK_BYTES
        line.recv(1)


if __name__ == "__main__":
    role, where, count = sys.argv[1:]
    if role == "receive":
        print(json.dumps({"bytes_per_s": receive(where, int(count))}))
    else:
        send(where, int(count))
