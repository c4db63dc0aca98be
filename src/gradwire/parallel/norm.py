"""Clipping by the global norm, where gradients are whole, sharded, or on other ranks altogether."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from gradwire.comm.dtensor import local_of
from gradwire.comm.world import opened
from gradwire.core.group import Group
from gradwire.errors import UsageError
from gradwire.parallel.split import is_second_copy


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    across: Group | None = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` under every plan: the norm is the whole model's, wherever its parts are.

    norm = (sum of |g|^p over the numbers of the whole model)^(1/p): a shard's numbers count on their rank, what is the same on
    several ranks counts once. Where nothing is sharded it is torch's function. All ranks call it, with the model's parameters
    in their order. across: the ranks that hold other parameters of the model; default, those along ``pipeline``.
    Returns the norm before, the same on all ranks. Cost: one all-reduce of one number for each way of sharding, and one along
    ``across``. Raises UsageError for ``norm_type`` 0 or less, and RuntimeError for a norm that is not finite if
    ``error_if_nonfinite``.

    >>> import torch
    >>> import gradwire as gw
    >>> with gw.init():
    ...     weight = torch.ones(4, requires_grad=True)
    ...     (3 * weight).sum().backward()
    ...     float(gw.clip_grad_norm_(weight, 1.0))
    6.0
    """
    if across is None and (world := opened()) is not None:
        across = world.group("pipeline", channel="norm")
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad for param in given if param.grad is not None]
    alone = across is None or across.size == 1
    if alone and not any(isinstance(grad, DTensor) for grad in grads):
        return nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)
    p = float(norm_type)
    if not p > 0:
        raise UsageError(f"norm_type={norm_type!r}; use a number above 0, or inf")
    for param in given:
        if isinstance(param.grad, DTensor) and any(placement.is_partial() for placement in param.grad.placements):
            whole = [Replicate() if place.is_partial() else place for place in param.grad.placements]
            param.grad = param.grad.redistribute(placements=whole)
    grads = [param.grad for param in given if param.grad is not None]
    counted = [param.grad for param in given if param.grad is not None and not is_second_copy(param)]
    wide = any(
        grad.dtype == torch.float64 for grad in grads
    )  # also of those that count elsewhere: they are scaled here
    norm = _norm(counted, p, None if alone else across).to(torch.float64 if wide else torch.float32)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the gradients' norm of order {p} is {float(norm)}; pass error_if_nonfinite=False to clip anyway"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        local = local_of(grad)
        local.mul_(factor.to(local.device, local.dtype))
    return norm


def _norm(grads: list[Tensor], p: float, across: Group | None) -> Tensor:
    """The norm over everybody's gradients, on all ranks, in float64."""
    sums: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
    kinds = [local_of(grad) for grad in grads]
    device = kinds[0].device if kinds else torch.device("cpu")
    zero = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        groups, power = _groups(grad), _power(local_of(grad), p).to(device)
        sums[groups] = _both(sums.get(groups, zero), power, p)
    total = zero
    for groups, value in sums.items():
        mine = value.reshape(1).clone()
        for group in groups:
            dist.all_reduce(mine, op=dist.ReduceOp.MAX if p == math.inf else dist.ReduceOp.SUM, group=group)
        total = _both(total, mine[0], p)
    if across is not None:
        total = across.all_reduce(total.reshape(1).clone(), "max" if p == math.inf else "sum")[0]
    return total if p == math.inf else total ** (1 / p)


def _groups(grad: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks hold different parts of it."""
    if not isinstance(grad, DTensor):
        return ()
    dims = [dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate()]
    return tuple(grad.device_mesh.get_group(dim) for dim in dims)


def _power(local: Tensor, p: float) -> Tensor:
    if not local.numel():
        return local.new_zeros((), dtype=torch.float64)
    norm = torch.linalg.vector_norm(local, p).double()  # powers of a float32 may be too large for one
    return norm if p == math.inf else norm**p


def _both(a: Tensor, b: Tensor, p: float) -> Tensor:
    return torch.maximum(a, b) if p == math.inf else a + b
