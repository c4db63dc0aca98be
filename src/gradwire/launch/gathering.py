"""Several hosts become one job: who has joined, and who gets which ranks. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from gradwire.launch.wire import Message, get_int, get_text

__all__ = ["Assignment", "Gathering", "Node"]

MAX_RANKS = 65536


@dataclass(frozen=True, kw_only=True)
class Node:
    """One launcher: its number, how many workers it will start, where it is. plan: its plan's TOML, or ""."""

    node_rank: int
    nodes: int
    num_local: int
    host: str
    pid: int
    plan: str = ""

    def message(self) -> Message:
        """As a `node` message."""
        return {"kind": "node", **asdict(self)}

    @classmethod
    def parse(cls, message: Message) -> Node:
        """From a `node` message; WireError if it is none."""
        return cls(
            node_rank=get_int(message, "node_rank"),
            nodes=get_int(message, "nodes", low=1),
            num_local=get_int(message, "num_local", low=1, high=MAX_RANKS),
            host=get_text(message, "host")[:255],
            pid=get_int(message, "pid"),
            plan=get_text(message, "plan"),
        )


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a node's launcher starts: ranks offset to offset + num_local - 1 of world_size, and where their store is."""

    offset: int
    world_size: int
    store_host: str
    store_port: int
    foreign_port: int

    def message(self) -> Message:
        """As a `start` message."""
        return {"kind": "start", **asdict(self)}

    @classmethod
    def parse(cls, message: Message) -> Assignment:
        """From a `start` message; WireError if it is none."""
        return cls(
            offset=get_int(message, "offset"),
            world_size=get_int(message, "world_size", low=1),
            store_host=get_text(message, "store_host"),
            store_port=get_int(message, "store_port", high=65535),
            foreign_port=get_int(message, "foreign_port", high=65535),
        )


class Gathering:
    """The nodes of a job as they come in. store: where rank 0 will serve its store; foreign_port: for env://."""

    def __init__(self, nodes: int, *, store: tuple[str, int], foreign_port: int) -> None:
        self.nodes = nodes
        self._store, self._foreign_port = store, foreign_port
        self._joined: dict[int, Node] = {}

    @property
    def joined(self) -> Mapping[int, Node]:
        """Who is here, by node rank."""
        return self._joined

    @property
    def missing(self) -> list[int]:
        """Node ranks that have not joined yet."""
        return [node_rank for node_rank in range(self.nodes) if node_rank not in self._joined]

    def join(self, node: Node) -> str | None:
        """Take a node in, or say why not."""
        if node.nodes != self.nodes:
            return f"node 0 was started with --nodes {self.nodes}, this one with --nodes {node.nodes}: use the same"
        if node.node_rank >= self.nodes:
            return f"node rank {node.node_rank} is outside 0 to {self.nodes - 1}: correct --node-rank"
        if node.node_rank in self._joined:
            holder = self._joined[node.node_rank]
            return (
                f"node rank {node.node_rank} is taken by {holder.host} (pid {holder.pid}): give each host its own "
                f"--node-rank, 0 to {self.nodes - 1}"
            )
        if any(other.plan != node.plan for other in self._joined.values()):
            return (
                f"node {node.node_rank} was started with another plan than the others: give every node the same options"
            )
        self._joined[node.node_rank] = node
        return None

    def forget(self, node_rank: int) -> None:
        """A node went away before the start: its place is free again."""
        self._joined.pop(node_rank, None)

    def ranks(self, node_rank: int) -> range:
        """The ranks of a node, once all have joined."""
        offset = sum(self._joined[earlier].num_local for earlier in range(node_rank))
        return range(offset, offset + self._joined[node_rank].num_local)

    @property
    def world_size(self) -> int:
        """All workers of the nodes that have joined."""
        return sum(node.num_local for node in self._joined.values())

    def assignment(self, node_rank: int) -> Assignment:
        """What `node_rank` is told to start, once all have joined."""
        return Assignment(
            offset=self.ranks(node_rank).start,
            world_size=self.world_size,
            store_host=self._store[0],
            store_port=self._store[1],
            foreign_port=self._foreign_port,
        )
