"""Worlds without a network: ranks as threads over a group made of a barrier."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

TIMEOUT_S = 30


class ThreadGroup:
    """`all_gather` over threads; the loaders need no other collective."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: dict[int, Tensor]) -> None:
        self.rank, self.size, self._barrier, self._board = rank, size, barrier, board
        self.num_calls = 0

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.num_calls += 1
        self._board[self.rank] = tensor.clone()
        self._barrier.wait(TIMEOUT_S)
        found = torch.stack([self._board[rank] for rank in range(self.size)])
        self._barrier.wait(TIMEOUT_S)
        return found


class Double(SimpleNamespace):
    """Knows the loader that yielded last without keeping it alive: a loader's workers end with it."""

    _reading = None

    @property
    def reading(self) -> Any:
        return None if self._reading is None else self._reading()

    @reading.setter
    def reading(self, loader: Any) -> None:
        self._reading = None if loader is None else weakref.ref(loader)


def world(rank: int = 0, size: int = 1, group: ThreadGroup | None = None) -> Any:
    def opened(*axes: str, channel: str = "main") -> ThreadGroup:
        assert (axes, channel) == (("data", "shard"), "loader") and group is not None
        return group

    clock = SimpleNamespace(waiting_for_data=nullcontext)
    seat = {"reader_rank": rank, "num_readers": size}
    return Double(rank=rank, size=size, clock=clock, group=opened, turn_ended=lambda: None, **seat)


def on_ranks(size: int, body: Callable[[Any], Any]) -> list[Any]:
    """``body(world)`` on ``size`` ranks at once; results, or the exceptions, in rank order."""
    barrier, board = threading.Barrier(size), {}
    worlds = [world(rank, size, ThreadGroup(rank, size, barrier, board)) for rank in range(size)]

    results: list[Any] = [TimeoutError("this rank has not ended")] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(worlds[rank])
        except Exception as error:
            results[rank] = error

    # plain threads: a loader worker forked from a ThreadPoolExecutor's thread cannot end well (it joins itself)
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    return results


def plain(batch: Any) -> list[int]:
    return batch.tolist()


def epoch_of(loader: Any) -> list[list[int]]:
    """One epoch's batches of indices (the data set gives its index)."""
    return [plain(batch) for batch in loader]


def by_step(loader: Any) -> dict[tuple[int, int], list[int]]:
    """One epoch's real samples by (step, micro-batch); stand-ins left out."""
    found: dict[tuple[int, int], list[int]] = {}
    for batch in loader:
        now = loader.current
        assert len(batch) == max(1, now.samples)
        found[now.step, now.index] = plain(batch)[: now.samples]
    return found
