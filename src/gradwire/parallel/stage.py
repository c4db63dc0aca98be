"""`Stage`: some of a model's blocks, run on what earlier stages computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from gradwire.errors import UsageError
from gradwire.parallel.blocks import Blocks, Program, path_of
from gradwire.parallel.part import to_whole


class Stage:
    """Runs a `Program` of ``model``'s blocks. names: of the values it sends."""

    def __init__(self, blocks: Blocks, program: Program) -> None:
        self._blocks = blocks
        self.program = program
        self.names = [f"the value {node.name}" for node in program.sent or ()]

    def run(self, model: nn.Module, x: object, received: Sequence[object]) -> tuple[object, ...]:
        """What it sends on; or, from the last stage, a tuple with the model's result alone.

        received: values of ``program.received``; they may be changed in place. model: the user's, for its blocks as they are now.
        """
        program = self.program
        known: dict[Node, object] = dict(zip(program.received, received, strict=True))
        for node in program.nodes:
            known[node] = self._value(model, node, known, x)
            for done in program.last_uses[node]:
                known.pop(done, None)
        if program.sent is None:
            return (_filled(self._blocks.result().args[0], known),)
        return tuple(
            to_whole(known[node]) for node in program.sent
        )  # a cut may fall between layers that share an activation

    def _value(self, model: nn.Module, node: Node, known: dict[Node, object], x: object) -> object:
        if node.op == "placeholder":
            return x
        if node.op == "get_attr":
            return self._blocks.attribute(model, node)
        args = cast("tuple[object, ...]", _filled(node.args, known))
        kwargs = cast("dict[str, object]", _filled(node.kwargs, known))
        if node.op == "call_module":
            return model.get_submodule(path_of(node))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return cast("Callable[..., object]", node.target)(*args, **kwargs)


def _filled(argument: object, known: dict[Node, object]) -> object:
    return map_arg(argument, lambda node: known[node])  # pyright: ignore[reportArgumentType]


@dataclass
class Passage:
    """One micro-batch in one stage, from its forward until its backward.

    entries: received tensors that wait for a gradient. exits: tensors whose gradient comes back, or the loss.
    """

    entries: list[Tensor] = field(default_factory=list[Tensor])
    exits: list[Tensor] = field(default_factory=list[Tensor])


def entered(values: Sequence[object], passage: Passage) -> list[object]:
    """The values as a forward may use, and change, them; the leaves are noted in ``passage``."""

    def enter(value: object) -> object:
        if isinstance(value, Tensor) and value.requires_grad:
            passage.entries.append(value)
            return cast("Tensor", _Entry.apply(value))
        return _each(value, enter)

    return [enter(value) for value in values]


def awaiting(values: Sequence[object]) -> list[Tensor]:
    """The tensors in ``values`` that need a gradient, in order: both ends of a link count them alike."""
    found: list[Tensor] = []

    def look(value: object) -> object:
        if isinstance(value, Tensor) and value.requires_grad:
            found.append(value)
        return _each(value, look)

    for value in values:
        look(value)
    return found


def _each(value: object, act: Callable[[object], object]) -> object:
    if isinstance(value, tuple | list):
        items = [act(each) for each in cast("Sequence[object]", value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value


class _Entry(torch.autograd.Function):
    """The same memory, no longer a leaf: a stage's first block may work in place (``nn.ReLU(inplace=True)``)."""

    @staticmethod
    def forward(ctx: object, leaf: Tensor) -> Tensor:
        same = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return same.set_(leaf.detach())  # pyright: ignore[reportArgumentType]  # torch's stub forgets tensors

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


class Elsewhere(nn.Module):
    """In place of a block that another rank has."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__()
        self._name, self._rank = name, rank

    def forward(self, *_: object, **__: object) -> object:
        """Raise UsageError."""
        raise UsageError(
            f"the block {self._name} is on rank {self._rank} of the pipeline; call gw.forward_backward(model, loss_fn, x, y), "
            "under torch.no_grad() for a loss alone"
        )

    def extra_repr(self) -> str:
        return f"{self._name} is on rank {self._rank} of the pipeline"
