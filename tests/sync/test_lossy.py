"""Lossy plans through the user's loop: replicas stay equal, the loss falls, a NaN leaves no trace, a resume goes on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gradwire as gw
from gradwire.comm.world import World
from gradwire.testing import run_ranks

BATCH = 16
NUM_BATCHES = 12
SYNCS = [
    "bf16",
    "q8",
    "q4",
    "lowrank:rank=2",
    "topk:ratio=0.1",
    "sampled:ratio=0.25",
    "q4:exact_steps=3",
    "accumulate:every=2,codec=q4",
    "delayed:codec=q4",
    "local:every=3,codec=q4,exact_steps=2",
    "local:every=4,codec=lowrank(rank=2),exact_steps=0,fragments=2",
    "local:every=3,codec=topk(ratio=0.2),exact_steps=0",
]

torch.manual_seed(1)  # here, because ranks are threads and the generator is theirs together
MODEL = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 40))
TEACHER = nn.Linear(20, 40)
X = torch.randn(BATCH * NUM_BATCHES, 20)
Y = TEACHER(X).detach()


def setting(sync: str, bucket_bytes: int | None = None):
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = gw.DataLoader(TensorDataset(X, Y), BATCH, shuffle=False)
    training = gw.distribute(model, optimizer, loader, plan=gw.Plan(sync=sync, bucket_bytes=bucket_bytes))
    return model, optimizer, loader, training


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_replicas_stay_equal_and_the_loss_falls(sync: str, num_ranks: int) -> None:
    def body(world: World) -> tuple[list[float], list[Tensor]]:
        model, optimizer, loader, _ = setting(sync)
        losses = [step(model, optimizer, x, y) for _ in range(2) for x, y in loader]
        return losses, weights(model)

    ranks = run_ranks(num_ranks, body)
    if not sync.startswith("local"):
        assert all(equal(own, ranks[0][1]) for _, own in ranks)
    losses = ranks[0][0]
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])


@pytest.mark.parametrize("sync", [sync for sync in SYNCS if not sync.startswith("accumulate")])  # that, one does too
def test_one_process_is_plain_pytorch_to_the_bit(sync: str) -> None:
    def body(world: World) -> list[Tensor]:
        model, optimizer, loader, _ = setting(sync)
        for x, y in loader:
            step(model, optimizer, x, y)
        return weights(model)

    (ours,) = run_ranks(1, body)
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in zip(X.split(BATCH), Y.split(BATCH), strict=True):
        step(model, optimizer, x, y)
    assert equal(ours, weights(model))


@pytest.mark.parametrize("sync", ["q4", "q8", "lowrank:rank=2", "topk:ratio=0.1"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_nan_on_one_rank_leaves_no_trace_in_residuals_or_weights(sync: str, num_ranks: int) -> None:
    def body(world: World) -> list[Tensor]:
        model, optimizer, loader, training = setting(sync)
        for number, (x, y) in enumerate(loader):
            before, kept = weights(model), training.state_dict()["gradients"]["reducers"]
            poison = number == 5 and world.rank == 1
            step(model, optimizer, x * (float("nan") if poison else 1.0), y)
            if number == 5:
                after = training.state_dict()["gradients"]["reducers"]
                assert equal(before, weights(model))
                for old, new in zip(kept, after, strict=True):
                    assert all(torch.equal(value, new[name]) for name, value in old.items())
        return weights(model)

    ranks = run_ranks(num_ranks, body)
    assert all(equal(own, ranks[0]) for own in ranks)
    assert all(bool(torch.isfinite(value).all()) for value in ranks[0])


@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_resumed_run_goes_on_with_the_same_bits(sync: str, num_ranks: int) -> None:
    def body(world: World) -> tuple[list[Tensor], list[Tensor]]:
        model, optimizer, loader, training = setting(sync)
        kept = None
        for number, (x, y) in enumerate(loader):
            step(model, optimizer, x, y)
            if number == 6:
                parts = (model, optimizer, loader, training)
                kept = copy.deepcopy([part.state_dict() for part in parts])
        assert kept is not None
        resumed, optimizer, loader, training = setting(sync)
        for part, state in zip((resumed, optimizer, loader, training), kept, strict=True):
            part.load_state_dict(state)  # pyright: ignore
        for x, y in loader:
            step(resumed, optimizer, x, y)
        return weights(model), weights(resumed)

    for through, resumed in run_ranks(num_ranks, body):
        assert equal(through, resumed)


@pytest.mark.parametrize(("old", "new"), [(2, 3), (3, 2), (4, 2)])
def test_what_had_still_to_be_sent_is_shared_out_to_another_world_size(old: int, new: int) -> None:
    def residual(world: World, training: gw.Distributed) -> Tensor:
        states = training.state_dict()["gradients"]["reducers"]
        own = torch.cat(
            [torch.stack([value.sum() for value in state.values()]).sum()[None] for state in states if state]
        )
        return world.sum(own.sum().double())

    def before(world: World):
        model, optimizer, loader, training = setting("q4", bucket_bytes=1 << 20)
        for x, y in loader:
            step(model, optimizer, x, y)
        return training.state_dict(), residual(world, training)

    kept = run_ranks(old, before)

    def after(world: World) -> Tensor:
        *_, training = setting("q4", bucket_bytes=1 << 20)
        training.load_state_dict(*(state for state, _ in kept))
        return residual(world, training)

    for whole in run_ranks(new, after):
        assert float(whole) == pytest.approx(float(kept[0][1]), rel=1e-4, abs=1e-6)
