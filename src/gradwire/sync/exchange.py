"""`Exchange`: what the lane does in a step: weigh, reduce each bucket, agree."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.comm.lane import Lane
from gradwire.comm.text import all_gather_text
from gradwire.core.group import Group
from gradwire.core.reducer import Bucket, Piece, Reducer, State
from gradwire.sync.buckets import BucketSpec
from gradwire.sync.buffers import BufferExchange
from gradwire.sync.opening import Opening, agree_on_weights
from gradwire.sync.sparse import sum_sparse


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all ranks know alike after an exchange.

    used: per parameter (registration order), whether any rank had a gradient. nonfinite: ``rank 1: layer.weight``, ...;
    empty in a healthy step.
    """

    used: tuple[bool, ...]
    nonfinite: tuple[str, ...]


class Exchange:
    """Runs beside backward; only ``agree`` and ``measure`` wait.

    Buckets take turns on the lanes, each a thread with a group of its own: while one waits for the wire's far end the
    other's bytes fill it, and every reducer stays blocking and straight-line. Whatever is not a bucket runs on the first.
    A plain all-reduce needs no thread of ours: it is begun on the last route's group at once, unless the opening has
    still to say how to weigh it.

    The reducers' new states count only if the step is healthy: a step with a NaN anywhere leaves no trace in them.
    """

    def __init__(self, routes: Sequence[tuple[Group, Lane]], device: torch.device) -> None:
        self._routes = routes
        self._group, self._first = routes[0]
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reducers: list[Reducer] = []
        self._plain = False
        self._begin_at_once = False
        self._begun: list[Callable[[], Tensor]] = []
        self._step = 0
        self._factor: float | None = None
        self._weighed = threading.Event()
        self.sparse: dict[int, Tensor] = {}
        self.build(())

    def build(self, layout: Sequence[BucketSpec]) -> None:
        """Make the buckets of a layout, zeroed; forgets the reducers' states."""
        self._buckets = [
            Bucket(
                index=index,
                flat=self._routes[-1][0].new_zeros(spec.numel, spec.dtype, spec.device),
                pieces=tuple(
                    Piece(name=slot.param.name, shape=slot.param.shape, offset=slot.offset) for slot in spec.slots
                ),
            )
            for index, spec in enumerate(layout)
        ]
        self._reducers = [spec.reducer for spec in layout]
        self._plain = len(self._routes) > 1 and all(reducer.plain(self._group) for reducer in self._reducers)
        self._states: list[State] = [
            reducer.init(bucket, self._group) for reducer, bucket in zip(self._reducers, self._buckets, strict=True)
        ]
        self._next_states = list(self._states)

    @property
    def stateless(self) -> bool:
        """Whether the reducers remember nothing, so that the layout may change."""
        return not any(self._states)

    def flat(self, index: int) -> Tensor:
        """Bucket ``index``'s values (numel,)."""
        return self._buckets[index].flat

    def open(self, opening: Opening) -> None:
        """First in every exchange: the ranks are at the same batch, and what their buckets are to be multiplied by."""
        self._factor = None
        self._weighed.clear()
        self._begin_at_once = self._plain and not opening.explicit
        self._submit(lambda: self._open(opening))

    def buffers(self, buffers: BufferExchange, weight: float) -> None:
        """Agree on the model's buffers, beside backward."""
        self._submit(lambda: buffers.exchange(self._group, weight))

    def bucket(self, index: int) -> None:
        """Bucket ``index`` is full: reduce it. Always called in index order."""
        group, lane = self._routes[-1 if self._plain else index % len(self._routes)]
        if self._begin_at_once:
            self._begun.append(group.begin_all_reduce(self._buckets[index].flat))
        else:
            self._submit(lambda: self._reduce(index, group), lane)

    def rows(self, index: int, grad: Tensor | None, like: Tensor) -> None:
        """Sum the sparse gradient of parameter ``index`` into ``self.sparse``."""
        self._submit(lambda: self._sum_rows(index, grad, like))

    def measure(self, seconds: Sequence[float]) -> list[float]:
        """Rank 0's figures, so that all ranks decide alike from them. Waits."""
        self._drain()
        figures = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        return self._group.broadcast(figures).tolist()

    def agree(self, present: Sequence[bool], bad: Sequence[str]) -> Agreement:
        """Wait for all of the above and one tiny all-reduce: who has a gradient, who met a NaN (bad: names)."""
        self._drain()
        agreement = self._agree(present, bad)
        self._step += 1
        return agreement

    def _drain(self) -> None:
        """Everything submitted has ended; this thread may use the groups now."""
        begun, self._begun = self._begun, []
        for wait in begun:
            wait()
        for _, lane in self._routes:
            lane.drain()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _submit(self, task: Callable[[], object], lane: Lane | None = None) -> None:
        lane = lane or self._first
        if self._stream is None:
            lane.submit(task)
            return
        ready = torch.cuda.Event()
        ready.record()
        lane.submit(lambda: self._on_stream(ready, task))

    def _on_stream(self, ready: torch.cuda.Event, task: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            ready.wait()
            task()

    def _open(self, opening: Opening) -> None:
        try:
            self._factor = agree_on_weights(opening, self._group, self._device)
        finally:
            self._weighed.set()  # also when it failed: nobody must wait for ever

    def _reduce(self, index: int, group: Group) -> None:
        bucket = self._buckets[index]
        self._weighed.wait()
        if self._factor is not None:
            bucket.flat.mul_(self._factor)
        mean, self._next_states[index] = self._reducers[index].reduce(bucket, self._states[index], group, self._step)
        if mean.data_ptr() != bucket.flat.data_ptr():
            bucket.flat.copy_(mean)

    def _sum_rows(self, index: int, grad: Tensor | None, like: Tensor) -> None:
        if grad is not None and self._factor is not None:
            grad = grad * self._factor
        self.sparse[index] = sum_sparse(grad, like, self._group)

    def _agree(self, present: Sequence[bool], bad: Sequence[str]) -> Agreement:
        flags = torch.tensor([bool(bad), *present], dtype=torch.float32, device=self._device)
        anybody = (self._group.all_reduce(flags) > 0).tolist()
        nonfinite: tuple[str, ...] = ()
        if anybody[0]:
            texts = all_gather_text(self._group, json.dumps(list(bad)), self._device)
            nonfinite = tuple(f"rank {rank}: {name}" for rank, text in enumerate(texts) for name in json.loads(text))
            self._next_states = list(self._states)
        self._states = list(self._next_states)
        return Agreement(used=tuple(anybody[1:]), nonfinite=nonfinite)
