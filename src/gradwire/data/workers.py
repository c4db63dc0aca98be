"""The loader's worker processes: their seeds, their end, and how their failures are named."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import random
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import Sampler, get_worker_info

from gradwire.data.order import Stream, raw

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@cache
def leave_garbage_to_the_parent() -> None:
    """Let no forked child collect what it inherited. Once a process, before the first worker starts.

    A process group that is garbage in the parent waits, when it goes, for threads that only the parent has: a worker whose
    collector came upon it would hang for ever.
    """
    os.register_at_fork(after_in_child=gc.freeze)


class Readable(Protocol):
    """One thing that torch's loader reads for us: what it asks the data set for, and words for people."""

    def emit(self) -> object: ...

    def words(self) -> str: ...


T_co = TypeVar("T_co", bound=Readable, covariant=True)
D = TypeVar("D")


class Feed(Sampler[object], Generic[T_co]):
    """The sampler that torch reads from. Remembers, in order, what was asked for and not yet yielded.

    It must not lead back to torch's loader: a cycle would be collected in an order that makes persistent workers
    linger for seconds.
    """

    def __init__(self) -> None:
        self._start: Callable[[], Iterator[T_co]] = lambda: iter(())
        self.pending: deque[T_co] = deque()
        self.taken = 0

    def ask(self, start: Callable[[], Iterator[T_co]]) -> None:
        """What the next ``iter()`` reads."""
        self._start = start

    def __iter__(self) -> Iterator[object]:
        return self._fed(self._start())  # eager: torch draws its seeds after this call, as with any sampler

    def _fed(self, items: Iterator[T_co]) -> Iterator[object]:
        self.pending.clear()
        self.taken = 0
        for item in items:
            self.pending.append(item)
            yield item.emit()

    def take(self) -> T_co:
        """The item whose data torch has just given."""
        self.taken += 1
        return self.pending.popleft()

    def read_by(self, worker: int, num_workers: int) -> T_co | None:
        """The item that a worker is reading: torch deals them round robin."""
        mine = (item for place, item in enumerate(self.pending, self.taken) if place % num_workers == worker)
        return next(mine, None)


@dataclass(frozen=True, kw_only=True)
class WorkerStart:
    """torch's ``worker_init_fn``: runs first in each worker process.

    pids: (num_workers,) shared memory, where each worker writes its process id. hide: whether
    ``torch.utils.data.get_worker_info()`` is None for the data set, so that each worker sees the whole stream.
    """

    rank: int
    pids: MutableSequence[int]
    user_init: Callable[[int], object] | None
    hide: bool

    def __call__(self, worker: int) -> None:
        self.pids[worker] = os.getpid()
        die_with_parent()
        info = get_worker_info()
        if self.rank and info is not None:  # rank 0 keeps torch's seeds: a world of one is plain torch
            seed_all(info.seed, self.rank)
        if self.user_init is not None:
            self.user_init(worker)
        if self.hide:
            torch.utils.data._utils.worker._worker_info = None  # pyright: ignore  # torch has no public way


def seed_all(seed: int, rank: int) -> None:
    """Seed random, numpy and torch; a pure function of both arguments."""
    words = raw(3, (seed, rank), Stream.WORKERS).tolist()
    random.seed(words[0])
    np.random.seed(words[1] % 2**32)
    torch.random.manual_seed(words[2] >> 1)  # pyright: ignore[reportUnknownMemberType]


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies; elsewhere torch's own watchdog needs some seconds."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it died before we asked
        os._exit(1)
