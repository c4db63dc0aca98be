"""Optimizers that were made before their parameters were replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradwire.errors import UsageError

_REFUSED = {
    "LBFGS": "it works on one flat vector of all parameters",
    "Adafactor": "torch 2.13's cannot square the norms of columns that lie on several ranks",
}


def exchange(optimizers: Iterable[torch.optim.Optimizer], replaced: Mapping[int, nn.Parameter]) -> None:
    """Give every optimizer the new parameters for its old ones, in place.

    replaced: id of the old parameter -> the new one, a ``DTensor`` of this rank's rows. Groups, settings and order stay.
    State of a parameter's shape is cut like the parameter; other state (a step count) stays as it is.
    Raises UsageError for optimizers of torch that cannot step on sharded parameters, and for state of another shape.
    """
    for optimizer in optimizers:
        for kind in type(optimizer).__mro__:
            if kind.__module__.startswith("torch.optim") and kind.__name__ in _REFUSED:
                raise UsageError(
                    f"{kind.__name__} cannot step on sharded parameters ({_REFUSED[kind.__name__]}); use AdamW"
                )
        for group in optimizer.param_groups:
            for place, old in enumerate(group["params"]):
                new = replaced.get(id(old))
                if new is not None:
                    group["params"][place] = new
                    if old in optimizer.state:
                        optimizer.state[new] = _cut_state(optimizer.state.pop(old), old, new)


def _cut_state(state: dict[str, object], old: nn.Parameter, new: nn.Parameter) -> dict[str, object]:
    return {key: _cut(key, value, old, new) if isinstance(value, Tensor) else value for key, value in state.items()}


def _cut(key: str, value: Tensor, old: nn.Parameter, new: nn.Parameter) -> Tensor:
    if not isinstance(new, DTensor) or value.numel() == 1 != old.numel() or not value.ndim:
        return value
    if value.shape != old.shape:
        raise UsageError(
            f"the optimizer's state {key!r} of shape {tuple(value.shape)} does not say how it is cut with its parameter of shape "
            f"{tuple(old.shape)}; call gw.distribute before the first step"
        )
    whole = value.to_local() if isinstance(value, DTensor) else value
    parts = torch.chunk(whole, new.device_mesh.size(0))
    rank = new.device_mesh.get_local_rank(0)
    mine = parts[rank].clone() if rank < len(parts) else whole.new_empty((0, *whole.shape[1:]))
    return DTensor.from_local(
        mine, new.device_mesh, new.placements, run_check=False, shape=new.shape, stride=new.stride()
    )
