"""Twenty steps, twice: plain PyTorch in one process, which is the truth, and gradwire on a rank of a world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gradwire as gw
from gradwire.comm.world import World
from tests.conformance.models import LOSS, Case
from tests.conformance.plans import Row

NUM_EPOCHS = 2
BATCH_SIZE = 12
NUM_SAMPLES = 9 * BATCH_SIZE + 2  # ten steps an epoch; the last batch has two samples, so ranks 2 and 3 have none

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Weights = dict[str, Tensor]


def micro_batches(x: Tensor, y: Tensor, accumulate: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The window's parts, as the definition has it: even, larger ones first, never empty."""
    parts = min(accumulate, len(x))
    yield from zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)


def clip(case: Case, model: nn.Module) -> None:
    if case.clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)


def truth(case: Case, make: MakeOptimizer, dtype: torch.dtype, accumulate: int) -> Weights:
    """Plain PyTorch."""
    model = case.model(dtype).train()
    optimizer = make(model)
    x, y = case.data(NUM_SAMPLES, dtype)
    for _ in range(NUM_EPOCHS):
        for batch_x, batch_y in zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True):
            for micro_x, micro_y in micro_batches(batch_x, batch_y, accumulate):
                share = len(micro_x) / len(batch_x)
                loss = LOSS(model(micro_x), micro_y)
                (loss * share if accumulate > 1 else loss).backward()
            clip(case, model)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def train(case: Case, make: MakeOptimizer, dtype: torch.dtype, row: Row, world: World) -> Weights:
    """The same loop with gradwire's lines in it; rank 0's weights win, so others start elsewhere."""
    model = case.model(dtype).train()
    if world.rank:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
    optimizer = make(model)
    shares = [rank + 1.0 for rank in range(world.size)]
    split = gw.Random(fractions=[share / sum(shares) for share in shares]) if row.unequal else gw.Uniform()
    loader = gw.DataLoader(TensorDataset(*case.data(NUM_SAMPLES, dtype)), BATCH_SIZE, split=split, shuffle=False)
    gw.distribute(model, optimizer, loader, plan=replace(row.plan, batch_norm=case.batch_norm))
    for _ in range(NUM_EPOCHS):
        for x, y in loader:
            LOSS(model(x), y).backward()
            clip(case, model)
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def weights(model: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def largest_difference(ours: Weights, theirs: Weights) -> float:
    """Over tensors: the largest difference, beside the tensor's largest value where that is above 1."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - value).abs().max() / max(value.abs().max(), 1)) for name, value in theirs.items())


def relative_difference(ours: Weights, theirs: Weights) -> float:
    """Euclidean length of the difference of all weights, beside that of the weights."""
    assert ours.keys() == theirs.keys()
    pairs = [(ours[name].double().flatten(), value.double().flatten()) for name, value in theirs.items()]
    mine, other = torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])
    return float((mine - other).norm() / other.norm())
