"""`Exchange`: what happens to the buckets of one step: weigh, reduce each, agree."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.comm.lane import Lane
from gradwire.comm.text import all_gather_text
from gradwire.core.group import Group
from gradwire.core.reducer import Bucket, Piece, State
from gradwire.errors import MismatchError
from gradwire.sync.buckets import BucketSpec
from gradwire.sync.buffers import BufferExchange
from gradwire.sync.opening import Opening, agree_on_weights
from gradwire.sync.sparse import sum_sparse


@dataclass(frozen=True, kw_only=True)
class Route:
    """A lane and its groups. group: the ranks that read samples of their own.

    Where ranks own rows: owners, those of one copy, and across, those that own the same rows of other copies.
    """

    lane: Lane
    group: Group
    owners: Group
    across: Group


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all ranks know alike after an exchange.

    used: per parameter (registration order), whether any rank had a gradient. nonfinite: ``rank 1: layer.weight``, ...;
    empty in a healthy step. rows: the agreed sparse gradients by parameter.
    """

    used: tuple[bool, ...]
    nonfinite: tuple[str, ...]
    rows: Mapping[int, Tensor]


@dataclass(frozen=True, kw_only=True)
class Filling:
    """A bucket as it fills. reduced: what of it the reducer takes: all, or this rank's part, already summed over the owners."""

    flat: Tensor
    num_parts: int
    summed: bool
    reduced: Bucket

    def group(self, route: Route) -> Group:
        """Over which ranks it is reduced."""
        return route.across if self.num_parts > 1 or self.summed else route.group


class Exchange:
    """Runs beside backward; only what ``seal`` returns, and ``measure``, wait.

    Buckets take turns on the lanes, each a thread with a group of its own: while one waits for the wire's far end the
    other's bytes fill it, and every reducer stays blocking and straight-line. Whatever is not a bucket runs on the first.
    A plain all-reduce needs no thread of ours: it is begun on the last route's group at once, unless the opening has
    still to say how to weigh it.

    ``delay`` exchanges may be on their way while the next one's buckets fill: there are ``1 + delay`` sets of buckets. It
    takes one lane, on which everything, the agreement too, runs in order.

    everybody: the ranks of the whole mesh, if they are more than a route's: a NaN of any of them ends the step of all.

    The reducers' new states count only if the step is healthy: a step with a NaN anywhere leaves no trace in them.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        device: torch.device,
        *,
        delay: int = 0,
        everybody: Group | None = None,
    ) -> None:
        self._routes = routes
        self._group, self._first = routes[0].group, routes[0].lane
        self._everybody = everybody
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._delay = delay
        self._begin_at_once = False
        self._begun: list[Callable[[], Tensor]] = []
        self._factor: float | None = None
        self._weighed = threading.Event()
        self._rows: dict[int, Tensor] = {}
        self.step = 0
        self.build(())

    def build(self, layout: Sequence[BucketSpec]) -> None:
        """Make the buckets of a layout, zeroed; forgets the reducers' states."""
        self._sets = [[self._filling(index, spec) for index, spec in enumerate(layout)] for _ in range(1 + self._delay)]
        self._set = 0
        self._reducers = [spec.reducer for spec in layout]
        whole = all(spec.num_parts == 1 and not spec.summed for spec in layout)
        self._plain = whole and len(self._routes) > 1 and all(r.plain(self._group) for r in self._reducers)
        pairs = zip(self._reducers, self._sets[0], strict=True)
        self.restore([reducer.init(each.reduced, each.group(self._routes[0])) for reducer, each in pairs])

    def _filling(self, index: int, spec: BucketSpec) -> Filling:
        numel = spec.numel * spec.num_parts
        if spec.num_parts == 1:
            group = self._routes[-1].across if spec.summed else self._routes[-1].group
            flat = reduced = group.new_zeros(numel, spec.dtype, spec.device)
        else:
            flat = torch.zeros(numel, dtype=spec.dtype, device=spec.device)
            reduced = flat.view(spec.num_parts, -1)[self._own_part]
        pieces = tuple(Piece(name=slot.param.name, shape=slot.param.shape, offset=slot.offset) for slot in spec.slots)
        bucket = Bucket(index=index, flat=reduced, pieces=pieces)
        return Filling(flat=flat, num_parts=spec.num_parts, summed=spec.summed, reduced=bucket)

    @property
    def _own_part(self) -> int:
        return self._routes[0].owners.rank

    def flats(self, number: int) -> list[Tensor]:
        """The buckets' values, each (parts x numel,), of set ``number``."""
        return [filling.flat for filling in self._sets[number]]

    @property
    def num_sets(self) -> int:
        return len(self._sets)

    @property
    def current(self) -> int:
        """The set of buckets that fills now."""
        return self._set

    def fill(self, number: int) -> None:
        """Let set ``number`` be the one that fills next."""
        self._set = number % len(self._sets)

    # --- states ------------------------------------------------------------------------------------------------------

    @property
    def stateless(self) -> bool:
        """Whether the reducers remember nothing, so that the layout may change."""
        return not any(self._states)

    @property
    def states(self) -> list[State]:
        """What the reducers remember, by bucket. Only between steps."""
        return list(self._states)

    def restore(self, states: Sequence[State]) -> None:
        """Go on from these."""
        self._states = list(states)
        self._next_states = list(states)

    def resplit(self, worlds: Sequence[Sequence[State]]) -> list[State]:
        """This rank's states from those of all ranks of an earlier world, by rank and bucket; a world of one has none.

        Raises MismatchError where ranks own rows: what they had still to send is of rows that others own now.
        """
        if any(any(state for state in states) for states in worlds) and self._routes[0].owners.size > 1:
            raise MismatchError(
                "residuals of a lossy sync, kept where ranks own rows (mesh shard), go on with the same number of ranks only"
            )
        return [
            reducer.resplit([states[index] for states in worlds if states], each.reduced, self._group)
            for index, (reducer, each) in enumerate(zip(self._reducers, self._sets[0], strict=True))
        ]

    # --- a step ------------------------------------------------------------------------------------------------------

    def open(self, opening: Opening) -> None:
        """First in every exchange: the ranks are at the same batch, and what their buckets are to be multiplied by."""
        self._rows = {}
        self._begin_at_once = self._plain and not opening.explicit
        weighed = self._weighed = threading.Event()
        self._submit(lambda: self._open(opening, weighed))

    def buffers(self, buffers: BufferExchange, weight: float) -> None:
        """Agree on the model's buffers, beside backward."""
        self._submit(lambda: buffers.exchange(weight))

    def bucket(self, index: int) -> None:
        """Bucket ``index`` is full: reduce it. Always called in index order."""
        route = self._routes[-1 if self._plain else index % len(self._routes)]
        filling, weighed = self._sets[self._set][index], self._weighed
        if self._begin_at_once:
            self._begun.append(route.group.begin_all_reduce(filling.flat))
        else:
            self._submit(lambda: self._reduce(filling, route, weighed), route.lane)

    def rows(self, index: int, grad: Tensor | None, like: Tensor) -> None:
        """Sum the sparse gradient of parameter ``index``."""
        rows = self._rows
        self._submit(lambda: rows.update({index: self._sum_rows(grad, like)}))

    def measure(self, seconds: Sequence[float]) -> list[float]:
        """Rank 0's figures, so that all ranks decide alike from them. Waits."""
        self._drain()
        figures = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        return self._group.broadcast(figures).tolist()

    def seal(self, present: Sequence[bool], bad: Sequence[str]) -> Callable[[], Agreement]:
        """All of the above, and one tiny all-reduce: who has a gradient, who met a NaN (bad: names).

        Returns a function that waits for it. The next exchange fills the next set of buckets.
        """
        rows = self._rows
        self._set = (self._set + 1) % len(self._sets)
        if not self._delay:
            return lambda: self._agree_now(present, bad, rows)
        told: list[Agreement] = []
        self._submit(lambda: told.append(self._agree(present, bad, rows)))
        passed = self._first.marker()

        def wait() -> Agreement:
            passed()
            self._follow_stream()
            return told[0]

        return wait

    def _agree_now(self, present: Sequence[bool], bad: Sequence[str], rows: Mapping[int, Tensor]) -> Agreement:
        self._drain()
        return self._agree(present, bad, rows)

    def _drain(self) -> None:
        """Everything submitted has ended; this thread may use the groups now."""
        begun, self._begun = self._begun, []
        for wait in begun:
            wait()
        for route in self._routes:
            route.lane.drain()
        self._follow_stream()

    def _follow_stream(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    # --- on the lanes ------------------------------------------------------------------------------------------------

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

    def _open(self, opening: Opening, weighed: threading.Event) -> None:
        self._factor = None
        try:
            self._factor = agree_on_weights(opening, self._group, self._device)
        finally:
            weighed.set()  # also when it failed: nobody must wait for ever

    def _reduce(self, filling: Filling, route: Route, weighed: threading.Event) -> None:
        weighed.wait()
        if self._factor is not None:
            filling.flat.mul_(self._factor)
        bucket, index = filling.reduced, filling.reduced.index
        if filling.num_parts > 1:
            bucket.flat.copy_(route.owners.reduce_scatter(filling.flat.view(filling.num_parts, -1)))
        group, state = filling.group(route), self._states[index]
        mean, self._next_states[index] = self._reducers[index].reduce(bucket, state, group, self.step)
        if mean.data_ptr() != bucket.flat.data_ptr():
            bucket.flat.copy_(mean)

    def _sum_rows(self, grad: Tensor | None, like: Tensor) -> Tensor:
        if grad is not None and self._factor is not None:
            grad = grad * self._factor
        return sum_sparse(grad, like, self._group)

    def _agree(self, present: Sequence[bool], bad: Sequence[str], rows: Mapping[int, Tensor]) -> Agreement:
        flags = torch.tensor([bool(bad), *present], dtype=torch.float32, device=self._device)
        anybody = (self._group.all_reduce(flags) > 0).tolist()
        whole, met = self._group, anybody[0]
        if self._everybody is not None:
            whole = self._everybody
            met = bool(whole.all_reduce(torch.tensor([float(met)], device=self._device))[0] > 0)
        nonfinite: tuple[str, ...] = ()
        if met:
            texts = all_gather_text(whole, json.dumps(list(bad)), self._device)
            nonfinite = tuple(f"rank {rank}: {name}" for rank, text in enumerate(texts) for name in json.loads(text))
            self._next_states = list(self._states)
        self._states = list(self._next_states)
        self.step += 1
        return Agreement(used=tuple(anybody[1:]), nonfinite=nonfinite, rows=rows)
