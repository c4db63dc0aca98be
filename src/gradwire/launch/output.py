"""What the workers print: on the console, with ranks before the lines, or in files; the last lines of each are kept."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

from gradwire.errors import LaunchError

__all__ = ["Output", "OutputMode", "Stream"]

OutputMode: TypeAlias = "Literal['rank0', 'all'] | Path"
Stream: TypeAlias = Literal["stdout", "stderr"]
TAIL_LINES = 60
TAIL_LINE_BYTES = 2000
MAX_LINE_BYTES = 1 << 16
_LINE_END = re.compile(rb"\r?\n|\r")


class Output:
    """Takes the bytes of every worker's streams.

    mode: "rank0" shows rank 0 as it is; "all" shows every line as `[rank] line`; a folder gets `rank-R.log` files
    beside rank 0 on the console. Raises LaunchError if the folder cannot be made.
    """

    def __init__(self, mode: OutputMode, ranks: range) -> None:
        self._mode = mode
        self._tails = {rank: deque[bytes](maxlen=TAIL_LINES) for rank in ranks}
        self._partial: dict[tuple[int, Stream], bytes] = {}
        self._closed: set[Stream] = set()
        self._logs = _open_logs(mode, ranks) if isinstance(mode, Path) else {}

    def wants(self, rank: int, stream: Stream) -> bool:
        """Whether anybody looks at this stream; stderr is always kept."""
        return stream == "stderr" or rank == 0 or self._mode != "rank0"

    def shows(self, rank: int) -> bool:
        """Whether what `rank` prints is on this console."""
        return rank == 0 or self._mode == "all"

    def feed(self, rank: int, stream: Stream, data: bytes) -> None:
        """Bytes that a worker wrote; b"" at its end."""
        if rank in self._logs:
            self._logs[rank].write(data)
        if self._mode != "all" and rank == 0:
            self._write(stream, data)
        for line in self._lines(rank, stream, data):
            if stream == "stderr":
                self._tails[rank].append(line[:TAIL_LINE_BYTES])
            if self._mode == "all":
                self._write(stream, b"[%d] " % rank + line.rstrip(b"\r\n") + b"\n")

    def tail(self, rank: int) -> str:
        """The last lines of a worker's stderr."""
        return b"".join(self._tails[rank]).decode(errors="replace")

    def close(self) -> None:
        """Close the log files."""
        for log in self._logs.values():
            log.close()

    def _lines(self, rank: int, stream: Stream, data: bytes) -> list[bytes]:
        """Whole lines (a carriage return ends one too: progress bars); at the end, or if endless, what there is."""
        text = self._partial.pop((rank, stream), b"") + data
        ends = [match.end() for match in _LINE_END.finditer(text)]
        last = len(text) if not data or len(text) > MAX_LINE_BYTES else (ends[-1] if ends else 0)
        if last < len(text):
            self._partial[rank, stream] = text[last:]
        bounds = [0, *[end for end in ends if end < last], last]
        return [text[start:end] for start, end in pairwise(bounds) if end > start]

    def _write(self, stream: Stream, data: bytes) -> None:
        if stream in self._closed:
            return
        console = sys.stdout.buffer if stream == "stdout" else sys.stderr.buffer
        try:
            console.write(data)
            console.flush()
        except BrokenPipeError:
            self._closed.add(stream)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, console.fileno())  # else the interpreter fails on the unwritten rest when it ends
            os.close(null)
            self._write("stderr", f"gradwire: {stream} is closed; the job goes on without it\n".encode())


def _open_logs(folder: Path, ranks: range) -> dict[int, BinaryIO]:
    def private(path: str, flags: int) -> int:
        return os.open(path, flags, mode=0o600)

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return {rank: open(folder / f"rank-{rank}.log", "wb", buffering=0, opener=private) for rank in ranks}
    except OSError as error:
        raise LaunchError(f"--output {folder} cannot be written ({error.strerror}): use another folder") from error
