"""Every plan, every model, several world sizes: the weights of one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from gradwire.testing import run_ranks
from tests.conformance.models import CASES, Case
from tests.conformance.plans import ROWS, Row
from tests.conformance.training import Weights, largest_difference, relative_difference, train, truth


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    # Some gradients are zero but for rounding (a bias before BatchNorm, an attention key's); Adam's default epsilon of
    # 1e-8 would blow that noise up to whole steps, in one process too.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


cached_truth = cache(truth)


def agree(case: Case, make, dtype: torch.dtype, row: Row, num_ranks: int) -> tuple[list[Weights], Weights]:
    ranks = run_ranks(num_ranks, lambda world: train(case, make, dtype, row, world))
    for other in ranks[1:]:
        for name, value in other.items():
            assert torch.equal(value, ranks[0][name]), f"{name} differs between replicas"
    return ranks, cached_truth(case, make, dtype, row.plan.accumulate)


GRID = [
    pytest.param(row, case, num_ranks, id=f"{row.name}-{case.name}-{num_ranks}")
    for row in ROWS
    for case in CASES
    for num_ranks in row.world_sizes
]


@pytest.mark.parametrize(("row", "case", "num_ranks"), GRID)
def test_float64_weights_equal_one_process(row: Row, case: Case, num_ranks: int) -> None:
    ranks, single = agree(case, sgd, torch.float64, row, num_ranks)
    assert largest_difference(ranks[0], single) < 1e-12


@pytest.mark.parametrize(("row", "case", "num_ranks"), [each for each in GRID if each.values[2] in (2, 3)])
def test_float32_weights_equal_one_process(row: Row, case: Case, num_ranks: int) -> None:
    ranks, single = agree(case, sgd, torch.float32, row, num_ranks)
    assert relative_difference(ranks[0], single) < 1e-6


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("make", [sgd, adam])
def test_one_rank_is_plain_pytorch_to_the_bit(case: Case, make) -> None:
    if case.name == "sparse" and make is adam:
        pytest.skip("AdamW takes no sparse gradients")
    for dtype in (torch.float32, torch.float64):
        (ours,), single = agree(case, make, dtype, ROWS[0], 1)
        assert all(torch.equal(ours[name], value) for name, value in single.items())


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("case", [case for case in CASES if case.name != "sparse"], ids=lambda case: case.name)
def test_adam_equals_one_process(case: Case, num_ranks: int) -> None:
    ranks, single = agree(case, adam, torch.float64, ROWS[0], num_ranks)
    assert largest_difference(ranks[0], single) < 1e-12
