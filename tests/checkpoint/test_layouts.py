"""Written under any layout and world size, read under any other, equal to the byte (cases.md 15 and 16)."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import gradwire as gw
from gradwire.checkpoint.api import export, load, save
from gradwire.testing import run_ranks
from tests.checkpoint import layouts

MESHES = [{"data": 1}, {"shard": 2}, {"shard": 3}, {"shard": 4}, {"data": 2, "shard": 2}, {"shard": 2, "tensor": 2}]


def size(mesh: dict[str, int]) -> int:
    total = 1
    for each in mesh.values():
        total *= each
    return total


def words(mesh: dict[str, int]) -> str:
    return "-".join(f"{axis}{length}" for axis, length in mesh.items())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Every mesh and layout, saved. Folder -> bytes that each rank wrote."""
    found: dict[str, list[int]] = {}
    for mesh in MESHES:
        folder = tmp_path_factory.mktemp("checkpoints") / words(mesh)
        script = partial(layouts.write_all, folder=str(folder))
        ranks = run_ranks(size(mesh), script, processes=True, plan=gw.Plan(mesh=mesh))
        for layout in ranks[0]:
            found[str(folder / layout)] = [rank[layout] for rank in ranks]
    return found


@pytest.mark.slow  # test_across_plans.py has the quick ones
@pytest.mark.parametrize("mesh", MESHES, ids=words)
def test_whatever_wrote_it_every_rank_reads_its_bytes(written, mesh):
    script = partial(layouts.read_all, folders=list(written))
    assert run_ranks(size(mesh), script, processes=True, plan=gw.Plan(mesh=mesh)) == [[]] * size(mesh)


def test_what_all_ranks_hold_is_written_once_and_the_work_is_shared(written):
    alone = next(sum(ranks) for folder, ranks in written.items() if folder.endswith("data1/plain"))
    for folder, ranks in written.items():
        rng = 8_000 * len(ranks)  # the generators and the header of each rank
        assert sum(ranks) < alone + 2 * rng, folder
        assert min(ranks) > 5_000, folder


@pytest.mark.parametrize("mesh", [{"shard": 3}, {"shard": 2, "tensor": 2}], ids=words)
def test_fully_sharded_and_tensor_parallel_models_go_on_from_one_process_and_back(tmp_path, mesh):
    net = layouts.perceptron()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with gw.init():
        layouts.trained(net, 3, optimizer)
        save(tmp_path / "one", net, optimizer)
        before = layouts.whole(net.state_dict()) | layouts.moments(net, optimizer)
        script = partial(layouts.full_shard, folder=str(tmp_path / "many"), start=str(tmp_path / "one"))
        found = run_ranks(size(mesh), script, processes=True, plan=gw.Plan(mesh=mesh))
        for loaded, _ in found:
            assert loaded == before
        back = layouts.perceptron()
        again = torch.optim.Adam(back.parameters())
        load(tmp_path / "many", back, again)
    assert layouts.whole(back.state_dict()) | layouts.moments(back, again) == found[0][1]
    layouts.trained(net, 2, optimizer)
    for ours, true in zip(back.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, true, rtol=0, atol=1e-12)


def test_an_exported_file_is_the_whole_model_under_the_users_names(written, tmp_path):
    from safetensors.torch import load_file

    for place, folder in enumerate(written):
        export(folder, tmp_path / f"{place}.safetensors")
        found = load_file(tmp_path / f"{place}.safetensors")
        for name, shape in layouts.SHAPES.items():
            assert torch.equal(found[name], layouts.known(name, shape)), folder
        assert torch.equal(found["tied"], found["matrix"])
        for dtype in layouts.BUFFERS:
            name = str(dtype).replace("torch.", "of_")
            value = torch.view_as_complex(found[name]) if dtype == torch.complex128 else found[name]
            assert torch.equal(value, layouts.known(name, (4, 3), dtype)), folder
        assert found["empty"].shape == (0, 3)
        assert len(found) == len(layouts.SHAPES) + len(layouts.BUFFERS) + 3
