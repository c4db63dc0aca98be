"""`LowRank` against exact low-rank matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.comm.gloo import SoloGroup
from gradwire.comm.world import World
from gradwire.testing import run_ranks
from tests.compress.buckets import CountingGroup, bucket_of, normal

ROWS, COLS = 60, 45


def low_rank(rank: int, seed: int) -> Tensor:
    return normal(ROWS * rank, seed).view(ROWS, rank) @ normal(rank * COLS, seed + 1).view(rank, COLS)


def run(reducer: gw.LowRank, matrix: Tensor, steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    group, given = SoloGroup("solo"), []
    bucket = bucket_of(matrix.flatten().clone(), (ROWS, COLS))
    state = reducer.init(bucket, group)
    for step in range(steps):
        mean, state = reducer.reduce(bucket_of(matrix.flatten().clone(), (ROWS, COLS)), state, group, step)
        given.append(mean.view(ROWS, COLS))
    return given, dict(state)


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_a_matrix_of_that_rank_has_arrived_whole_after_every_second_step(rounds: int) -> None:
    """After an even step L spans the matrix's columns, so the odd one sends all that was left."""
    matrix = low_rank(3, 1)
    given, state = run(gw.LowRank(rank=3), matrix, 2 * rounds)
    torch.testing.assert_close(sum(given), 2 * rounds * matrix, rtol=1e-4, atol=1e-3)  # float32, numbers up to 100
    assert state["residual"].abs().max() < 1e-3


def test_a_full_matrix_arrives_in_time_by_feedback() -> None:
    matrix = normal(ROWS * COLS, 5).view(ROWS, COLS)
    given, state = run(gw.LowRank(rank=2), matrix, 200)
    error = torch.linalg.norm(sum(given) / 200 - matrix) / torch.linalg.norm(matrix)
    assert error < 0.25
    torch.testing.assert_close(sum(given) + state["residual"].view(ROWS, COLS), 200 * matrix, rtol=1e-4, atol=1e-2)


def test_zeros_stay_zero_and_the_factors_recover_from_them() -> None:
    reducer, group, matrix = gw.LowRank(rank=2), SoloGroup("solo"), low_rank(2, 3)
    zeros = torch.zeros(ROWS * COLS)
    state = reducer.init(bucket_of(zeros, (ROWS, COLS)), group)
    for step in range(4):
        mean, state = reducer.reduce(bucket_of(zeros.clone(), (ROWS, COLS)), state, group, step)
        assert not mean.any()
    total = torch.zeros_like(zeros)
    for step in range(4, 8):
        mean, state = reducer.reduce(bucket_of(matrix.flatten().clone(), (ROWS, COLS)), state, group, step)
        total += mean
    torch.testing.assert_close(total.view(ROWS, COLS), 4 * matrix, rtol=1e-3, atol=1e-2)


def test_one_all_reduce_a_step_carries_factors_and_what_travels_exact() -> None:
    numel = ROWS * COLS + 7

    def body(world: World) -> tuple[list[str], float, bool]:
        reducer, group = gw.LowRank(rank=2), CountingGroup(world.group())
        flat = normal(numel, world.rank)
        state = reducer.init(bucket_of(flat, (ROWS, COLS), (7,)), group)
        mean, state = reducer.reduce(bucket_of(flat.clone(), (ROWS, COLS), (7,)), state, group, 0)
        exact = sum(normal(numel, rank)[-7:] for rank in range(world.size))
        same = torch.allclose(mean[-7:], exact, rtol=1e-6, atol=1e-6) and not state["residual"][-7:].any()
        return group.calls, group.sent, same

    sent = 4 * (2 * ROWS + 7) * 2 * 2 / 3
    assert run_ranks(3, body) == [(["all_reduce"], pytest.approx(sent), True)] * 3


def test_the_first_factors_are_the_same_on_all_ranks_and_differ_between_matrices() -> None:
    bucket = bucket_of(torch.zeros(2 * ROWS * COLS), (ROWS, COLS), (ROWS, COLS))
    states = run_ranks(2, lambda world: gw.LowRank(rank=2).init(bucket, world.group()))
    assert torch.equal(states[0]["left"], states[1]["left"])
    one, other = states[0]["left"].split(2 * ROWS)
    assert not torch.equal(one, other)


def test_only_matrices_that_get_smaller_are_chosen() -> None:
    reducer = gw.LowRank(rank=8)
    assert reducer.choose("w", (64, 32)) == reducer
    assert reducer.choose("w", (16, 64)) == reducer
    assert reducer.choose("w", (8, 4096)) == gw.AllReduce(), "8 x (8 + 4096) is more than 8 x 4096"
    assert reducer.choose("conv", (64, 32, 3, 3)) == reducer
    assert reducer.choose("bias", (100_000,)) == gw.AllReduce()
