"""`Arrivals`: how far each rank of a host has come, in words of shared memory, and waiting for it."""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Sequence
from functools import reduce
from operator import or_

import torch

from gradwire.comm.futex import wait_for_change, wake, yield_core
from gradwire.comm.memory import HEADER_BYTES, Peer
from gradwire.comm.wake import sentinel

LINE_BYTES = 64  # a cache line for every word: nobody's store slows another one's spinning
SLICE_S = 0.05  # how often a waiting rank looks whether the others live
SPIN_S = 100e-6  # longer than a collective of a few KiB, shorter than what a sleep and a wake cost in a virtual machine
_MASK, _HALF = 0xFFFFFFFF, 0x80000000


class Arrivals:
    """Counters, one a rank and kind; each is written by its rank alone, so that plain stores do.

    ``post`` counts this rank's own up, ``wait`` returns when all ranks' have come as far. Raises RuntimeError, as Gloo does,
    within 0.1 s if a process has ended, a rank has closed its group or this process's sockets were shut
    (`comm/wake.py`), and when ``timeout_s`` is over; the object is then of no more use and says so each time.

    A waiting rank spins shortly if every rank has a core and a process to itself, and then sleeps.
    """

    def __init__(
        self, memory: mmap.mmap, *, kinds: int, peers: Sequence[Peer], rank: int, name: str, timeout_s: float
    ) -> None:
        self._words = memoryview(memory).cast("I")
        self._address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self._rank = rank
        self._size = len(peers)
        self._name = name
        self._timeout_s = timeout_s
        self._kinds = kinds
        self._pid = os.getpid()
        self._mine = [0] * kinds
        self._broken = ""
        self._lives = _Lives(peers)
        cores = reduce(or_, (peer.cores for peer in peers)).bit_count()
        self._spins = len({peer.pid for peer in peers}) == self._size <= cores

    @staticmethod
    def num_bytes(kinds: int, size: int) -> int:
        """Of the words, behind the memory's header."""
        return (kinds + 1) * size * LINE_BYTES

    def _byte(self, kind: int, rank: int) -> int:
        return HEADER_BYTES + (kind * self._size + rank) * LINE_BYTES

    def post(self, kind: int) -> int:
        """This rank has come one further in ``kind``. Returns how far: 1, 2, ..."""
        if self._broken:
            raise RuntimeError(self._broken)
        self._mine[kind] = number = (self._mine[kind] + 1) & _MASK
        at = self._byte(kind, self._rank)
        self._words[at >> 2] = number
        wake(self._address + at)
        return number

    def wait(self, kind: int, number: int) -> None:
        """Return when all ranks have posted ``number`` in ``kind``."""
        for step in range(1, self._size):
            rank = (self._rank + step) % self._size
            at = self._byte(kind, rank)
            if not self._reached(at, number):
                self._wait_for(rank, at, number)

    def close(self) -> None:
        """This rank will not come again; who waits for it finds out. A forked child's end says nothing of its parent."""
        if os.getpid() != self._pid:
            return
        self._words[self._byte(self._kinds, self._rank) >> 2] = 1
        self._lives.close()

    def _reached(self, at: int, number: int) -> bool:
        return (self._words[at >> 2] - number) & _MASK < _HALF

    def _wait_for(self, rank: int, at: int, number: int) -> None:
        if self._broken:
            raise RuntimeError(self._broken)
        began_s = time.monotonic()
        if self._spins and self._spun(at, number, began_s + SPIN_S):
            return
        while True:
            seen = self._words[at >> 2]
            if self._reached(at, number):
                return
            wait_for_change(self._address + at, seen, SLICE_S)
            trouble = self._trouble(rank, began_s)
            if self._reached(at, number):  # it came and went in between
                return
            if trouble:
                self._broken = f"{self._name}: {trouble}"
                raise RuntimeError(self._broken)

    def _spun(self, at: int, number: int, until_s: float) -> bool:
        while time.monotonic() < until_s:
            if self._reached(at, number):
                return True
            yield_core()
        return False

    def _trouble(self, rank: int, began_s: float) -> str:
        gone = self._lives.gone()
        if gone is not None:
            return gone
        for peer in range(self._size):
            if peer != self._rank and self._words[self._byte(self._kinds, peer) >> 2]:
                return f"rank {peer} has left the group"
        waited_s = time.monotonic() - began_s
        return f"rank {rank} did not come within {self._timeout_s:g} s" if waited_s > self._timeout_s else ""


class _Lives:
    """Whether the other processes live and this one may go on: one poll of descriptors that become ready when not."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._poll = select.poll()
        self._words: dict[int, str] = {}
        self._descriptors: list[int] = []
        self._sentinel = sentinel()
        try:
            self._watch(self._sentinel.fileno(), "the connections of this process were shut")
            for rank, peer in enumerate(peers):
                if peer.pid != os.getpid():
                    self._descriptors.append(os.pidfd_open(peer.pid))
                    self._watch(self._descriptors[-1], f"rank {rank} (process {peer.pid}) has ended")
        except OSError:
            self.close()
            raise

    def _watch(self, descriptor: int, words: str) -> None:
        self._poll.register(descriptor, select.POLLIN)
        self._words[descriptor] = words

    def gone(self) -> str | None:
        """What has happened, if anything."""
        ready = self._poll.poll(0)
        return self._words[ready[0][0]] if ready else None

    def close(self) -> None:
        """Harmless twice."""
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)
        self._sentinel.close()
