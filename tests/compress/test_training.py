"""A model trained with each codec learns what the exact one does, with the same weights on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.comm.world import World
from gradwire.testing import run_ranks

STEPS = 60


def train(sync: str, num_ranks: int, *, spoiled_step: int = -1) -> list[tuple[float, Tensor]]:
    """(last loss, weights) of every rank after ``STEPS`` full-batch steps on a linear teacher."""

    def body(world: World) -> tuple[float, Tensor]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(96, 64, generator=generator)
        wanted = inputs @ torch.randn(64, 48, generator=generator) / 8
        model = nn.Linear(64, 48)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
        gw.distribute(model, optimizer)
        mine = slice(world.rank, None, world.size)
        loss = torch.zeros(())
        for step in range(STEPS):
            loss = (model(inputs[mine]) - wanted[mine]).square().mean()
            optimizer.zero_grad()
            (loss * float("nan") if step == spoiled_step and world.rank == 0 else loss).backward()
            optimizer.step()
        return loss.item(), model.weight.detach().clone()

    return run_ranks(num_ranks, body, plan=gw.Plan(sync=sync))


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    "sync", ["bf16", "q8", "q4", "q4:exact_steps=5", "lowrank:rank=8", "topk:ratio=0.2", "sampled:ratio=0.5"]
)
def test_training_through_a_codec_reaches_the_exact_loss(sync: str, num_ranks: int) -> None:
    exact, coded = train("exact", num_ranks), train(sync, num_ranks)
    assert all(torch.equal(weight, coded[0][1]) for _, weight in coded)
    start = 1.0  # the loss at zero weights is the teacher's variance, about 1
    assert max(loss for loss, _ in coded) < max(loss for loss, _ in exact) + 0.02 * start


@pytest.mark.parametrize("sync", ["q4", "lowrank:rank=8"])
def test_a_step_with_a_nan_is_forgotten_by_the_residuals(sync: str) -> None:
    coded = train(sync, 3, spoiled_step=20)
    assert all(torch.equal(weight, coded[0][1]) for _, weight in coded)
    assert coded[0][1].isfinite().all() and coded[0][0] < 0.1
