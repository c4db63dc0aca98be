"""The grid of ranks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.mesh import AXES, Mesh
from gradwire.errors import PlanError

sizes = st.fixed_dictionaries({}, optional={axis: st.integers(1, 3) for axis in AXES}).filter(bool)


@given(sizes)
def test_coordinates_count_through_the_grid_with_the_last_axis_fastest(given_sizes):
    mesh = Mesh.of(given_sizes, math.prod(given_sizes.values()))
    seen = [tuple(mesh.coordinate(rank)[axis] for axis in AXES) for rank in range(mesh.size)]
    assert seen == sorted(set(seen))
    assert all(digit < size for digits in seen for digit, size in zip(digits, mesh.sizes, strict=True))


@given(sizes, st.sets(st.sampled_from(AXES)), st.integers(0, 80))
def test_ranks_along_axes_part_the_world(given_sizes, axes, number):
    mesh = Mesh.of(given_sizes, math.prod(given_sizes.values()))
    rank = number % mesh.size
    peers = mesh.ranks_along(tuple(axes), rank)
    assert rank in peers and list(peers) == sorted(peers) and len(peers) == mesh.length(tuple(axes))
    assert all(mesh.ranks_along(tuple(axes), peer) == peers for peer in peers)
    fixed = [axis for axis in AXES if axis not in axes]
    assert all(mesh.coordinate(peer)[axis] == mesh.coordinate(rank)[axis] for peer in peers for axis in fixed)


def test_tensor_parallel_ranks_are_neighbours_and_stages_are_far_apart():
    mesh = Mesh.of({"tensor": 2, "pipeline": 2, "data": 2}, 8)
    assert mesh.ranks_along(("tensor",), 4) == (4, 5)
    assert mesh.ranks_along(("pipeline",), 1) == (1, 5)
    assert mesh.words() == "pipeline=2 x data=2 x tensor=2"


@pytest.mark.parametrize(
    ("given_sizes", "world_size", "said"),
    [
        ({"data": 3}, 4, "mesh data=3 needs 3 ranks, the launcher started 4; use data=4 or start 3"),
        (
            {"data": 2, "shard": 2},
            6,
            "mesh data=2 x shard=2 needs 4 ranks, the launcher started 6; use data=3 or start 4",
        ),
        ({"pipeline": 3}, 4, "mesh pipeline=3 needs 3 ranks, the launcher started 4; start 3"),
    ],
)
def test_a_mesh_that_does_not_fill_the_world_is_refused_with_what_would(given_sizes, world_size, said):
    with pytest.raises(PlanError) as refused:
        Mesh.of(given_sizes, world_size)
    assert str(refused.value) == said


def test_no_axes_are_all_ranks_along_data():
    assert Mesh.of({}, 5).coordinate(3) == {"pipeline": 0, "data": 3, "shard": 0, "tensor": 0}
