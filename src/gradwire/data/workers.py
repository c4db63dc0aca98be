"""The loader's worker processes: their seeds, their end, and how their failures are named."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass
from types import FrameType
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import Sampler, get_worker_info

from gradwire.data.order import Stream, raw
from gradwire.errors import DataError, GradwireError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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


class Watch:
    """Names failures of reading: rank, worker, samples. Lives as long as its loader."""

    def __init__(self, feed: Feed[Readable], *, rank: int, num_workers: int) -> None:
        self.rank, self.num_workers, self.feed = rank, num_workers, feed
        self.pids: MutableSequence[int] = multiprocessing.RawArray("q", num_workers) if num_workers else []
        if num_workers:
            _watches.add(self)

    def next(self, batches: Iterator[D], end: D) -> D:
        """The next of torch's batches, or ``end``. Raises DataError for whatever the data set or a worker did."""
        try:
            return next(batches)
        except StopIteration as stop:
            if not self.feed.pending:
                return end
            raise self._failed(stop) from stop
        except Exception as error:
            # no local may hold an error: its traceback would hold the frame, and that the workers, in a cycle
            if isinstance(error.__cause__, DataError):  # torch's word over what our signal handler raised
                raise DataError(str(error.__cause__)) from error.__cause__.__cause__
            if isinstance(error, GradwireError) and not str(error).startswith("Caught "):
                raise  # ours already; torch's wrapping of what a worker raised begins with "Caught"
            raise self.dead(error) or self._failed(error) from error

    def dead(self, error: Exception) -> DataError | None:
        """What to say if ``error`` is torch's word about the death of one of our workers; else None."""
        found = re.search(r"DataLoader worker \(pid(?:\(s\))? (\d+)[^)]*\)(.*)", str(error))
        pids = list(self.pids)
        if found is None or int(found[1]) not in pids:
            return None
        worker = pids.index(int(found[1]))
        item = self.feed.read_by(worker, self.num_workers)
        return DataError(
            f"rank {self.rank}: loader worker {worker} (pid {found[1]}) {found[2].strip(' .') or 'died'} while it read "
            f"{item.words() if item else 'nothing'}; if the kernel killed it for memory, lower num_workers or "
            "prefetch_factor, else run with num_workers=0 to see the cause"
        )

    def _failed(self, error: Exception) -> DataError:
        lines = str(error).strip().splitlines() or [""]
        worker = re.match(r"Caught \w+ in DataLoader worker process (\d+)", lines[0])
        cause = lines[-1] if worker else f"{type(error).__name__}: {lines[0]}"
        where = f"in loader worker {worker[1]}" if worker else "in this process"
        item = self.feed.pending[0].words() if self.feed.pending else "the data"
        return DataError(
            f"rank {self.rank}: reading {item} failed {where}: {cause}; "
            "repair or leave out the sample, or catch the error in the data set"
        )


_watches: WeakSet[Watch] = WeakSet()


def name_deaths() -> None:
    """Let torch's SIGCHLD handler, which may raise anywhere in the main thread, raise our words instead.

    Call it after torch has started workers. Other loaders' workers are reported as torch does.
    """
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        return
    theirs = signal.getsignal(signal.SIGCHLD)
    if callable(theirs) and not isinstance(theirs, _Named):
        signal.signal(signal.SIGCHLD, _Named(theirs))


class _Named:
    def __init__(self, theirs: Callable[[int, FrameType | None], object]) -> None:
        self._theirs = theirs

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._theirs(number, frame)
        except RuntimeError as error:
            if not _ours(error):
                raise
            raise _ours(error)[0] from error


def _ours(error: RuntimeError) -> list[DataError]:
    """The error in our words, if it tells of one of our workers."""
    return [named for watch in list(_watches) if (named := watch.dead(error)) is not None]
