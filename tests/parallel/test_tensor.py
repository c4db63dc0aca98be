"""Tensor parallel ranks against one process, in float64."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.parallel.norm import clip_grad_norm_
from gradwire.testing import run_ranks
from tests.parallel import tensor_operations, tensor_scripts
from tests.parallel.tensor_models import FusedAttention, batch

pytestmark = pytest.mark.slow  # processes; a mesh of each kind is in `make test` too

CASES = [(name, dropout) for name in ("encoder", "decoder", "custom") for dropout in (0.0, 0.3)]


def on(n: int, function):
    return run_ranks(n, function, processes=True, plan=gw.Plan(mesh={"tensor": n}), timeout_s=120)


@cache
def everything(n: int):
    return on(n, tensor_scripts.everything)


@cache
def small_things(n: int):
    return on(n, tensor_scripts.small_things)


@cache
def one_process(name: str, dropout: float):
    return tensor_scripts.work(None, name, dropout=dropout)


def differences(want: dict[str, list[float]], got: dict[str, list[float]]) -> dict[str, float]:
    """Where two sets of numbers differ by more than rounding, relative to the largest number of each (at least 1)."""
    assert want.keys() == got.keys()
    far = {
        key: max(abs(a - b) for a, b in zip(want[key], got[key], strict=True)) / max(1.0, *map(abs, want[key]))
        for key in want
    }
    return {key: value for key, value in far.items() if not value <= 1e-12}


@pytest.mark.parametrize(("name", "dropout"), CASES)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_outputs_gradients_norms_and_five_steps_are_those_of_one_process(n: int, name: str, dropout: float) -> None:
    assert differences(one_process(name, dropout), everything(n)[0][f"{name} {dropout}"]) == {}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_all_ranks_have_the_same_bits(n: int) -> None:
    results = everything(n)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("n", [2, 3])
def test_every_operation_on_a_shared_activation_means_what_it_means_on_the_whole(n: int) -> None:
    tried, *wrong = on(n, tensor_operations.everywhere)[0]
    assert wrong == []
    assert int(tried.split()[0]) > 100


@pytest.mark.parametrize("n", [2, 4])
def test_rules_share_norms_over_positions_and_logits_over_the_vocabulary(n: int) -> None:
    result = small_things(n)[0]["by rules"]
    assert result["kind"] == "Part"
    assert differences(tensor_scripts.loss_and_gradients(tensor_scripts.small()), result["found"]) == {}
    model = tensor_scripts.small().eval()
    assert differences({"odd": tensor_scripts.flat(model(batch("encoder")[:, :7]))}, {"odd": result["odd"]}) == {}
    assert set(result["pieces"].values()) == {1 / n}
    assert {"embed.weight", "head.weight", "encoder.layers.1.self_attn.in_proj_weight"} <= result["pieces"].keys()


@pytest.mark.parametrize("n", [2, 4])
def test_torchs_fast_paths_for_inference_do_not_bypass_sharing(n: int) -> None:
    want = {"": tensor_scripts.padded(tensor_scripts.small())}
    assert differences(want, {"": small_things(n)[0]["inference"]}) == {}


@pytest.mark.parametrize("n", [2, 4])
def test_cross_entropy_of_shared_logits_is_that_of_whole_ones(n: int) -> None:
    assert differences(tensor_scripts.losses(None), small_things(n)[0]["losses"]) == {}


def test_the_global_norm_counts_shards_once_and_what_is_the_same_once() -> None:
    norms = small_things(2)[0]["norms"]
    for order, want in {"1.0": 19.0, "2.0": 13.0, "3.0": (27 + 64 + 12**3) ** (1 / 3), "inf": 12.0}.items():
        assert norms[order] == pytest.approx(want, rel=1e-6)  # float32 gradients
        assert norms[f"{order} clipped"] == pytest.approx(12 / want, rel=1e-5)
    assert norms["across"] == 5.0


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_clipping_without_shards_is_torchs_to_the_bit(order: float) -> None:
    def grads(clip) -> tuple[float, list[float]]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(2))]
        for param in params[:2]:
            param.grad = torch.randn(param.shape)
        return float(clip(params, 0.5, order)), [x for p in params[:2] for x in p.grad.flatten().tolist()]

    assert grads(clip_grad_norm_) == grads(nn.utils.clip_grad_norm_)


def test_heads_that_ranks_do_not_divide_are_slow_but_right() -> None:
    torch.manual_seed(0)
    model = FusedAttention(12, 3).double()
    y = model(batch("custom"))
    y.square().sum().backward()
    got = dict(zip("yg", small_things(2)[0]["odd heads"], strict=True))
    assert differences({"y": y.flatten().tolist(), "g": model.c_attn.weight.grad.flatten().tolist()}, got) == {}


@pytest.mark.parametrize("n", [2, 4])
def test_optimizers_made_before_keep_settings_and_state(n: int) -> None:
    assert differences(tensor_scripts.taken_over(None), small_things(n)[0]["taken over"]) == {}


@pytest.mark.parametrize("n", [2, 4])
def test_attention_built_and_called_in_any_way_is_that_of_one_process(n: int) -> None:
    assert differences(tensor_scripts.attention(None), small_things(n)[0]["attention"]) == {}


@pytest.mark.parametrize("n", [2, 4])
def test_activation_checkpoints_draw_the_same_masks_again(n: int) -> None:
    assert differences(tensor_scripts.recomputed(None), small_things(n)[0]["recomputed"]) == {}


def test_fsdp2_shards_what_ranks_share() -> None:
    plan = gw.Plan(mesh={"shard": 2, "tensor": 2})
    got = run_ranks(4, tensor_scripts.with_fully_shard, processes=True, plan=plan, timeout_s=60)
    model = tensor_scripts.built("custom")
    model(batch("custom")).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    want = {key: tensor_scripts.flat(p.grad) for key, p in model.named_parameters()} | {"norm": [float(norm)]}
    assert [differences(want, result) for result in got] == [{}] * 4


def test_what_cannot_be_is_refused_in_words() -> None:
    bounds, hook = small_things(2)[0]["refused"]
    assert bounds.startswith("IndexError: index out of range: 1 to 12 in a table of 12 rows")
    assert "register_hook" in hook and "full_tensor" in hook
