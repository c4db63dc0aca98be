"""Optimizers that were made before their parameters were replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from gradwire.errors import UsageError


def exchange(optimizers: Iterable[torch.optim.Optimizer], replaced: Mapping[int, nn.Parameter]) -> None:
    """Give every optimizer the new parameters for its old ones, in place.

    replaced: id of the old parameter -> the new one, a ``DTensor`` of this rank's rows. Groups, settings and order stay.
    State of a parameter's shape is cut like the parameter; other state stays as it is, row factors (Adafactor's) too.
    Raises UsageError for LBFGS, which keeps flat copies of all parameters.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS works on one flat vector of all parameters, which sharding cuts; use another optimizer"
            )
        for group in optimizer.param_groups:
            for place, old in enumerate(group["params"]):
                new = replaced.get(id(old))
                if new is not None:
                    group["params"][place] = new
                    if old in optimizer.state:
                        optimizer.state[new] = _cut_state(optimizer.state.pop(old), old, new)


def _cut_state(state: dict[str, object], old: nn.Parameter, new: nn.Parameter) -> dict[str, object]:
    return {key: _cut(value, old, new) if isinstance(value, Tensor) else value for key, value in state.items()}


def _cut(value: Tensor, old: nn.Parameter, new: nn.Parameter) -> Tensor:
    if not isinstance(new, DTensor) or not value.ndim or value.ndim != old.ndim:
        return value
    whole = value.to_local() if isinstance(value, DTensor) else value
    mesh, spec = new.device_mesh, new.placements
    if value.shape == old.shape:
        size, rank = mesh.size(0), mesh.get_local_rank(0)
        parts = torch.chunk(whole, size)
        mine = parts[rank].clone() if rank < len(parts) else whole.new_empty((0, *whole.shape[1:]))
        return DTensor.from_local(mine, mesh, spec, run_check=False, shape=new.shape, stride=new.stride())
    if value.shape[0] == old.shape[0]:
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
            mesh, [Shard(0)]
        )
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
