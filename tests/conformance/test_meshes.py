"""Every mesh, every model: the weights of one process, twenty steps of Adam with clipping, in float64."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from gradwire.testing import run_ranks
from tests.conformance.meshes import ROWS, MeshRow, train, truth
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
