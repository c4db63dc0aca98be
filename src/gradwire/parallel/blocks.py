"""A model's own forward -> an ordered list of blocks -> what each stage receives, computes and hands on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.fx import Node

from gradwire.errors import PlanError, UsageError
from gradwire.parallel.tracing import INNER, is_random, mutates, trace


@dataclass(frozen=True)
class Program:
    """What one stage does. received: values of earlier stages, in the order they come. nodes: its work.

    sent: values that later stages need, in order; or None for the last stage, which gives the model's result.
    last_uses: values that nobody needs after a node.
    """

    received: tuple[Node, ...]
    nodes: tuple[Node, ...]
    sent: tuple[Node, ...] | None
    last_uses: dict[Node, tuple[Node, ...]]


class Blocks:
    """A traced model. names: its blocks, in order; a cut lies between two of them.

    A value that depends on the model's input alone (a mask, positions) is *free*: every stage that needs it computes it,
    as all have the whole batch. All others belong to the block after which they are computed and are sent.
    """

    def __init__(self, model: nn.Module, *, deep: bool = False) -> None:
        graph, self._root = trace(model, deep=deep)
        self._nodes = [node for node in graph.nodes if node.op != "output"]
        self._output = next(iter(reversed(graph.nodes)))
        self._free = _find_free(model, self._nodes)
        self._block: dict[Node, int] = {}
        self.names = self._assign()

    def _assign(self) -> tuple[str, ...]:
        names: list[str] = []
        for node in self._nodes:
            if node.op == "call_module":
                name = path_of(node)
                again = sum(each.partition("@")[0] == name for each in names)
                names.append(f"{name}@{again + 1}" if again else name)
            if node not in self._free:
                self._block[node] = max(0, len(names) - 1)
        self._block[self._output] = max(0, len(names) - 1)
        return tuple(names)

    def place_of(self, name: str) -> int:
        """Which block a cut at ``name`` lies before: the one of that name, or the first inside of it."""
        for place, block in enumerate(self.names):
            if block == name or block.startswith(f"{name}."):
                return place
        raise PlanError(f"pipeline.cuts: the model has no block {name!r}; its blocks are {', '.join(self.names)}")

    def program(self, start: int, stop: int) -> Program:
        """Of the stage with the blocks ``start`` to ``stop`` - 1."""
        own = [node for node in self._nodes if start <= self._block.get(node, -1) < stop]
        last = stop == len(self.names)
        needed = set(own) | self._free_before([*own, *([self._output] if last else [])])
        nodes = tuple(node for node in self._nodes if node in needed)
        sent = None if last else self._crossing(stop)
        ends = (*nodes, self._output) if last else nodes
        return Program(self._crossing(start), nodes, sent, _last_uses(ends, keep=set(sent or ())))

    def result(self) -> Node:
        """The node whose arguments are the model's result."""
        return self._output

    def attribute(self, model: nn.Module, node: Node) -> object:
        """What a ``get_attr`` node stands for: the user's parameter or buffer as it is now, or a constant of the trace."""
        value: object = model if str(node.target).startswith(f"{INNER}.") else self._root
        for word in path_of(node).split("."):
            value = getattr(value, word)
        return value

    def _crossing(self, stop: int) -> tuple[Node, ...]:
        """The values of blocks before ``stop`` that blocks from there on use."""
        if stop in (0, len(self.names)):
            return ()
        return tuple(
            node
            for node, block in self._block.items()
            if block < stop and any(self._block.get(user, -1) >= stop for user in node.users)
        )

    def _free_before(self, nodes: Sequence[Node]) -> set[Node]:
        found: set[Node] = set()
        waiting = [each for node in nodes for each in node.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node in self._free and node not in found:
                found.add(node)
                waiting += node.all_input_nodes
        return found


def path_of(node: Node) -> str:
    """The user's name of the module, parameter or buffer that a node is about."""
    return str(node.target).removeprefix(f"{INNER}.")


def tensors_of(model: nn.Module, program: Program, blocks: Blocks) -> list[Tensor]:
    """The parameters and buffers that a stage uses, each once."""
    found: dict[int, Tensor] = {}
    for node in program.nodes:
        if node.op == "call_module":
            module = model.get_submodule(path_of(node))
            found |= {id(each): each for each in (*module.parameters(), *module.buffers())}
        elif node.op == "get_attr":
            value = blocks.attribute(model, node)
            found |= {id(value): value} if isinstance(value, Tensor) else {}
    return list(found.values())


def _find_free(model: nn.Module, nodes: Sequence[Node]) -> set[Node]:
    changed = _changed_in_place(model, nodes)
    free: set[Node] = set()
    for node in nodes:
        simple = node.op in ("placeholder", "get_attr", "call_function", "call_method")
        if simple and not is_random(node) and not mutates(node) and node not in changed:
            free |= {node} if free.issuperset(node.all_input_nodes) else set()
    return free


def _changed_in_place(model: nn.Module, nodes: Sequence[Node]) -> set[Node]:
    """What is changed by a later node, and what that may be a view of."""
    changed: set[Node] = set()
    for node in nodes:
        value = node.all_input_nodes[0] if mutates(node) and node.all_input_nodes else None
        while value is not None and value.op in ("call_function", "call_method", "placeholder", "get_attr"):
            if value.op in ("placeholder", "get_attr"):
                what = "its input" if value.op == "placeholder" else path_of(value)
                raise UsageError(
                    f"{type(model).__name__} cannot be cut into stages: its forward changes {what} in place ({node}), and the "
                    "stages would see different values; change a clone()"
                )
            changed.add(value)
            value = value.all_input_nodes[0] if value.all_input_nodes else None
    return changed


def _last_uses(nodes: Sequence[Node], keep: set[Node]) -> dict[Node, tuple[Node, ...]]:
    seen, ends = set(keep), dict[Node, tuple[Node, ...]]()
    for node in reversed(nodes):
        fresh = [each for each in dict.fromkeys((*node.all_input_nodes, node)) if each not in seen]
        ends[node] = tuple(fresh)
        seen |= set(fresh)
    return ends
