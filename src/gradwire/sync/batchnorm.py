"""`SyncBatchNorm`: BatchNorm over the samples of all ranks, exact for unequal parts.

torch's own ``nn.SyncBatchNorm`` adds the ranks' gradients as if all held equally many samples, and needs the default
process group; here every rank's loss counts what it counts in the gradient (n_r / N), and an empty part counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from gradwire.core.group import Group
from gradwire.errors import UsageError
from gradwire.sync.weighting import Weighting


class SyncBatchNorm(_BatchNorm):
    """Takes over a BatchNorm layer's parameters and buffers; in evaluation it is that layer.

    Input (N, C, *) of any N per rank, also none. Statistics are combined from every rank's count, mean and sum of
    squares about it (Chan et al. 1983), which loses no precision.
    """

    def __init__(self, layer: _BatchNorm, group: Group, weighting: Weighting) -> None:
        super().__init__(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        self.weight, self.bias = layer.weight, layer.bias
        self.running_mean, self.running_var = layer.running_mean, layer.running_var
        self.num_batches_tracked = layer.num_batches_tracked
        self.join(group, weighting)
        self.train(layer.training)

    def join(self, group: Group, weighting: Weighting) -> None:
        """Synchronise with ``group`` from now on."""
        self._group = group
        self._weighting = weighting

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm expects (N, C, *), got {tuple(input.shape)}")

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        count = 0 if self._weighting.stand_in else input.numel() // input.shape[1]
        output, mean, variance, total = _Normalise.apply(
            input, self.weight, self.bias, self.eps, count, self._group, self._weighting
        )
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self._track(mean, variance * (total / (total - 1)))
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        self.num_batches_tracked.add_(1)  # pyright: ignore[reportOptionalMemberAccess]
        rate = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum  # pyright: ignore
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)  # pyright: ignore[reportOptionalMemberAccess]
        self.running_var.lerp_(variance.to(self.running_var.dtype), rate)  # pyright: ignore[reportOptionalMemberAccess]


def has_synchronised(model: nn.Module) -> bool:
    """Whether an earlier ``gw.distribute`` has replaced layers of ``model``."""
    return any(isinstance(module, SyncBatchNorm) for module in model.modules())


def synchronise_batch_norm(model: nn.Module, group: Group, weighting: Weighting, *, new: bool = True) -> None:
    """Replace every BatchNorm inside ``model`` by `SyncBatchNorm`, keeping parameters and names, if ``new``.

    Those that were replaced before, whose group is closed when the model is distributed again, join ``group``.
    """
    for module in model.modules():
        if isinstance(module, SyncBatchNorm):
            module.join(group, weighting)
    if not new:
        return
    swaps = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm | nn.SyncBatchNorm)
    ]
    made: dict[int, SyncBatchNorm] = {}
    for parent, name, layer in swaps:
        setattr(parent, name, made.setdefault(id(layer), SyncBatchNorm(layer, group, weighting)))


def refuse_single_samples(model: nn.Module) -> list[Callable[[], None]]:
    """Before torch's BatchNorm refuses a rank's part of one sample, say what to do. Returns how to stop that."""
    layers = [
        each
        for each in model.named_modules()
        if isinstance(each[1], _BatchNorm) and not isinstance(each[1], SyncBatchNorm)
    ]
    return [layer.register_forward_pre_hook(_refuse_single(name)).remove for name, layer in layers]


def _refuse_single(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def refuse(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if layer.training and args and args[0].dim() > 1 and args[0].numel() == args[0].shape[1]:
            raise UsageError(
                f"BatchNorm layer {name!r}: this rank's part of the batch is one value a channel, of which BatchNorm cannot take "
                'a variance; use Plan(batch_norm="sync"), which takes it over all ranks, or drop_last=True, or larger batches'
            )

    return refuse


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,  # noqa: ANN401  # torch gives it no type
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        count: int,
        group: Group,
        weighting: Weighting,
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, variance, total = _statistics(wide, count, group)
        scale = torch.rsqrt(variance + eps)
        normal = (wide - _per_channel(mean, x)) * _per_channel(scale, x)
        ctx.save_for_backward(normal, scale, weight)
        ctx.total, ctx.group, ctx.weighting, ctx.has_bias = total, group, weighting, bias is not None
        output = normal if weight is None else normal * _per_channel(weight, x)
        output = output if bias is None else output + _per_channel(bias, x)
        ctx.mark_non_differentiable(mean, variance)
        return output.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # type: ignore[override]
        normal, scale, weight = ctx.saved_tensors
        dims = [dim for dim in range(normal.dim()) if dim != 1]
        out = grads[0].to(normal.dtype)
        sum_out, sum_out_normal = out.sum(dims), (out * normal).sum(dims)
        through = out if weight is None else out * _per_channel(weight, out)
        count = ctx.weighting.current().count
        gain = scale.new_ones(scale.shape) if weight is None else weight
        message = torch.cat([count * gain * sum_out, count * gain * sum_out_normal, scale.new_tensor([count])])
        message = ctx.group.all_reduce(torch.nan_to_num(message) if count == 0 else message)
        shared = message[:-1] / ctx.total / max(count, 1e-300)  # times C, so that dividing by f_r = count / C is done
        mean_out, mean_out_normal = shared.chunk(2)
        rest = _per_channel(mean_out, out) + normal * _per_channel(mean_out_normal, out)
        grad_x = (through - rest) * _per_channel(scale, out) if count else torch.zeros_like(out)
        grad_weight = None if weight is None else sum_out_normal
        grad_bias = sum_out if ctx.has_bias else None
        return grad_x.to(grads[0].dtype), grad_weight, grad_bias, None, None, None, None


def _statistics(x: Tensor, count: int, group: Group) -> tuple[Tensor, Tensor, float]:
    """Mean and biased variance (C,) over the rows of all ranks, and how many rows those are."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    variance, mean = torch.var_mean(x, dims, correction=0) if count else (x.new_zeros(x.shape[1]),) * 2
    rows = group.all_gather(torch.cat([mean, variance * count, x.new_tensor([count])]))
    counts, means, squares = rows[:, -1:], *rows[:, :-1].chunk(2, dim=1)
    total = float(counts.sum())
    if total <= 1:
        raise ValueError(f"BatchNorm needs more than 1 value per channel over all ranks when training, got {total:.0f}")
    whole = (counts * means).sum(0) / total
    spread = (squares + counts * (means - whole) ** 2).sum(0) / total
    return whole, spread, total


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))
