"""One rank's peak memory for a model of 200 MB with Adam: run by test_full_shard_memory.py, alone or as one of two ranks."""

from __future__ import annotations

import resource

import torch
from torch import nn

from gradwire.comm.world import World
from gradwire.parallel.full_shard import FullShard

LAYERS, WIDTH, BATCH = 50, 1024, 256


def train(world: World | None) -> tuple[float, float]:
    """Peak bytes above what the process held before the model, and the model's bytes."""
    torch.set_num_threads(1)
    nn.Linear(8, 8)(torch.ones(8, 8)).sum().backward()
    before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(LAYERS):
        model.extend([nn.Linear(WIDTH, WIDTH), nn.ReLU()])
    whole = sum(param.nbytes for param in model.parameters())
    if world is not None:
        FullShard(model, world, reshard_after_forward=True)
        world.group("shard").barrier()
        try:
            open("/proc/self/clear_refs", "w").write("5")  # the peak of training, not of building the whole model
        except OSError:
            pass
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(BATCH if world is None else BATCH // world.size, WIDTH)).sum().backward()
        optimizer.step()
    high = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(high.split()[1]) * 1024 - before, whole
