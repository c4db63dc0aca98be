"""Weights that are loaded into a model which is being trained already."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.comm.world import World
from gradwire.testing import RankError, run_ranks

LOCAL = "local:every=2,exact_steps=0,lr=0.7,momentum=0.5"
SYNCS = ["exact", "q4", "delayed", LOCAL, f"{LOCAL},late=1", f"{LOCAL},fragments=2"]


def start(sync: str, lr: float = 0.0) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 1))
    for param in model.parameters():
        nn.init.constant_(param, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    gw.distribute(model, optimizer, sync=sync)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, world: World, steps: int) -> None:
    for step in range(steps):
        data = torch.full((4, 40), 1.0 + world.rank + step)
        model(data).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def constant(model: nn.Module, value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, value) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("sync", SYNCS)
def test_loaded_weights_stay_when_nothing_moves_them(sync: str) -> None:
    def body(world: World) -> list[Tensor]:
        model, optimizer = start(sync)
        train(model, optimizer, world, 3)
        model.load_state_dict(constant(model, 5.0))
        train(model, optimizer, world, 5)
        model[1].load_state_dict(constant(model[1], 7.0))
        train(model, optimizer, world, 5)
        return [param.detach().unique() for param in model.parameters()]

    for values in run_ranks(2, body):
        assert torch.equal(torch.cat(values), torch.tensor([5.0, 5.0, 7.0, 7.0]))


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("by", [None, 1])
def test_ranks_that_load_different_weights_are_told(sync: str, by: int | None) -> None:
    def body(world: World) -> None:
        model, optimizer = start(sync)
        train(model, optimizer, world, 3)
        if by is None:
            model.load_state_dict(constant(model, 2.0 + world.rank))
        elif world.rank == by:
            model.load_state_dict(constant(model, 5.0))
        train(model, optimizer, world, 4)

    said = "ranks 0 and 1 have other weights" if by is None else "rank 0's weights have not changed"
    with pytest.raises(RankError, match=said):
        run_ranks(2, body)


@pytest.mark.parametrize("sync", [LOCAL, f"{LOCAL},late=1"])
def test_weights_that_are_put_back_were_never_away(sync: str) -> None:
    def body(world: World, *, swap: bool) -> Tensor:
        model, optimizer = start(sync, lr=0.01)
        for _ in range(4):
            train(model, optimizer, world, 3)
            if swap:
                own = copy.deepcopy(model.state_dict())
                model.load_state_dict(constant(model, 9.0))
                model.load_state_dict(own)
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    swapped = run_ranks(2, lambda world: body(world, swap=True))
    assert all(map(torch.equal, swapped, run_ranks(2, lambda world: body(world, swap=False))))


@pytest.mark.parametrize("sync", SYNCS)
def test_loaded_weights_may_be_agreed_at_once(sync: str) -> None:
    def body(world: World) -> Tensor:
        model = nn.Linear(40, 40)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        training = gw.distribute(model, optimizer, sync=sync)
        train(model, optimizer, world, 5)
        model.load_state_dict(constant(model, 5.0))
        training.agree()
        return model.weight.detach().unique()

    for found in run_ranks(2, body):
        assert torch.equal(found, torch.tensor([5.0]))


def test_parameters_that_are_replaced_by_a_load_are_refused() -> None:
    def body(world: World) -> None:
        model, _ = start("exact")
        model.load_state_dict(constant(model, 5.0), assign=True)

    with pytest.raises(RankError, match="without assign=True"):
        run_ranks(2, body)


def test_a_delayed_gradient_is_no_answer_to_a_closure() -> None:
    def body(world: World) -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(model.parameters())
        gw.distribute(model, optimizer, sync="delayed")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    with pytest.raises(RankError, match="delayed gradients belong to another loss"):
        run_ranks(2, body)


def test_a_part_of_one_sample_is_refused_with_the_cure() -> None:
    def body(world: World) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        gw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.eval()(torch.ones(1, 3))
        model.train()(torch.ones(1, 3))

    with pytest.raises(RankError, match=r"BatchNorm layer '1': .* use Plan\(batch_norm=\"sync\"\)"):
        run_ranks(2, body)
