"""Parameters that several stages use, an embedding and its output layer say: their gradients are summed before the step."""

# ruff: noqa: ANN401  # autograd.Function's context

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradwire.comm.dtensor import local_of, part_of
from gradwire.comm.world import World
from gradwire.core.group import Group
from gradwire.parallel.holding import Tie


class Ties:
    """One rank's shared parameters. After `settle` all who have one hold the same bits in ``.grad``.

    names: of the groups it opened.
    """

    def __init__(self, model: nn.Module, world: World, ties: Sequence[Tie], rank: int) -> None:
        self._world = world
        here = dict(model.named_parameters(remove_duplicate=False))
        serial = world.next_serial()
        groups: dict[tuple[int, ...], Group] = {}
        self._shared: list[tuple[nn.Parameter, Group]] = []
        for tie in ties:
            if rank in tie.ranks:
                if tie.ranks not in groups:
                    groups[tie.ranks] = world.among("pipeline", tie.ranks, channel=f"ties.{serial}")
                param = next(here[name] for name in tie.names if name in here)
                if param.requires_grad:
                    self._shared.append((param, groups[tie.ranks]))
        self._settled: dict[int, Tensor] = {}
        self.names = [group.name for group in groups.values()]

    def zeros(self) -> list[tuple[nn.Parameter, Tensor]]:
        """A gradient of zeros for each."""
        return [(param, torch.zeros_like(param)) for param, _ in self._shared]

    def roots(self) -> list[tuple[Tensor, Tensor]]:
        """For a batch's last backward: it leaves a gradient, perhaps of zeros, in the same layout on every rank."""
        roots = [cast("Tensor", _Zeros.apply(param)) for param, _ in self._shared]
        return [(root, torch.ones_like(root)) for root in roots]

    def set_aside(self) -> dict[int, Tensor]:
        """Before a batch: gradients that were summed already must not be summed again."""
        held: dict[int, Tensor] = {}
        for index, (param, _) in enumerate(self._shared):
            if param.grad is not None and param.grad is self._settled.get(index):
                held[index], param.grad = param.grad.clone(), None
        return held

    def settle(self, held: Mapping[int, Tensor]) -> None:
        """After it: sum, unless gradients stay on their rank for now (`gw.no_sync`, an accumulation window).

        A rank without a gradient counts as zero; if none has one, none gets one.
        """
        for index, (param, group) in enumerate(self._shared):
            if not self._world.local_only:
                self._sum(param, group)
            if index in held:
                param.grad = held[index] if param.grad is None else param.grad.add_(held[index])
            if param.grad is not None and not self._world.local_only:
                self._settled[index] = param.grad
            else:
                self._settled.pop(index, None)

    def _sum(self, param: nn.Parameter, group: Group) -> None:
        grad = param.grad
        anybody = torch.tensor([grad is not None], dtype=torch.int32, device=param.device)
        if not int(group.all_reduce(anybody, "max")):
            return
        total = torch.zeros_like(param) if grad is None else grad.to_dense() if grad.is_sparse else grad
        part = local_of(total).contiguous()
        part_of_all = group.all_reduce(part)
        param.grad = part_of(part_of_all, total)


class _Zeros(torch.autograd.Function):
    """A number that every entry of a parameter has a gradient of 0 from."""

    @staticmethod
    def forward(ctx: Any, param: Tensor) -> Tensor:
        ctx.param = param.detach()
        return torch.zeros((), dtype=param.dtype, device=param.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.zeros_like(ctx.param)


@contextmanager
def local_only(world: World, *, on: bool) -> Generator[None]:
    """Backwards inside keep their gradients on this rank (`gw.no_sync`)."""
    world.local_only += on
    try:
        yield
    finally:
        world.local_only -= on
