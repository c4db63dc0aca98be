"""torch's collectives over our groups: the mesh that FSDP2 and DTensor stand on."""

from __future__ import annotations

import pytest

import gradwire as gw
from gradwire.testing import RankError, run_ranks
from tests.comm import mesh_scripts as scripts


def test_torch_collectives_over_our_groups():
    n = 3
    for rank, found in enumerate(run_ranks(n, scripts.collectives, processes=True)):
        rows = [1.0, 2.0, 3.0]
        assert found == {"total": [6.0], "max": [3.0], "rows": rows, "part": [6.0 * (rank + 1)], "first": [1.0]}


@pytest.mark.parametrize("script", [scripts.tensor_parallel, scripts.fully_sharded])
def test_torch_layers_on_our_mesh_give_the_gradients_of_one_process(script):
    net = scripts.model()
    net(scripts.batch()).sum().backward()
    axis = "tensor" if script is scripts.tensor_parallel else "shard"
    for ours in run_ranks(2, script, processes=True, plan=gw.Plan(mesh={axis: 2})):
        for grad, true in zip(ours, scripts.gradients(net), strict=True):
            assert grad == pytest.approx(true, abs=1e-12)


def test_the_norm_of_a_sharded_gradient_is_the_whole_ones():
    assert run_ranks(2, scripts.norm_of_sharded, processes=True, plan=gw.Plan(mesh={"shard": 2})) == [5.0, 5.0]


def test_threads_have_no_torch_mesh():
    with pytest.raises(RankError, match="start with gradwire run"):
        run_ranks(2, lambda world: world.torch_mesh())
