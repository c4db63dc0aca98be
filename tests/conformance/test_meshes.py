"""Every mesh, every model: the weights of one process, twenty steps of Adam with clipping, in float64."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from gradwire.testing import run_ranks
from tests.conformance.meshes import ROWS, MeshRow, train, truth
from tests.conformance.training import largest_difference

cached_truth = cache(truth)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_float64_weights_equal_one_process(row: MeshRow) -> None:
    run = partial(train, names=row.models)
    ranks = run_ranks(row.num_ranks, run, processes=True, plan=row.plan, timeout_s=120.0)
    for name in row.models:
        for other in ranks[1:]:
            assert all(torch.equal(value, ranks[0][name][key]) for key, value in other[name].items())
        assert largest_difference(ranks[0][name], cached_truth(name)) < 1e-12, name
