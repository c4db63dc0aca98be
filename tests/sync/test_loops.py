"""Loops that do not go straight: caught exceptions, kept gradients, skipped steps, modules used twice."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import gradwire as gw
from gradwire.comm.world import World
from gradwire.testing import RankError, run_ranks

BATCH = 8
torch.manual_seed(1)  # here, because ranks are threads and the generator is theirs together
MODEL = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).double()
X, Y = torch.randn(9 * BATCH, 5).double(), torch.randn(9 * BATCH, 2).double()


def setting(world: World, **more):
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = gw.DataLoader(TensorDataset(X, Y), BATCH, shuffle=False)
    gw.distribute(model, optimizer, loader, **more)
    return model, optimizer, loader


def weights(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def without(batch: int) -> Tensor:
    """One process that leaves one batch out."""
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in enumerate(zip(X.split(BATCH), Y.split(BATCH), strict=True)):
        if number != batch:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor):
        raise ValueError("out of memory")


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize(("accumulate", "part"), [(1, 0), (2, 0), (2, 1)])
def test_a_caught_exception_in_backward_costs_the_batch_on_all_ranks(
    num_ranks: int, everywhere: bool, accumulate: int, part: int
) -> None:
    def body(world: World) -> Tensor:
        model, optimizer, loader = setting(world, plan=gw.Plan(accumulate=accumulate))
        for x, y in loader:
            micro = loader.current
            assert micro is not None
            here = micro.step == 4 and micro.index == part and (everywhere or world.rank == world.size - 1)
            hidden = model[1](model[0](x))
            try:
                nn.functional.mse_loss(model[2](Raises.apply(hidden) if here else hidden), y).backward()
            except ValueError:
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    for own in run_ranks(num_ranks, body):
        torch.testing.assert_close(own, without(4), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_gradients_that_the_user_keeps_stay_what_they_were(num_ranks: int) -> None:
    def body(world: World) -> list[tuple[Tensor, Tensor]]:
        model, optimizer, loader = setting(world)
        kept = []
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            kept += [(param.grad, param.grad.clone()) for param in model.parameters() if param.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return kept

    for kept in run_ranks(num_ranks, body):
        assert len(kept) == 36
        assert all(torch.equal(grad, copied) for grad, copied in kept)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_module_in_two_checkpoints_is_exact_or_refused(reentrant: bool) -> None:
    def body(world: World) -> Tensor:
        torch.manual_seed(0)
        first, shared, last = (copy.deepcopy(part) for part in PARTS)
        model = nn.ModuleList([first, shared, last])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = gw.DataLoader(TensorDataset(X, Y), BATCH, shuffle=False)
        gw.distribute(model, optimizer, loader, plan=gw.Plan(bucket_bytes=8))
        for x, y in loader:
            hidden = first(x)
            for _ in range(2):
                hidden = checkpoint(lambda z: torch.tanh(shared(z)), hidden, use_reentrant=reentrant)
            nn.functional.mse_loss(last(hidden), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    if reentrant:
        with pytest.raises(RankError, match="use_reentrant=False"):
            run_ranks(2, body)
    else:
        (single,) = run_ranks(1, body)
        for own in run_ranks(2, body):
            torch.testing.assert_close(own, single, rtol=0, atol=1e-12)


PARTS = (nn.Linear(5, 6).double(), nn.Linear(6, 6).double(), nn.Linear(6, 2).double())


def test_ranks_may_make_different_numbers_of_local_backwards() -> None:
    def body(world: World) -> Tensor:
        model = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gw.distribute(model, optimizer)
        for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):
            with gw.no_sync():
                for _ in range(world.rank + 1):
                    nn.functional.mse_loss(model(x), y).backward()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    ranks = run_ranks(3, body)
    assert all(torch.equal(own, ranks[0]) for own in ranks)


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_a_scaler_may_leave_out_a_local_step_on_one_rank(batch: int) -> None:
    def body(world: World) -> Tensor:
        model, optimizer, loader = setting(world, sync="local:every=3,exact_steps=0")
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        for number, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y)
            if number == batch and world.rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return weights(model)

    ranks = run_ranks(2, body)
    assert torch.equal(ranks[0], ranks[1])
    assert bool(torch.isfinite(ranks[0]).all())


def test_what_is_not_a_state_is_refused_by_name() -> None:
    def body(world: World) -> None:
        model = copy.deepcopy(MODEL)
        training = gw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for wrong in ({}, None, model.state_dict()):
            with pytest.raises(gw.UsageError, match="lacks"):
                training.load_state_dict(wrong)  # pyright: ignore
        for wrong in (torch.ones(2), "3", True):
            with pytest.raises(gw.UsageError, match="must be one number"):
                gw.weight(wrong)  # pyright: ignore
        with pytest.raises(gw.UsageError, match="both given"):
            gw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=gw.Plan(sync="q8"), sync="q4")

    run_ranks(1, body)
