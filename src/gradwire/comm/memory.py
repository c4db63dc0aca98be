"""Memory that the ranks of one host share: anonymous, so that nothing is left behind however they end."""

from __future__ import annotations

import json
import mmap
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass

import torch

from gradwire.core.group import Group

_CARD_BYTES = 1024
_MARK_BYTES = 16
HEADER_BYTES = 4096  # a page, so that what follows starts on one
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14: all page faults at once instead of one by one in the first use


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What a rank says of itself. cores: those it may run on, a bit each."""

    pid: int
    cores: int


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Memory that all ranks have mapped; zeros behind the first ``HEADER_BYTES``. peers: in rank order."""

    memory: mmap.mmap
    peers: tuple[Peer, ...]


def share_memory(num_bytes: int, group: Group) -> Shared | str:
    """Map ``num_bytes`` of zeros that all ranks of ``group`` share; all ranks must call it. Two collectives.

    Rank 0 makes a file without a name (memfd) and the others open it under /proc. Returns on all ranks alike why it
    cannot be (a rank in another container, say): ``rank 1: ...``.
    """
    offered = _offer(num_bytes + HEADER_BYTES) if group.rank == 0 else None
    try:
        said = [json.loads(text) for text in _exchange(_card(offered), group)]
        memory, trouble = _take(offered, said[0], num_bytes + HEADER_BYTES)
        troubles = _exchange(trouble, group)
    finally:
        if isinstance(offered, _Offer):
            os.close(offered.fd)  # the mapping lives on
    for rank, why in enumerate(troubles):
        if why:
            return f"rank {rank}: {why}"
    if memory is None:
        raise RuntimeError(f"{group.name}: memory was neither shared nor refused")
    return Shared(memory=memory, peers=tuple(Peer(pid=each["pid"], cores=int(each["cores"], 16)) for each in said))


def _exchange(text: str, group: Group) -> list[str]:
    """Every rank's short ``text`` in one collective: buckets are many, and a job waits for them."""
    mine = torch.frombuffer(bytearray(text.encode()[:_CARD_BYTES].ljust(_CARD_BYTES)), dtype=torch.uint8)
    return [bytes(row.tolist()).decode(errors="replace").strip() for row in group.all_gather(mine)]


@dataclass(frozen=True, kw_only=True)
class _Offer:
    fd: int
    mark: str
    memory: mmap.mmap


def _offer(num_bytes: int) -> _Offer | str:
    """Memory under a descriptor, or why there is none."""
    mark = secrets.token_bytes(_MARK_BYTES)
    try:
        fd = os.memfd_create("gradwire")
        try:
            os.ftruncate(fd, num_bytes)
            memory = mmap.mmap(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
    except (OSError, ValueError, AttributeError) as error:  # Python has memfd_create where the C library does
        return f"no shared memory ({error})"
    memory[:_MARK_BYTES] = mark
    return _Offer(fd=fd, mark=mark.hex(), memory=memory)


def _card(offered: _Offer | str | None) -> str:
    card: dict[str, object] = {"pid": os.getpid(), "cores": f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"}
    if isinstance(offered, _Offer):
        card |= {"fd": offered.fd, "mark": offered.mark}
    return json.dumps(card)


def _take(offered: _Offer | str | None, first: dict[str, object], num_bytes: int) -> tuple[mmap.mmap | None, str]:
    """This rank's mapping of what rank 0 offers, or why it has none."""
    if isinstance(offered, str):
        return None, offered
    if offered is not None:
        return offered.memory, ""
    if "fd" not in first:
        return None, ""  # rank 0 says why
    try:
        return _map(f"/proc/{first['pid']}/fd/{first['fd']}", str(first["mark"]), num_bytes), ""
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error  # not the path: it differs from group to group
        return None, f"the memory of process {first['pid']} cannot be opened ({why})"


def _map(path: str, mark: str, num_bytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != num_bytes:
            raise ValueError("it has another size: a process of another container")
        memory = mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)
    if memory[:_MARK_BYTES].hex() != mark:
        raise ValueError("it is not what rank 0 made: a process of another container")
    return memory


def populate(memory: mmap.mmap) -> None:
    """Fault the pages in now, only for speed. Huge pages were asked for, but never granted here."""
    with suppress(OSError, ValueError):  # an older kernel
        memory.madvise(_POPULATE_WRITE)
