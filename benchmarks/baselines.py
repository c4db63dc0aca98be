"""What PyTorch itself offers for a slow network: DDP's communication hooks, local SGD, fewer exchanges."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

ONE_BUCKET_MB = 1 << 20  # more than any model here: PowerSGD on Gloo hangs or aborts with two buckets (pytorch #48478)
EPSILON = 1e-8  # at its default of 0 PowerSGD turns an all-zero gradient into NaN
FIRST_COMPRESSED = 2  # the least that PowerSGD allows: DDP regroups its buckets after the first step


@dataclass(frozen=True, kw_only=True)
class Hook:
    """What DDP does on a slow network.

    name: none, fp16, powersgd, post-local or accumulate. value: PowerSGD's rank; for the last two how many steps lie between
    exchanges.
    """

    name: str
    value: int = 1

    ALLOWED: ClassVar[str] = "none, fp16, powersgd:RANK, post-local:EVERY or accumulate:EVERY"
    NUMBERED: ClassVar[tuple[str, ...]] = ("powersgd", "post-local", "accumulate")

    @classmethod
    def parse(cls, text: str) -> Hook:
        """Read a command line's word; ArgumentTypeError names what is allowed.

        >>> Hook.parse("powersgd:4")
        Hook(name='powersgd', value=4)
        """
        name, colon, value = text.partition(":")
        if name in cls.NUMBERED and value.isdecimal() and int(value) >= 1:
            return cls(name=name, value=int(value))
        if name in ("none", "fp16") and not colon:
            return cls(name=name)
        raise argparse.ArgumentTypeError(f"{text!r} must be {cls.ALLOWED}; RANK and EVERY are whole numbers from 1")

    def keeps(self, step: int) -> bool:
        """Whether this step's gradients only add up, without an exchange and without an optimizer step."""
        return self.name == "accumulate" and step % self.value != self.value - 1

    @property
    def share(self) -> float:
        """What a step's loss counts: gradients that only add up must be a mean in the end."""
        return 1 / self.value if self.name == "accumulate" else 1.0


def wrap(
    model: nn.Module, optimizer: Optimizer, hook: Hook, *, bucket_cap_mb: float | None = None
) -> tuple[DistributedDataParallel, Optimizer]:
    """DDP around ``model`` with this hook, and the optimizer to step. bucket_cap_mb: None for DDP's own."""
    one_bucket = hook.name == "powersgd"
    parallel = DistributedDataParallel(
        model, bucket_cap_mb=ONE_BUCKET_MB if one_bucket else bucket_cap_mb, gradient_as_bucket_view=one_bucket
    )
    match hook.name:
        case "fp16":
            parallel.register_comm_hook(None, fp16_compress_hook)
        case "powersgd":
            parallel.register_comm_hook(_power_sgd(hook.value), powerSGD_hook)
        case "post-local":
            parallel.register_comm_hook(_own_gradients(), post_localSGD_hook)
            return parallel, PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(period=hook.value))
        case _:
            pass
    return parallel, optimizer


def _power_sgd(rank: int) -> PowerSGDState:
    return PowerSGDState(
        dist.group.WORLD,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=FIRST_COMPRESSED,
        orthogonalization_epsilon=EPSILON,
    )


def _own_gradients() -> PostLocalSGDState:
    """Gradients are never averaged; the averager agrees on the parameters."""
    return PostLocalSGDState(dist.group.WORLD, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)
