"""What a distributed model opened is closed when it is distributed again, or is gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.comm.traced import Unstamped, blame
from gradwire.comm.world import World
from gradwire.testing import run_ranks

PLANS = {
    "plain": gw.Plan(),
    "late": gw.Plan(sync="local:every=2,late=1"),
    "delayed": gw.Plan(sync="delayed"),
    "batch norm": gw.Plan(batch_norm="sync"),
}


class Net(nn.Module):
    """With a buffer of its own, which what agrees on buffers must not keep alive."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.layers(x)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(2 * step + rank))).mean().backward()
        optimizer.step()


def held() -> dict[str, int]:
    """What this process holds now."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared maps": sum("memfd:gradwire" in line for line in Path("/proc/self/maps").read_text().splitlines()),
    }


def again(plan: gw.Plan, world: World) -> Callable[[], None]:
    model = Net()
    optimizer = sgd(model)
    kept = []  # what it returns need not be thrown away

    def turn() -> None:
        kept[:] = [*kept[-3:], gw.distribute(model, optimizer, plan=plan)]
        train(model, optimizer, world.rank)

    return turn


def anew(plan: gw.Plan, world: World) -> Callable[[], None]:
    def turn() -> None:
        model = Net()
        optimizer = sgd(model)
        gw.distribute(model, optimizer, plan=plan)
        train(model, optimizer, world.rank)

    return turn


def growth(way: Callable[[gw.Plan, World], Callable[[], None]], plan: gw.Plan, world: World) -> dict[str, int]:
    turn = way(plan, world)
    for _ in range(6):
        turn()
    before = held()
    for _ in range(20):
        turn()
    return {name: count - before[name] for name, count in held().items()}


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("way", [again, anew])
def test_twenty_more_models_hold_no_more_of_the_system(way, plan: gw.Plan) -> None:
    for grown in run_ranks(2, partial(growth, way, plan), processes=True):
        # Threads and connections end a moment after they are let go of; a leak would be 5 or more a model.
        assert all(count < 20 for count in grown.values()), grown


def test_a_list_of_models_made_on_the_way_stays_distributed_while_they_live() -> None:
    def run(world: World) -> list[float]:
        model, other = nn.Linear(2, 1), nn.Linear(2, 1)
        optimizer = sgd(model)
        gw.distribute(nn.ModuleList([model]), optimizer)
        gw.distribute(other, sgd(other))
        model(torch.full((1, 2), float(world.rank))).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.flatten().tolist()

    assert run_ranks(3, run) == [[1.0, 1.0]] * 3


def test_ranks_may_let_go_at_different_times() -> None:
    def run(world: World) -> int:
        kept: list[object] = []
        for turn in range(6):
            model = Net()
            optimizer = sgd(model)
            gw.distribute(model, optimizer, plan=PLANS["delayed"])
            train(model, optimizer, world.rank)
            if turn % 3 == world.rank:
                kept.append(model)
        return len(kept)

    assert run_ranks(3, run) == [2, 2, 2]


@pytest.mark.parametrize("second", [gw.Plan(), gw.Plan(batch_norm="sync")])
def test_synchronised_layers_go_on_when_the_model_is_distributed_again(second: gw.Plan) -> None:
    def run(world: World) -> Tensor:
        torch.manual_seed(0)
        model = Net()
        for plan in (gw.Plan(batch_norm="sync"), second, second):
            gw.distribute(model, optimizer := sgd(model), plan=plan)
            train(model, optimizer, world.rank)
        return nn.utils.parameters_to_vector([*model.parameters(), *model.layers[1].buffers()]).detach()

    first, *others = run_ranks(2, run)
    assert all(torch.equal(first, other) for other in others)


def test_a_closed_group_says_why_it_is() -> None:
    def run(world: World) -> str:
        model = nn.Linear(2, 1)
        gw.distribute(model, sgd(model))
        group = world.group("data", channel="gradients0.0")
        gw.distribute(model, sgd(model))
        with pytest.raises(gw.UsageError) as caught:
            group.barrier()
        return str(caught.value)

    assert (
        run_ranks(2, run) == ["data/gradients0.0 is closed: its model was given to gw.distribute again, or is gone"] * 2
    )


def test_too_many_open_files_names_the_limit_and_the_cure() -> None:
    error = blame(
        RuntimeError("epoll_create: Too many open files"), Unstamped(), "rank 0 on here was opening data/main"
    )
    assert isinstance(error, gw.LaunchError)
    assert "rank 0 on here was opening data/main when its process had no file descriptor left" in str(error)
    assert "ulimit -n" in str(error)
