"""Optimizers that were made before their parameters were replaced."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.comm.dtensor import cut_as, is_parted, local_of, mesh_place, part_of, rows_of
from gradwire.errors import UsageError


class Replaced(dict[int, nn.Parameter]):
    """Old parameter's id -> the new one. Knows the old ones, as long as they live: ids are used again."""

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[int, weakref.ref[nn.Parameter]] = {}

    def note(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """``new`` stands where ``old`` did."""
        self[id(old)] = new
        self._old[id(old)] = weakref.ref(old)

    def of(self, param: nn.Parameter) -> nn.Parameter | None:
        """What stands where ``param`` did; None if it still does."""
        known = self._old.get(id(param))
        return self[id(param)] if known is not None and known() is param else None


def exchange(optimizers: Iterable[Optimizer], replaced: Replaced) -> None:
    """Give every optimizer the new parameters for its old ones, in place; all ranks call it alike.

    Groups, settings and order stay. State of a parameter's shape is cut like the parameter; other state (a step count) stays as
    it is. Raises UsageError for state of another shape.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            params: list[nn.Parameter] = group["params"]
            for place, old in enumerate(params):
                new = replaced.of(old)
                if new is not None:
                    params[place] = new
                    if old in optimizer.state:
                        optimizer.state[new] = _cut_state(optimizer.state.pop(old), old, new)


def _cut_state(state: Mapping[str, object], old: nn.Parameter, new: nn.Parameter) -> dict[str, object]:
    return {key: _cut(key, value, old, new) if isinstance(value, Tensor) else value for key, value in state.items()}


def _cut(key: str, value: Tensor, old: nn.Parameter, new: nn.Parameter) -> Tensor:
    if not is_parted(new) or value.numel() == 1 != old.numel() or not value.dim():
        return value
    if value.shape != old.shape:
        raise UsageError(
            f"the optimizer's state {key!r} of shape {tuple(value.shape)} does not say how it is cut with its parameter of shape "
            f"{tuple(old.shape)}; call gw.distribute before the first step"
        )
    if not is_parted(value):
        return part_of(cut_as(value, new), new)
    local = local_of(value)  # parted along ``tensor``, and now by rows along the first dimension of the new one's mesh
    rank, num_ranks = mesh_place(new)
    return part_of(local[rows_of(local.shape[0], num_ranks, rank)].clone(), new)
