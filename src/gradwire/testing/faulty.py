"""Groups that misbehave on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.core.group import Group, Op


class InjectedFault(RuntimeError):
    """Raised where a real transport would raise."""


class _Wrapped:
    """A group that does something before each collective."""

    def __init__(self, inner: Group, before: Callable[[str], None]) -> None:
        self._inner = inner
        self._before = before
        self.name = inner.name
        self.rank = inner.rank
        self.size = inner.size
        self.levels = inner.levels
        self.sums_in_rank_order = inner.sums_in_rank_order

    def new_zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._inner.new_zeros(numel, dtype, device)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        self._before("all_reduce")
        return self._inner.all_reduce(tensor, op)

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        self._before("all_reduce")
        return self._inner.begin_all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._before("all_gather")
        return self._inner.all_gather(tensor)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        self._before("reduce_scatter")
        return self._inner.reduce_scatter(tensor)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        self._before("broadcast")
        return self._inner.broadcast(tensor, src)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        self._before("all_to_all")
        return self._inner.all_to_all(tensor)

    def send(self, tensor: Tensor, dst: int) -> None:
        self._before("send")
        self._inner.send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        self._before("recv")
        return self._inner.recv(tensor, src)

    def barrier(self) -> None:
        self._before("barrier")
        self._inner.barrier()


class FaultyGroup(_Wrapped):
    """Raises `InjectedFault` on collective number ``fail_at`` (from 1), or calls ``fault`` there instead (a kill, say).

    >>> from gradwire.comm.gloo import SoloGroup
    >>> FaultyGroup(SoloGroup("data/main"), fail_at=1).barrier()
    Traceback (most recent call last):
    gradwire.testing.faulty.InjectedFault: barrier #1 of data/main was made to fail
    """

    def __init__(self, inner: Group, *, fail_at: int, fault: Callable[[], None] | None = None) -> None:
        self._calls = 0
        self._fail_at = fail_at
        self._fault = fault
        super().__init__(inner, self._count)

    def _count(self, op: str) -> None:
        self._calls += 1
        if self._calls != self._fail_at:
            return
        if self._fault is None:
            raise InjectedFault(f"{op} #{self._calls} of {self.name} was made to fail")
        self._fault()


class SlowGroup(_Wrapped):
    """Waits ``delay_s`` seconds before each collective, like a rank that is late."""

    def __init__(self, inner: Group, *, delay_s: float) -> None:
        super().__init__(inner, lambda _: time.sleep(delay_s))
