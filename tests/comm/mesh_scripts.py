"""What ranks do in test_torch_mesh.py: importable, since they are processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradwire.comm.world import World


def collectives(world: World) -> dict[str, list[float]]:
    mesh = world.torch_mesh()
    group, n = mesh["data"].get_group(), world.size
    mine = torch.tensor([world.rank + 1.0])
    total, biggest, rows, part = mine.clone(), mine.clone(), torch.zeros(n), torch.zeros(1)
    dist.all_reduce(total, group=group)
    dist.all_reduce(biggest, op=dist.ReduceOp.MAX, group=group)
    dist.all_gather_single(rows, mine, group=group)
    dist.reduce_scatter_single(part, rows * (world.rank + 1), group=group)
    first = mine.clone()
    dist.broadcast(first, src=0, group=group)
    return {
        "total": total.tolist(),
        "max": biggest.tolist(),
        "rows": rows.tolist(),
        "part": part.tolist(),
        "first": first.tolist(),
    }


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def batch() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradients(of: nn.Module) -> list[list[float]]:
    found = [param.grad for param in of.parameters() if param.grad is not None]
    return [(grad.full_tensor() if isinstance(grad, DTensor) else grad).flatten().tolist() for grad in found]


def tensor_parallel(world: World) -> list[list[float]]:
    net = model()
    parallelize_module(net, world.torch_mesh()["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    net(batch()).sum().backward()
    return gradients(net)


def fully_sharded(world: World) -> list[list[float]]:
    net, mesh = model(), world.torch_mesh()["shard"]
    fully_shard(net, mesh=mesh)
    net(batch()).sum().backward()
    return gradients(net)


def norm_of_sharded(world: World) -> float:
    """cases.md 21 without the replicated one: 3 on one rank, 4 on the other."""
    param = nn.Parameter(distribute_tensor(torch.zeros(2), world.torch_mesh()["shard"], [Shard(0)]))
    param.grad = distribute_tensor(torch.tensor([3.0, 4.0]), world.torch_mesh()["shard"], [Shard(0)])
    total = nn.utils.clip_grad_norm_([param], 1.0)
    assert isinstance(total, DTensor)
    return float(total.full_tensor())
