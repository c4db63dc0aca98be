"""Parameters and gradients sharded by rows; the truth is one process. Ranks are processes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import gradwire as gw
from gradwire.testing import run_ranks
from tests.parallel import shard_scripts as scripts

pytestmark = pytest.mark.slow  # processes; a mesh of each kind is in `make test` too

CLOSE = 1e-12


def assert_close(found: Any, true: Any) -> None:
    """Nested numbers, equal to rounding."""
    if isinstance(true, dict):
        assert found.keys() == true.keys()
        for key, value in true.items():
            assert_close(found[key], value)
    elif isinstance(true, list | tuple) and not all(isinstance(each, float) for each in true):
        assert len(found) == len(true)
        for one, other in zip(found, true, strict=True):
            assert_close(one, other)
    elif isinstance(true, float | list | tuple):
        assert found == pytest.approx(true, abs=CLOSE, rel=CLOSE)
    else:
        assert found == true


@cache
def on(num_ranks: int, script: str) -> list[Any]:
    return run_ranks(num_ranks, getattr(scripts, script), processes=True, plan=gw.Plan(mesh={"shard": num_ranks}))


@cache
def alone(script: str) -> Any:
    return getattr(scripts, script)(None)


@pytest.mark.parametrize("behaviour", scripts.BEHAVIOURS, ids=lambda each: each.__name__)
def test_two_ranks_do_what_one_process_does(behaviour: Any) -> None:
    name = behaviour.__name__
    for rank in on(2, "everything"):
        assert_close(rank[name], alone("everything")[name])


@pytest.mark.parametrize("name", scripts.OPTIMIZERS)
def test_every_optimizer_steps_as_in_one_process(name: str) -> None:
    for rank in on(2, "train_with_all"):
        assert_close(rank[name], alone("train_with_all")[name])


def test_rows_that_three_ranks_cannot_divide() -> None:
    for rank in run_ranks(3, scripts.two_backwards, processes=True, plan=gw.Plan(mesh={"shard": 3})):
        assert_close(rank, scripts.two_backwards(None))


def test_each_row_of_the_mesh_sums_over_its_own_ranks() -> None:
    for row, found in run_ranks(4, scripts.beside_data, processes=True, plan=gw.Plan(mesh={"data": 2, "shard": 2})):
        assert_close((row, found), scripts.beside_data_alone(row))


def test_what_is_shared_along_tensor_is_sharded_too() -> None:
    for found in run_ranks(4, scripts.over_tensor, processes=True, plan=gw.Plan(mesh={"shard": 2, "tensor": 2})):
        assert_close(found, scripts.over_tensor(None))


def test_a_step_moves_the_fewest_bytes() -> None:
    for rank in on(2, "odds_and_ends"):
        sent = rank["bytes_of_a_step"]
        assert sent["reshard"] <= 3.0 and sent["keep"] <= 2.01  # rows of one bias more, to fill up


def test_whole_parameters_are_freed() -> None:
    for rank in on(2, "odds_and_ends"):
        after_sharding, after_backward = rank["whole_ones_are_freed"]
        assert after_sharding < 0.55  # half, and scalars
        assert after_backward < 1.1  # half of the parameters, half of the gradients


def test_what_cannot_be_sharded_is_refused_with_a_cure() -> None:
    for rank in on(2, "odds_and_ends"):
        told = rank["refused"]
        assert "sparse=False" in told["sparse"]
        assert "one dtype" in told["mixed"]
        assert "no parameters" in told["empty"]
        assert "sharded already" in told["twice"]
        assert "hooks got not all" in told["hooks"]
        assert all("use AdamW" in told[name] for name in ("LBFGS", "Adafactor"))


def test_blocks_run_in_other_orders_on_two_ranks_are_an_error_on_both() -> None:
    for rank in on(2, "odds_and_ends"):
        assert rank["different_orders"] != "nothing was raised"
