"""The links between neighbouring stages: sends that never block, receives that are on their way before they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from gradwire.comm.lane import Lane
from gradwire.comm.world import World
from gradwire.core.compressor import Compressor
from gradwire.core.group import Group
from gradwire.core.schedule import Action, Order
from gradwire.parallel.message import pack, receive, send

Direction = Literal["forward", "backward"]
Key = tuple[Direction, int, int]  # direction, the stage it goes to, micro-batch


@dataclass(frozen=True)
class _Way:
    """From rank ``src`` to ``dst`` along ``pipeline``; one thread sends at one end, one receives at the other."""

    direction: Direction
    src: int
    dst: int


class Links:
    """A group of two ranks, and a thread at each end, for each direction of each link: none waits for another.

    names: of the groups, for whoever closes them. Every rank of the pipeline must make it alike.
    """

    def __init__(self, world: World, *, num_ranks: int, num_stages: int, codec: Compressor | None) -> None:
        self._device = world.device
        self._codec = codec
        self._place = world.mesh.coordinate(world.rank)["pipeline"]
        self._num_ranks, self._num_stages = num_ranks, num_stages
        self._coming: dict[Key, Future[list[object]]] = {}
        serial = world.next_serial()
        self._ends: dict[_Way, tuple[Group, Lane]] = {}
        for way in self._ways():
            if self._place in (way.src, way.dst):
                channel = f"{way.direction}-{way.src}-{way.dst}.{serial}"
                group = world.among("pipeline", (way.src, way.dst), channel=channel)
                self._ends[way] = group, world.lane(group.name)
        self.names = [group.name for group, _ in self._ends.values()]

    def _ways(self) -> Iterator[_Way]:
        hops = [(stage % self._num_ranks, (stage + 1) % self._num_ranks) for stage in range(self._num_stages - 1)]
        for src, dst in dict.fromkeys(hops):
            yield _Way("forward", src, dst)
            yield _Way("backward", dst, src)

    def expect(self, order: Order) -> None:
        """Begin to receive what the other ranks will send in this order of work."""
        self._coming.clear()
        for way, (group, lane) in self._ends.items():
            if way.dst == self._place:
                for key in self._sent_on(way, order[way.src]):
                    self._coming[key] = future = Future()
                    lane.submit(lambda group=group, future=future: self._receive(group, future))

    def post(self, action: Action, values: Sequence[object], names: Sequence[str]) -> None:
        """Send the values that ``action`` gave to whichever rank waits for them; returns at once."""
        way, _ = self._route(action)
        group, lane = self._ends[way]
        message = pack(values, names, self._codec)
        lane.submit(lambda: send(message, group, 1 - group.rank, self._device))

    def take(self, direction: Direction, stage: int, microbatch: int) -> list[object]:
        """What has come for ``stage``; waits for it. Raises PeerError if the sender is gone."""
        return self._coming.pop((direction, stage, microbatch)).result()

    def finish(self) -> None:
        """Wait until everything this rank sent is taken."""
        for way, (_, lane) in self._ends.items():
            if way.src == self._place:
                lane.drain()

    def _receive(self, group: Group, future: Future[list[object]]) -> None:
        try:
            future.set_result(receive(group, 1 - group.rank, self._device, self._codec))
        except BaseException as error:  # raised where it is waited for
            future.set_exception(error)

    def _sent_on(self, way: _Way, actions: Sequence[Action]) -> Iterator[Key]:
        for action in actions:
            if self._sends(action) and (route := self._route(action))[0] == way:
                yield route[1]

    def _sends(self, action: Action) -> bool:
        return action.stage + 1 < self._num_stages if action.kind == "forward" else action.returns and action.stage > 0

    def _route(self, action: Action) -> tuple[_Way, Key]:
        direction: Direction = "forward" if action.kind == "forward" else "backward"
        stage = action.stage + (1 if direction == "forward" else -1)
        way = _Way(direction, action.stage % self._num_ranks, stage % self._num_ranks)
        return way, (direction, stage, action.microbatch)
