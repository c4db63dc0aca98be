"""`whole_state_dict`: the model of one process, put together from the ranks' parts."""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradwire.comm.text import all_gather_text
from gradwire.comm.world import current


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """What ``model.state_dict()`` of one process would be, on every rank, as plain tensors of their own on this rank's device.

    Call it on all ranks, between steps. Each rank then holds the whole model: for one too big for that, save a checkpoint and
    export it. Persistent entries that are no tensors are left out.

    >>> import torch
    >>> import gradwire as gw
    >>> with gw.init():
    ...     list(gw.whole_state_dict(torch.nn.Linear(2, 1)))
    ['weight', 'bias']
    """
    world = current()
    mine = {name: _whole(value) for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    group = world.group("pipeline", channel="whole")
    if group.size == 1:
        return mine
    told = json.dumps([[name, str(value.dtype).removeprefix("torch."), value.shape] for name, value in mine.items()])
    found: dict[str, Tensor] = {}
    for stage, text in enumerate(all_gather_text(group, told, world.device)):
        for name, dtype, shape in json.loads(text):
            if name not in found:
                empty = torch.empty(shape, dtype=getattr(torch, dtype), device=world.device)
                found[name] = group.broadcast(mine[name] if stage == group.rank else empty, src=stage)
    return found


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()
