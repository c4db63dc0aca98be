"""Every mesh, every model: the weights of one process, twenty steps of Adam with clipping, in float64."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

import gradwire as gw
from gradwire.parallel.blocks import Blocks
from gradwire.testing import run_ranks
from tests.conformance.meshes import ROWS, MeshRow, adam, model, train, truth
from tests.conformance.training import largest_difference

cached_truth = cache(truth)


QUICK = {  # all rows, with every model, are `make test-meshes`
    "parameters, 3", "pipeline, 3, gpipe", "tensor, 2", "data x parameters", "data x pipeline", "pipeline x optimizer rows",
    "pipeline x tensor", "shard x tensor", "optimizer rows x tensor",
}  # fmt: skip


@pytest.mark.parametrize("row", [row for row in ROWS if row.name in QUICK], ids=lambda row: row.name)
def test_a_tied_language_model_ends_with_the_weights_of_one_process(row: MeshRow) -> None:
    check(row, ("tied",))


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_model_ends_with_the_weights_of_one_process(row: MeshRow) -> None:
    check(row, row.models)


def check(row: MeshRow, names: tuple[str, ...]) -> None:
    run = partial(train, names=names)
    ranks = run_ranks(row.num_ranks, run, processes=True, plan=row.plan, timeout_s=120.0)
    for name in names:
        for other in ranks[1:]:
            assert all(torch.equal(value, ranks[0][name][key]) for key, value in other[name].items())
        assert largest_difference(ranks[0][name], cached_truth(name)) < 1e-12, name


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"shard": 2}, {"tensor": 2}], ids=lambda mesh: next(iter(mesh)))
def test_copies_of_a_cut_model_agree_by_a_lossy_code(mesh: dict[str, int]) -> None:
    plan = gw.Plan(mesh={"data": 2, **mesh}, sync="q8")
    ranks = run_ranks(4, partial(train, names=("untied",)), processes=True, plan=plan, timeout_s=120.0)
    found, exact = ranks[0]["untied"], cached_truth("untied")
    for other in ranks[1:]:
        assert all(torch.equal(value, found[key]) for key, value in other["untied"].items())
    moved = largest_difference(model("untied").state_dict(), exact)
    assert 0 < largest_difference(found, exact) < moved / 5  # twenty steps of Adam end about where they should


def test_a_plan_without_a_mesh_has_the_worlds() -> None:
    def run(world: gw.World) -> str:
        made = model("perceptron")
        gw.distribute(made, adam(made), plan=gw.Plan(sync="q8", accumulate=2))
        return world.mesh.words()

    assert run_ranks(2, run, plan=gw.Plan(mesh={"data": 2})) == ["data=2"] * 2


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", [pytest.param("perceptron", marks=pytest.mark.slow), "untied", "tied"])
def test_wherever_a_pipeline_is_cut_its_weights_are_those_of_one_process(name: str, accumulate: int) -> None:
    run = partial(train, names=(name,))
    for cut in Blocks(model(name)).names[1:]:
        plan = gw.Plan(mesh={"pipeline": 2}, accumulate=accumulate, pipeline=gw.Pipeline(cuts=(cut,)))
        for rank in run_ranks(2, run, plan=plan):
            assert largest_difference(rank[name], cached_truth(name)) < 1e-12, cut


def test_a_stage_without_parameters_takes_part() -> None:
    """Cut around a Tanh: its rank has no backward of its own, and the others wait for it in every agreement."""
    for accumulate, schedule in ((1, "gpipe"), (2, "1f1b"), (1, "zero-bubble")):
        pipeline = gw.Pipeline(cuts=("3", "4"), schedule=schedule)  # type: ignore[arg-type]
        plan = gw.Plan(mesh={"pipeline": 3}, accumulate=accumulate, pipeline=pipeline)
        for rank in run_ranks(3, partial(train, names=("perceptron",)), plan=plan, timeout_s=30.0):
            assert largest_difference(rank["perceptron"], cached_truth("perceptron")) < 1e-12
