"""Hooks around each parameter's gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle


class Hooks(Protocol):
    """Who calls ``before(index)`` and ``after(index)`` around each parameter's gradient in every backward."""

    @property
    def weighed(self) -> frozenset[int]:
        """Whose gradients come weighted, and summed over the ranks along ``shard``."""
        ...

    def settle(self) -> None:
        """The backward ends: report what is left."""
        ...

    def abandon(self) -> None:
        """The backward ended in an exception, which the script caught."""
        ...

    def close(self) -> None:
        """Remove every hook; the model is the user's again."""
        ...


class MakeHooks(Protocol):
    """Makes them. scale: what gradients are weighted by, where they are."""

    def __call__(
        self,
        params: Sequence[nn.Parameter],
        *,
        before: Callable[[int], None],
        after: Callable[[int], None],
        scale: Callable[[], float],
    ) -> Hooks: ...


class GradientHooks:
    """Autograd's own, around each `AccumulateGrad`."""

    weighed: frozenset[int] = frozenset()

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        before: Callable[[int], None],
        after: Callable[[int], None],
        scale: Callable[[], float],
    ) -> None:
        self._nodes: list[Node] = []
        self._handles: list[RemovableHandle] = []
        for index, param in enumerate(params):
            self._hook(index, param, before, after)

    def _hook(
        self, index: int, param: nn.Parameter, before: Callable[[int], None], after: Callable[[int], None]
    ) -> None:
        # The node's pre-hook, unlike the tensor's, does not fire for torch.autograd.grad. The node is kept alive here:
        # autograd only holds it weakly and would make a new one without the hook.
        node = get_gradient_edge(param).node
        self._nodes.append(node)
        self._handles.append(node.register_prehook(lambda _: before(index)))
        self._handles.append(param.register_post_accumulate_grad_hook(lambda _: after(index)))

    def settle(self) -> None:
        """Autograd reports everything at once."""

    def abandon(self) -> None:
        """It begins anew by itself."""

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
