"""What ranks do in test_resume.py: importable, since they are processes (each with generators of its own)."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

import gradwire as gw
from gradwire.checkpoint.api import load, save
from gradwire.comm.world import World


class Run:
    """A training whose next step depends on everything that a checkpoint must keep."""

    def __init__(self, sync: str, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Dropout(0.2), nn.Linear(40, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        data = torch.randn(60, 40, generator=torch.Generator().manual_seed(5))
        self.loader = gw.DataLoader(torch.utils.data.TensorDataset(data), batch_size=12, seed=3)
        self.training = gw.distribute(self.model, self.optimizer, self.loader, sync=sync)

    def objects(self) -> dict[str, object]:
        return {
            "model": self.model, "optimizer": self.optimizer, "loader": self.loader, "training": self.training,
            "scheduler": self.scheduler,
        }  # fmt: skip

    def train(self, steps: int, save_at: int = -1, folder: str = "") -> None:
        """Across the ends of epochs (5 batches each). save_at: with so many steps still to go."""
        while steps:
            for (x,) in self.loader:
                self.optimizer.zero_grad()
                noise = random.random() + float(np.random.rand())
                (self.model(x) - noise).square().mean().backward()
                self.optimizer.step()
                self.scheduler.step()
                steps -= 1
                if steps == save_at:
                    save(folder, **self.objects(), to_go=steps)  # type: ignore[arg-type]
                if not steps:
                    break

    def facts(self) -> list[object]:
        """Everything, to the bit, as plain values."""
        tensors = [*self.model.state_dict().values()]
        tensors += [value for param in self.model.parameters() for value in self.optimizer.state[param].values()]
        told = [tensor.double().flatten().tolist() for tensor in tensors]
        return [told, self.scheduler.get_last_lr(), random.random(), float(np.random.rand()), float(torch.rand(1))]


def uninterrupted(world: World, syncs: list[str], folder: str) -> list[list[object]]:
    found: list[list[object]] = []
    for sync in syncs:
        run = Run(sync, seed=world.rank)
        run.train(17, save_at=9, folder=f"{folder}/{sync}")
        found.append(run.facts())
    return found


def resumed(world: World, syncs: list[str], folder: str) -> list[list[object]]:
    found: list[list[object]] = []
    for sync in syncs:
        run = Run(sync, seed=100 + world.rank)
        assert load(f"{folder}/{sync}", **run.objects()) == {"to_go": 9}  # type: ignore[arg-type]
        run.train(9)
        found.append(run.facts())
    return found


def elsewhere(world: World, syncs: list[str], folder: str) -> list[bool]:
    """In a world of another size: it loads, the replicas are the same after a few steps, and nothing is NaN."""
    return [_replicas_agree(run_of, world) for run_of in (_loaded(sync, folder, world) for sync in syncs)]


def _loaded(sync: str, folder: str, world: World) -> Run:
    run = Run(sync, seed=200 + world.rank)
    load(f"{folder}/{sync}", **run.objects())  # type: ignore[arg-type]
    run.train(4)
    run.training.agree()
    return run


def _replicas_agree(run: Run, world: World) -> bool:
    flat = torch.cat([param.detach().flatten() for param in run.model.parameters()])
    rows = world.group("data").all_gather(flat)
    return bool(torch.isfinite(rows).all()) and bool((rows == rows[0]).all())
