"""A backward in two parts: the gradient that travels on, and the weights' gradients, later. By autograd's public doors only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Edge = tuple[Node, int]


@dataclass
class Kept:
    """Gradients by parameter, added up outside of ``.grad``, so that nobody's hooks see a part of them."""

    grads: dict[nn.Parameter, Tensor] = field(default_factory=dict[nn.Parameter, Tensor])

    def add(self, params: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
        """One gradient for each parameter, or None."""
        for param, grad in zip(params, grads, strict=True):
            if grad is not None:
                self.grads[param] = self.grads[param] + grad if param in self.grads else grad

    def deliver(self) -> None:
        """Through autograd into ``.grad``, with all hooks, as one backward."""
        if self.grads:
            torch.autograd.backward(list(self.grads), list(self.grads.values()))
        self.grads.clear()


@dataclass(frozen=True)
class Later:
    """The weights' part of one backward. doors: (a node on the way to the inputs, its edges off that way, what came in)."""

    doors: tuple[tuple[Node, tuple[Edge, ...], list[Tensor | None]], ...]

    def run(self, params: Sequence[nn.Parameter], kept: Kept) -> None:
        """Compute the gradients and add them to ``kept``."""
        edges: list[Edge] = []
        grads: list[Tensor] = []
        for node, off, came in self.doors:
            roots = [(GradientEdge(node, nr), grad) for nr, grad in enumerate(came) if grad is not None]
            if roots:
                wanted = tuple(GradientEdge(*edge) for edge in off)
                found = torch.autograd.grad(
                    [edge for edge, _ in roots],
                    wanted,
                    [grad for _, grad in roots],
                    retain_graph=True,
                    allow_unused=True,
                )
                pairs = [
                    (edge, grad)
                    for edge, grad in zip(off, cast("Sequence[Tensor | None]", found), strict=True)
                    if grad is not None
                ]
                edges += [edge for edge, _ in pairs]
                grads += [grad for _, grad in pairs]
        if edges:
            leaves = [get_gradient_edge(param) for param in params]
            roots = [GradientEdge(*edge) for edge in edges]
            kept.add(params, torch.autograd.grad(roots, leaves, grads, allow_unused=True))


def backward_inputs(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    inputs: Sequence[Tensor],
    params: Sequence[nn.Parameter],
    kept: Kept,
) -> tuple[list[Tensor | None], Later | None]:
    """The gradients of the inputs now, those of ``params`` later (or None: they are in ``kept`` already).

    They can be put off unless a parameter is used in two places of which one lies behind the other: then a part of its
    gradient would count twice.
    """
    doors = _doors(
        [get_gradient_edge(each).node for each in outputs], {get_gradient_edge(each).node for each in inputs}
    )
    if doors is None or not inputs:
        every = torch.autograd.grad(list(outputs), [*inputs, *params], list(grads), allow_unused=True)
        kept.add(params, every[len(inputs) :])
        return list(every[: len(inputs)]), None
    came: dict[Node, list[Tensor | None]] = {}
    handles = [
        node.register_prehook(lambda grads, node=node: came.__setitem__(node, list(grads)))  # pyright: ignore
        for node in doors
    ]
    try:
        found = torch.autograd.grad(list(outputs), list(inputs), list(grads), retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return list(found), Later(tuple((node, off, came[node]) for node, off in doors.items() if node in came))


def _doors(roots: Sequence[Node], inputs: set[Node]) -> dict[Node, tuple[Edge, ...]] | None:
    """Nodes from which the inputs are reached, with their edges that leave the ways there; None if the parts overlap."""
    order = _parents_last(roots)
    on_way: set[Node] = set()
    for node in order:
        if node in inputs or any(child in on_way for child, _ in node.next_functions):
            on_way.add(node)
    doors: dict[Node, tuple[Edge, ...]] = {}
    for node in order:
        off = tuple((child, nr) for child, nr in node.next_functions if child is not None and child not in on_way)
        if node in on_way and node not in inputs and off:
            doors[node] = off
    return doors if on_way.issuperset(roots) and not _overlap(doors) else None


def _overlap(doors: Mapping[Node, tuple[Edge, ...]]) -> bool:
    """Whether an edge off the way is met twice: from two doors, or behind another edge."""
    edges = [edge for off in doors.values() for edge in off]
    first = {node for node, _ in edges}
    behind = {child for node in _parents_last(list(first)) for child, _ in node.next_functions}
    return len(set(edges)) < len(edges) or not first.isdisjoint(behind)


def _parents_last(roots: Sequence[Node]) -> list[Node]:
    """All nodes, each after the ones it leads to."""
    order: list[Node] = []
    entered: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in entered:
            entered.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    return order
