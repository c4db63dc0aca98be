"""How failures of reading are named: rank, worker, samples. Deaths of workers never break into the user's own code."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, MutableSequence
from types import FrameType
from typing import TypeVar
from weakref import WeakSet

from gradwire.data.workers import Feed, Readable
from gradwire.errors import DataError, GradwireError

D = TypeVar("D")

DYING_S = 1.0  # between the end of a worker's connections and its own


class Watch:
    """Names failures of reading: rank, worker, samples. Lives as long as its loader."""

    def __init__(self, feed: Feed[Readable], *, rank: int, num_workers: int) -> None:
        self.rank, self.num_workers, self.feed = rank, num_workers, feed
        self.pids: MutableSequence[int] = multiprocessing.RawArray("q", num_workers) if num_workers else []
        self.waiting = False
        self.death: str | None = None  # in words, once a worker died
        if num_workers:
            _watches.add(self)

    def next(self, batches: Iterator[D], end: D) -> D:
        """The next of torch's batches, or ``end``. Raises DataError for whatever the data set or a worker did."""
        if self.death is not None:
            raise DataError(self.death)
        try:
            return self._awaited(batches)
        except StopIteration as stop:
            if not self.feed.pending:
                return end
            del batches
            self._let_go(stop)
            raise self._failed(stop) from stop
        except Exception as error:
            # no local may hold an error, and no frame of an error torch's iterator: a collector ends its workers badly
            del batches
            if isinstance(error, GradwireError) and not str(error).startswith("Caught "):
                raise  # ours already; torch's wrapping of what a worker raised begins with "Caught"
            self._let_go(error)
            if self.death is not None or self.died(error) or self._cut_off(error):
                raise DataError(self.death) from error
            raise self._failed(error) from error

    def _awaited(self, batches: Iterator[D]) -> D:
        self.waiting = True
        try:
            return next(batches)
        finally:
            self.waiting = False

    def _let_go(self, error: Exception) -> None:
        """Keep the frames that ``error`` went through from holding torch's iterator, some of them in a cycle."""
        if self.num_workers:  # else the frames are the user's, who may want to look at them
            traceback.clear_frames(error.__traceback__)

    def died(self, error: Exception) -> bool:
        """Whether ``error`` is torch's word about the death of one of our workers; notes it in our words."""
        found = re.search(r"DataLoader worker \(pid(?:\(s\))? (\d+)[^)]*\)(.*)", str(error))
        pids = list(self.pids)
        if found is None or int(found[1]) not in pids:
            return False
        self._note(pids.index(int(found[1])), found[2].strip(" .") or "died")
        return True

    def _cut_off(self, error: Exception) -> bool:
        """Whether ``error`` is a broken connection because a worker of ours is dying, perhaps not yet dead."""
        deadline = time.monotonic() + DYING_S
        while isinstance(error, OSError | EOFError) and time.monotonic() < deadline:
            for worker, pid in enumerate(self.pids):
                if self.death is None and (how := ended(pid)) is not None:
                    self._note(worker, how)
            if self.death is not None:
                return True
            time.sleep(0.01)
        return False

    def _note(self, worker: int, how: str) -> None:
        item = self.feed.read_by(worker, self.num_workers)
        self.death = (
            f"rank {self.rank}: loader worker {worker} (pid {self.pids[worker]}) {how} while it read "
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


def ended(pid: int) -> str | None:
    """How our child ``pid`` ended, None if it runs or nobody can tell. Leaves it to be waited for."""
    if sys.platform == "win32":
        return None
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is None:
        return None
    if found.si_code == os.CLD_EXITED:
        return f"exited with code {found.si_status}"
    return f"was killed by {signal.Signals(found.si_status).name}"


_watches: WeakSet[Watch] = WeakSet()


def name_deaths(watch: Watch) -> None:
    """New workers were started: forget the old ones, and stand before torch's SIGCHLD handler.

    That one raises wherever the main thread happens to be. For our loaders' workers it now raises only where
    ``Watch.next`` waits; else the next ``Watch.next`` tells. Other loaders' workers are reported as torch does.
    """
    watch.death = None
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        return
    theirs = signal.getsignal(signal.SIGCHLD)
    if callable(theirs) and not isinstance(theirs, OnChild):
        signal.signal(signal.SIGCHLD, OnChild(theirs))


class OnChild:
    """The signal handler before torch's."""

    def __init__(self, theirs: Callable[[int, FrameType | None], object]) -> None:
        self._theirs = theirs

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._theirs(number, frame)
        except RuntimeError as error:
            ours = [watch.waiting for watch in list(_watches) if watch.died(error)]
            if not ours or any(ours):
                raise
