"""The codecs alone, against formulas and an independent numpy implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import gradwire as gw
from gradwire.core.compressor import Compressor
from gradwire.testing import check_compressor
from tests.compress.buckets import normal

CODECS: list[Compressor] = [
    gw.Cast(torch.bfloat16),
    gw.Cast(torch.float16),
    gw.Quantize(bits=8),
    gw.Quantize(bits=4),
    gw.TopK(ratio=0.1),
    gw.TopK(ratio=1.0),
    gw.Sampled(ratio=0.1),
    gw.Sampled(ratio=1),
]
FINITE = st.floats(-(2.0**126), 2.0**126, width=32)
ROWS = arrays(np.float32, st.tuples(st.just(1), st.integers(0, 600)), elements=FINITE)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_codec_keeps_the_contract(codec: Compressor) -> None:
    check_compressor(codec)


def numpy_quantize(values: np.ndarray, bits: int) -> np.ndarray:
    """What one row of blocks decodes to, from the definition, in float32."""
    levels = np.float32(2 ** (bits - 1) - 1)
    out = np.zeros_like(values)
    for start in range(0, len(values), 256):
        block = values[start : start + 256]
        absmax = np.abs(block).max()
        if absmax >= np.float32(1e-36):
            scale = min(absmax, np.float32(3e38)) / levels
            codes = np.rint(np.clip(block * (np.float32(1) / scale), -levels, levels))
            out[start : start + 256] = codes * scale
    return out


@pytest.mark.parametrize("bits", [4, 8])
@settings(max_examples=60, deadline=None)
@given(values=ROWS)
def test_quantised_numbers_are_those_of_numpy(bits: int, values: np.ndarray) -> None:
    codec = gw.Quantize(bits=bits)
    messages, _ = codec.encode(torch.from_numpy(values), None, key=0)
    decoded = codec.decode(messages, values.shape[1], key=0)
    np.testing.assert_array_equal(decoded.numpy()[0], numpy_quantize(values[0], bits))


@pytest.mark.parametrize("bits", [4, 8])
@settings(max_examples=60, deadline=None)
@given(values=ROWS)
def test_the_quantisation_error_is_at_most_half_a_scale(bits: int, values: np.ndarray) -> None:
    codec, row = gw.Quantize(bits=bits), torch.from_numpy(values)
    messages, left = codec.encode(row, torch.zeros_like(row), key=0)
    assert left is not None
    assert codec.decode(messages, row.shape[1], key=0).isfinite().all()
    for start in range(0, row.shape[1], 256):
        absmax = row[:, start : start + 256].abs().max()
        half = absmax / (2 ** (bits - 1) - 1) / 2
        # the float32 product with 1/scale may cross a tie: by 3 roundings of a number up to 127
        assert left[:, start : start + 256].abs().max() <= max(float(half) * (1 + 2e-5), 1e-36)


@pytest.mark.parametrize(("bits", "per_number"), [(4, 0.51), (8, 1.02)])
def test_the_wire_bytes_are_as_planned(bits: int, per_number: float) -> None:
    assert gw.Quantize(bits=bits).wire_bytes(1_000_000) / 1_000_000 == pytest.approx(per_number, rel=0.03)


@settings(max_examples=60, deadline=None)
@given(values=ROWS, ratio=st.floats(0.001, 1.0))
def test_topk_keeps_the_largest(values: np.ndarray, ratio: float) -> None:
    codec, row = gw.TopK(ratio=ratio), torch.from_numpy(values)
    messages, left = codec.encode(row, torch.zeros_like(row), key=0)
    decoded = codec.decode(messages, row.shape[1], key=0)
    assert left is not None
    assert torch.equal(decoded + left, row)
    kept = codec.wire_bytes(row.shape[1]) // 8
    assert (kept >= 1) == (row.shape[1] > 0)
    largest = row.abs().sort(descending=True).values[:, :kept]
    assert torch.equal(decoded.abs().sort(descending=True).values[:, :kept], largest)


@settings(max_examples=60, deadline=None)
@given(numel=st.integers(1, 3000), ratio=st.floats(0.001, 1.0), key=st.integers(0, 2**63 - 1))
def test_a_sampled_sum_is_encoded_again_without_loss(numel: int, ratio: float, key: int) -> None:
    codec = gw.Sampled(ratio=ratio)
    rows = normal(2 * numel, 1).view(2, numel)
    total = codec.decode(codec.encode(rows, None, key=key)[0], numel, key=key).sum(0, keepdim=True)
    messages, left = codec.encode(total, torch.zeros_like(total), key=key)
    assert left is not None and not left.any()
    assert torch.equal(codec.decode(messages, numel, key=key), total)


def test_every_entry_is_sampled_in_time() -> None:
    codec, ones = gw.Sampled(ratio=0.1), torch.ones(1, 1000)
    drawn = sum(codec.decode(codec.encode(ones, None, key=key)[0], 1000, key=key) for key in range(300))
    assert isinstance(drawn, torch.Tensor)
    # each is drawn 30 times, give or take 5.2 (binomial); 6 of those are never reached in 1,000 draws
    assert drawn.sum() == 30_000 and drawn.min() >= 1 and drawn.max() <= 62


@settings(max_examples=60, deadline=None)
@given(values=ROWS)
def test_bfloat16_is_torchs(values: np.ndarray) -> None:
    codec, row = gw.Cast(torch.bfloat16), torch.from_numpy(values)
    decoded = codec.decode(codec.encode(row, None, key=0)[0], row.shape[1], key=0)
    assert torch.equal(decoded, row.to(torch.bfloat16).float())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gw.Cast(torch.float32), "must be torch.bfloat16 or torch.float16"),
        (lambda: gw.Cast("bf16"), "must be torch.bfloat16"),
        (lambda: gw.Quantize(bits=3), r"bits=3\) must be 4 or 8"),
        (lambda: gw.TopK(ratio=0), "above 0 and at most 1"),
        (lambda: gw.TopK(ratio=1.5), "above 0 and at most 1"),
        (lambda: gw.Sampled(ratio=float("nan")), "above 0 and at most 1"),
        (lambda: gw.Sampled(ratio=True), "above 0 and at most 1"),
        (lambda: gw.LowRank(rank=0), "at least 1"),
        (lambda: gw.LowRank(rank=2.5), "whole number"),
        (lambda: gw.ErrorFeedback(gw.AllReduce()), "needs a codec"),
        (lambda: gw.Compressed(4), "needs a codec"),
        (lambda: gw.After(steps=-1, reducer=gw.AllReduce()), "at least 0"),
        (lambda: gw.After(steps=1, reducer=gw.Quantize(bits=4)), r"wrap it: ErrorFeedback\(Quantize\(bits=4\)\)"),
        (lambda: gw.ByShape(matrix=None, other=gw.AllReduce()), "matrix=None is not a reducer"),
        (lambda: gw.ByName({"a*": 3}, other=gw.AllReduce()), r"a\*=3 is not a reducer"),
        (lambda: gw.ByName("a*", other=gw.AllReduce()), "patterns to reducers"),
    ],
)
def test_a_bad_argument_is_refused_with_its_cure(make, words: str) -> None:
    with pytest.raises(gw.UsageError, match=words):
        make()
