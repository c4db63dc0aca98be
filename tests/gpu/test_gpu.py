"""Checks that need a GPU; they are skipped without one. `pytest -m gpu tests/gpu` is one short run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwire as gw
from gradwire.comm.world import World
from gradwire.testing import ListSource, check_group, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch sees no CUDA device"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).cuda()


def train(world: World | None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(16, 8, generator=generator).cuda(), torch.randn(16, 1, generator=generator).cuda())] * 5
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    source = ListSource(batches, world) if world else batches
    if isinstance(source, ListSource):
        gw.distribute(model, optimizer, source)
    for x, y in source:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


def test_one_rank_on_a_gpu_is_plain_pytorch_to_the_bit() -> None:
    with gw.init() as world:
        assert world.device.type == "cuda"
        ours = train(world)
    assert torch.equal(ours, train(None))


def _check_nccl(world: World) -> None:
    check_group(world.group(), device="cuda")


@needs_two
def test_nccl_groups_conform() -> None:
    run_ranks(2, _check_nccl, processes=True, device="cuda")


@needs_two
def test_two_gpus_equal_one() -> None:
    first, second = run_ranks(2, train, processes=True, device="cuda")
    assert torch.equal(first, second)
    torch.testing.assert_close(first, train(None), rtol=1e-6, atol=1e-7)
