"""Cross entropy of logits whose classes are shared by tensor parallel ranks, without bringing them together."""

# autograd.Function's stubs say nothing about forward and backward
# pyright: reportIncompatibleMethodOverride=false
# ruff: noqa: ANN401

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from gradwire.errors import UsageError
from gradwire.parallel.moves import Ranks
from gradwire.parallel.part import Part, Value, handles

REDUCTIONS = ("mean", "sum", "none")
SETTINGS = ("ignore_index", "reduction", "label_smoothing")


def cross_entropy(
    logits: Tensor | Part,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`, also of logits of which each tensor parallel rank has 1/n of the classes.

    logits: (N, C), (C,) or (N, C, ...): plain, as a head with the rule ``"vocabulary"`` gives them, or a ``DTensor`` sharded
    over C.
    target: (N, ...) class indices, the same on all ranks. Of shared logits nothing travels but three numbers a sample, in two
    all-reduces; backward sends nothing. Plain logits: F.cross_entropy itself. Raises IndexError for a target that is no class,
    and UsageError for class probabilities with shared logits.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([1, 3]))
    tensor(1.3863)
    """
    logits = _as_part(logits) if isinstance(logits, DTensor) else logits
    if not isinstance(logits, Part) or logits.axis != _class_dim(logits) or len(logits.segments) > 1:
        plain = logits.full_tensor() if isinstance(logits, Part) else logits
        return F.cross_entropy(
            plain, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    if reduction not in REDUCTIONS:
        raise UsageError(f"reduction={reduction!r}; allowed: {', '.join(REDUCTIONS)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise UsageError(f"label_smoothing={label_smoothing!r}; use a number from 0 to 1")
    if target.is_floating_point():
        raise UsageError(
            "targets that are class probabilities, with shared logits; use class indices, or logits.full_tensor()"
        )
    wanted = (*logits.shape[: logits.axis], *logits.shape[logits.axis + 1 :])
    if tuple(target.shape) != wanted:
        raise UsageError(
            f"target of shape {tuple(target.shape)} for logits of shape {tuple(logits.shape)}; it must be {wanted}"
        )
    kept = target != ignore_index
    bad = kept & ((target < 0) | (target >= sum(logits.segments)))
    if bool(bad.any()):
        raise IndexError(f"target {int(target[bad][0])} is no class of {sum(logits.segments)}")
    local = logits.local.movedim(logits.axis, -1)  # (..., C/n)
    losses = cast("Tensor", _Losses.apply(local, target, kept, label_smoothing, logits.ranks))
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / kept.sum()


class _Losses(Function):
    """One loss a sample: logsumexp - (1 - s) * target's logit - s * mean logit; 0 where ``kept`` is false."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, kept: Tensor, smoothing: float, ranks: Ranks) -> Tensor:
        width = logits.shape[-1]
        largest = ranks.largest(logits.max(-1).values)
        shifted = logits - largest.unsqueeze(-1)
        weights = shifted.exp()
        place = target - ranks.rank * width
        here = kept & (place >= 0) & (place < width)
        place = place.masked_fill(~here, 0)
        own = shifted.gather(-1, place.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        sums, hit, mean = ranks.total(torch.stack([weights.sum(-1), own, shifted.sum(-1)]))
        mean = mean / (width * ranks.size)
        losses = sums.log() - (1 - smoothing) * hit - (smoothing * mean if smoothing else 0.0)
        ctx.save_for_backward(weights / sums.unsqueeze(-1), place, here, kept)
        ctx.smoothing, ctx.classes = smoothing, width * ranks.size
        return losses.masked_fill(~kept, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        chances, place, here, kept = ctx.saved_tensors
        grad = chances - ctx.smoothing / ctx.classes
        grad.scatter_add_(-1, place.unsqueeze(-1), -(1 - ctx.smoothing) * here.to(grad.dtype).unsqueeze(-1))
        return grad * grads[0].masked_fill(~kept, 0.0).unsqueeze(-1), None, None, None, None


def _class_dim(logits: Part) -> int:
    return 0 if logits.dim() == 1 else 1


def _as_part(logits: DTensor) -> Part | Tensor:
    placement = logits.placements[0]
    classes = 0 if logits.dim() == 1 else 1
    if (
        logits.device_mesh.ndim != 1
        or not placement.is_shard(classes)
        or logits.shape[classes] % logits.device_mesh.size()
    ):
        return logits.full_tensor()
    return Part(logits.to_local(), classes, (logits.shape[classes],), Ranks.of(logits.device_mesh))


@handles("cross_entropy")
def _cross_entropy(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    """F.cross_entropy of a part is ours where it can be."""
    if len(args) != 2 or not isinstance(args[0], Part):
        return NotImplemented
    logits, target = args
    if kwargs.get("weight") is not None or not isinstance(target, Tensor) or target.is_floating_point():
        return NotImplemented
    return cross_entropy(logits, target, **{key: kwargs[key] for key in SETTINGS if key in kwargs})
