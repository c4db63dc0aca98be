"""What Linux tells about processes: stopped or not, killed for memory or not, tied to their parent's life."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemoryKills", "die_with_parent", "is_suspended"]

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded before any fork: nothing may be imported in the child
_UNLIMITED_BYTES = 1 << 60


def is_suspended(pid: int) -> bool:
    """Whether the process is stopped by a signal (state T). False if it is gone or unreadable."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] in (["T"], ["t"])


def die_with_parent(parent: int) -> None:
    """In a forked child before exec: be killed when the parent ends, even if it has ended already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(127)


@dataclass(frozen=True, kw_only=True)
class MemoryKills:
    """The kernel's count of out-of-memory kills in this process's cgroup, and the memory limit.

    counter: file with an `oom_kill N` line. limit_bytes: None where there is no limit.
    """

    counter: Path | None
    limit_bytes: int | None
    count: int

    @classmethod
    def read(cls, *, proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> MemoryKills:
        """Of the calling process, for cgroup v2 and v1; no counter where the kernel has none to read."""
        for folder, counter_name, limit_name in _candidates(proc, root):
            counter = folder / counter_name
            count = _oom_kills(counter)
            if count is not None:
                return cls(counter=counter, limit_bytes=_smallest_limit(folder, limit_name, root), count=count)
        return cls(counter=None, limit_bytes=None, count=0)

    def note(self) -> str:
        """`out of memory (limit 512 MiB)` if there was a kill since `read`; else ""."""
        count = None if self.counter is None else _oom_kills(self.counter)
        if count is None or count <= self.count:
            return ""
        if self.limit_bytes is None:
            return "out of memory (the host's)"
        return f"out of memory (the memory limit of its cgroup is {self.limit_bytes / 2**20:.0f} MiB)"


def _candidates(proc: Path, root: Path) -> list[tuple[Path, str, str]]:
    """(folder, counter file, limit file), the likeliest first; inside a container the cgroup is mounted as the root."""
    found: list[tuple[Path, str, str]] = []
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            for folder in (root / "memory" / path.lstrip("/"), root / "memory"):
                found.append((folder, "memory.oom_control", "memory.limit_in_bytes"))
        elif not controllers:
            for folder in (root / path.lstrip("/"), root / "unified" / path.lstrip("/"), root):
                found.append((folder, "memory.events", "memory.max"))
    return found


def _oom_kills(counter: Path) -> int | None:
    try:
        words = counter.read_text().split()
    except OSError:
        return None
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else None


def _smallest_limit(folder: Path, limit_name: str, root: Path) -> int | None:
    limits: list[int] = []
    while (folder != root and root in folder.parents) or folder == root:
        try:
            text = (folder / limit_name).read_text().strip()
        except OSError:
            text = "max"
        limits.extend([int(text)] if text.isdecimal() and int(text) < _UNLIMITED_BYTES else [])
        if folder == root:
            break
        folder = folder.parent
    return min(limits, default=None)
