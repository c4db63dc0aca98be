"""`part`: the model becomes this rank's part of it, and the optimizers follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer

from gradwire.comm.world import World
from gradwire.core.plan import Plan
from gradwire.errors import UsageError
from gradwire.parallel.full_shard import FullShard
from gradwire.parallel.holding import keep
from gradwire.parallel.moved import exchange
from gradwire.parallel.split import decide, split
from gradwire.parallel.tensor import share

_PARTED: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True)
class Parted:
    """What was made of a model. groups: opened for it alone, by name. shard: what tells of sharded gradients."""

    groups: tuple[str, ...] = ()
    shard: FullShard | None = None


def part(model: nn.Module, optimizers: Sequence[Optimizer], world: World, plan: Plan, example: object) -> Parted:
    """Cut ``model`` along the axes of the world's mesh, in place; all ranks call it, with equal weights.

    In this order: where the stages begin is measured on the whole model; layers are shared along ``tensor``; blocks of other
    stages leave; what is left is sharded by rows along ``shard`` (parameters and gradients; the optimizer's state alone is
    `sync/owned.py`'s). Raises UsageError for a model that was cut before.
    """
    num_stages, num_shards, num_tensor = (world.mesh.length((axis,)) for axis in ("pipeline", "shard", "tensor"))
    sharded = num_shards > 1 and plan.sharding != "optimizer"
    if num_stages == num_tensor == 1 and not sharded:
        return Parted()
    if model in _PARTED:
        raise UsageError(
            "gw.distribute: this model was cut along the mesh by an earlier call, and cannot be cut again; build the model anew"
        )
    _PARTED.add(model)
    decision = decide(model, world, plan.pipeline, example) if num_stages > 1 else None
    if num_tensor > 1:
        exchange(optimizers, share(model, world.torch_mesh()["tensor"], plan.tensor_rules))
    groups: tuple[str, ...] = ()
    if num_stages > 1:
        groups = tuple(split(model, world, plan.pipeline, decision=decision).groups)
        keep(optimizers, model.parameters())
    if not sharded:
        return Parted(groups)
    shard = FullShard(model, world, reshard_after_forward=plan.sharding == "parameters", bucket_bytes=plan.bucket_bytes)
    exchange(optimizers, shard.replaced)
    return Parted((*groups, *shard.groups), shard)
