"""Saved under one plan, loaded under another: the run ends with the weights of one uninterrupted process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import gradwire as gw
from gradwire.testing import run_ranks
from tests.checkpoint.across import NAME, first_half, second_half
from tests.conformance.meshes import truth
from tests.conformance.training import largest_difference

PLANS = {
    "one process": (1, gw.Plan()),
    "data": (2, gw.Plan()),
    "optimizer rows": (2, gw.Plan(mesh={"shard": 2}, sharding="optimizer")),
    "parameters": (3, gw.Plan(mesh={"shard": 3})),
    "pipeline": (2, gw.Plan(mesh={"pipeline": 2})),
    "tensor": (2, gw.Plan(mesh={"tensor": 2})),
    "optimizer rows x tensor": (4, gw.Plan(mesh={"shard": 2, "tensor": 2}, sharding="optimizer")),
    "parameters x tensor": (4, gw.Plan(mesh={"shard": 2, "tensor": 2})),
    "pipeline x optimizer rows": (4, gw.Plan(mesh={"pipeline": 2, "shard": 2}, sharding="optimizer")),
}
WAYS = [*zip(PLANS, [*PLANS][1:], strict=False), ("pipeline x optimizer rows", "one process")]
QUICK = {("optimizer rows", "parameters"), ("pipeline", "tensor")}  # all of them: `make test-meshes`


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*way, marks=[] if way in QUICK else pytest.mark.slow, id=" to ".join(way)) for way in WAYS],
)
def test_a_run_goes_on_under_another_plan(before: str, after: str, tmp_path: Path) -> None:
    for name, half in ((before, first_half), (after, second_half)):
        num_ranks, plan = PLANS[name]
        found = run_ranks(num_ranks, partial(half, folder=tmp_path), processes=True, plan=plan)
    for weights in found:
        assert weights is not None and largest_difference(weights, truth(NAME)) < 1e-12
