"""Local steps from the user's side: agreeing early, several optimizers, skipped steps, other world sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gradwire as gw
from gradwire.comm.world import World
from gradwire.errors import UsageError
from gradwire.testing import run_ranks

AVERAGING = "lr=1,momentum=0,exact_steps=0"
torch.manual_seed(2)  # here, because ranks are threads and the generator is theirs together
MODEL = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Linear(64, 40))
X, Y = torch.randn(96, 20), torch.randn(96, 40)


def setting(sync: str):
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = gw.DataLoader(TensorDataset(X, Y), 12, shuffle=False)
    return model, optimizer, loader, gw.distribute(model, optimizer, loader, sync=sync)


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], loader: Any) -> None:
    for x, y in loader:
        nn.functional.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def state_of(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "sync",
    [
        "exact",
        "local:every=3,codec=q4,exact_steps=0",
        "local:every=5,fragments=2,late=2,exact_steps=0",
        "local:every=50",
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_agreeing_before_the_time_makes_replicas_equal(sync: str, num_ranks: int) -> None:
    def body(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer, loader, training = setting(sync)
        train(model, [optimizer], loader)
        before = weights(model)
        training.agree()
        agreed = state_of(model)
        train(model, [optimizer], loader)  # and training goes on
        training.agree()
        assert equal(state_of(model), [world.group().broadcast(value.clone()) for value in state_of(model)])
        return before, agreed

    ranks = run_ranks(num_ranks, body)
    assert all(equal(agreed, ranks[0][1]) for _, agreed in ranks)
    if sync.startswith("local:every=3") and num_ranks > 1:
        assert not equal(ranks[0][0], ranks[1][0])


@pytest.mark.parametrize("in_order", [True, False])
def test_with_several_optimizers_the_last_to_step_ends_the_step(in_order: bool) -> None:
    def body(world: World) -> list[bool]:
        model = copy.deepcopy(MODEL)
        first = torch.optim.SGD(model[0].parameters(), lr=0.05)
        second = torch.optim.AdamW([*model[1].parameters(), *model[2].parameters()], lr=0.01)
        gw.distribute(model, [first, second], sync=f"local:every=4,{AVERAGING}")
        same = []
        for batch in range(8):
            rows = slice(batch * 8 + world.rank * 4, batch * 8 + world.rank * 4 + 4)
            nn.functional.mse_loss(model(X[rows]), Y[rows]).backward()
            for optimizer in (first, second) if in_order else (second, first):
                optimizer.step()
                optimizer.zero_grad()
            same.append(equal(weights(model), [world.group().broadcast(value.clone()) for value in weights(model)]))
        assert world.step == 8
        return same

    for rank in run_ranks(2, body)[1:]:
        assert rank == [False, False, False, True] * 2


def test_optimizers_that_take_turns_need_the_loader_under_local_steps() -> None:
    def body(world: World) -> bool:
        model = copy.deepcopy(MODEL)
        first = torch.optim.SGD(model[0].parameters(), lr=0.05)
        second = torch.optim.SGD(model[2].parameters(), lr=0.05)
        gw.distribute(model, [first, second], sync=f"local:every=2,{AVERAGING}")
        nn.functional.mse_loss(model(X[:4]), Y[:4]).backward()
        first.step()
        with pytest.raises(UsageError, match=r"give gw\.distribute the loader"):
            nn.functional.mse_loss(model(X[:4]), Y[:4]).backward()
        return True

    assert all(run_ranks(2, body))


def test_optimizers_that_take_turns_count_each_step() -> None:
    def body(world: World) -> int:
        model = copy.deepcopy(MODEL)
        first = torch.optim.SGD(model[0].parameters(), lr=0.05)
        second = torch.optim.SGD(model[2].parameters(), lr=0.05)
        gw.distribute(model, [first, second])
        for optimizer in (first, second, first, second, first):
            nn.functional.mse_loss(model(X[:4]), Y[:4]).backward()
            optimizer.step()
            model.zero_grad()
        return world.step

    assert run_ranks(2, body) == [4, 4], "the last one ends with the next backward"


def test_a_step_skipped_on_one_rank_is_told_there_and_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    def body(world: World) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        gw.distribute(model, optimizer, sync=f"local:every=2,{AVERAGING}")
        for turn in range(2):
            loss = -(model(torch.ones(10, 1)).mean()) * (float("nan") if (world.rank, turn) == (1, 0) else 1.0)
            gw.weight(10)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return float(model.weight.detach())

    # rank 0 went to 2 on 20 samples, rank 1 to 1 on 10
    assert run_ranks(2, body) == pytest.approx([5 / 3, 5 / 3])
    told = capsys.readouterr().err
    assert told.count("skipped on rank 1 alone") == 1
    assert "rank 1: weight" in told


SIZES = [(1, 2), (1, 3), (2, 1), (3, 1), (2, 3)]


@pytest.mark.parametrize("sync", ["exact", "q4", "lowrank", "accumulate:every=3", "delayed:codec=q4", "delayed"])
@pytest.mark.parametrize(("old", "new"), SIZES)
def test_any_world_size_may_go_on(sync: str, old: int, new: int) -> None:
    kept = run_ranks(old, lambda world: _trained(sync))

    def after(world: World) -> list[Tensor]:
        parts = setting(sync)
        _load(parts, kept, world)
        train(parts[0], [parts[1]], parts[2])
        return weights(parts[0])

    ranks = run_ranks(new, after)
    assert all(equal(own, ranks[0]) for own in ranks)
    assert all(bool(value.isfinite().all()) for value in ranks[0])


@pytest.mark.parametrize(("old", "new"), SIZES)
def test_local_steps_go_on_from_the_mean_of_the_ranks(old: int, new: int) -> None:
    sync = "local:every=3,codec=q4,exact_steps=0,fragments=2"
    kept = run_ranks(old, lambda world: _trained(sync))
    means = [torch.stack(values).mean(0) for values in zip(*(weights for *_, weights in kept), strict=True)]

    def after(world: World) -> list[Tensor]:
        parts = setting(sync)
        _load(parts, kept, world)
        start = weights(parts[0])
        train(parts[0], [parts[1]], parts[2])
        parts[3].agree()
        assert equal(weights(parts[0]), [world.group().broadcast(value.clone()) for value in weights(parts[0])])
        return start

    for start in run_ranks(new, after):
        for own, mean in zip(start, means, strict=True):
            torch.testing.assert_close(own, mean, rtol=1e-6, atol=1e-7)


def _trained(sync: str):
    parts = setting(sync)
    model, optimizer, loader, training = parts
    train(model, [optimizer], loader)
    states = [training.state_dict(), *(copy.deepcopy(part.state_dict()) for part in (model, optimizer))]
    return *states, weights(model)


def _load(parts: Any, kept: list[Any], world: World) -> None:
    model, optimizer, _, training = parts
    model.load_state_dict(kept[0][1])
    optimizer.load_state_dict(copy.deepcopy(kept[0][2]))
    training.load_state_dict(*copy.deepcopy([each[0] for each in kept]))
