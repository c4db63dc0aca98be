"""Ranks along ``shard`` own rows of the optimizer's state; the truth is one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.testing import run_ranks
from tests.sync import owned_scripts as scripts


@cache
def on_two() -> list[dict[str, Any]]:
    return run_ranks(2, scripts.everything_on_two, processes=True, plan=scripts.PLAN)


@cache
def on_four() -> list[dict[str, Any]]:
    return run_ranks(4, scripts.everything_on_four, processes=True, plan=scripts.ACROSS)


def assert_equal(found: dict[str, Tensor], true: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, value in true.items():
        assert torch.allclose(found[name], value, rtol=0, atol=tolerance), name


@pytest.mark.parametrize("name", scripts.OPTIMIZERS)
def test_every_optimizer_steps_as_in_one_process(name: str) -> None:
    for rank in on_two():
        assert_equal(rank["every_optimizer"][name], scripts.alone(name))


@pytest.mark.parametrize("check", ["resumed", "whole_state_loaded"])
def test_a_run_goes_on_from_saved_state(check: str) -> None:
    for rank in on_two():
        assert_equal(rank[check], scripts.alone("Adam"))


def test_a_run_goes_on_where_copies_own_rows() -> None:
    for rank in on_four():
        assert_equal(rank["resumed"], scripts.alone("Adam"))


def test_each_rank_keeps_its_rows_of_the_state_only() -> None:
    for found in (on_two(), on_four()):
        mine = [rank["bytes_of_state"][0] for rank in found]
        whole = found[0]["bytes_of_state"][1]
        assert max(mine) <= 0.65 * whole  # five rows are parted 3 to 2, seven 4 to 3, one 1 to 0, the scalar not at all


def test_a_nan_on_one_rank_skips_the_step_on_all() -> None:
    for rank in on_two():
        assert_equal(rank["with_a_nan"], scripts.alone("Adam"))


def test_weights_and_windows_count_as_in_one_process() -> None:
    for found in (on_two(), on_four()):
        for rank in found:
            assert_equal(rank["weighted"], scripts.weighted_alone())


def test_copies_agree_on_their_rows_by_a_lossy_code() -> None:
    ranks = on_four()
    for rank in ranks[1:]:
        assert all(torch.equal(rank["lossy"][name], value) for name, value in ranks[0]["lossy"].items())
    true = scripts.lossy_alone()
    assert_equal(ranks[0]["lossy"], true, 5e-3)
    assert not torch.equal(ranks[0]["lossy"]["weight"], true["weight"])


def test_what_cannot_work_is_refused_with_a_cure() -> None:
    for rank in on_two():
        lbfgs, local, closure = rank["refused"]
        assert "LBFGS" in lbfgs and "mesh without shard" in lbfgs
        assert "local:every=4" in local and "mesh data in place of shard" in local
        assert "closure" in closure and "mesh without shard" in closure
