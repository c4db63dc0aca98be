"""Groups along the axes of a mesh."""

import pytest
import torch

from gradwire.comm.world import World
from gradwire.core.mesh import Mesh
from gradwire.testing import run_ranks


def along(world: World, mesh: dict[str, int], *axes: str) -> list[int]:
    """The ranks that an all-gather along these axes reaches."""
    world.mesh = Mesh.of(mesh, world.size)
    return world.group(*axes).all_gather(torch.tensor([world.rank])).flatten().tolist()


@pytest.mark.parametrize(
    ("mesh", "axes", "found"),
    [
        ({"data": 2, "tensor": 2}, ("tensor",), [[0, 1], [0, 1], [2, 3], [2, 3]]),
        ({"data": 2, "tensor": 2}, ("data",), [[0, 2], [1, 3], [0, 2], [1, 3]]),
        ({"data": 2, "tensor": 2}, ("data", "tensor"), [[0, 1, 2, 3]] * 4),
        ({"pipeline": 4}, ("data",), [[0], [1], [2], [3]]),
        ({"pipeline": 2, "shard": 2}, ("data", "shard"), [[0, 1], [0, 1], [2, 3], [2, 3]]),
    ],
)
def test_a_group_reaches_the_ranks_along_its_axes(mesh, axes, found):
    assert run_ranks(4, lambda world: along(world, mesh, *axes)) == found


def test_names_tell_groups_of_other_ranks_apart():
    def names(world: World) -> list[str]:
        world.mesh = Mesh.of({"data": 2, "shard": 2}, world.size)
        return [world.group("data").name, world.group("data", "shard", channel="loader").name]

    assert run_ranks(4, names) == [
        ["data[0,2]/main", "data+shard/loader"],
        ["data[1,3]/main", "data+shard/loader"],
    ] * 2  # fmt: skip
