"""`check_compressor`: what every `Compressor` must do."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.core.compressor import Compressor, add_rows
from gradwire.testing.checks import SIZES, require

SCALES = (1.0, 1e-20, 1e-38, 1e-45, 1e30, 3e38)


def check_compressor(codec: Compressor, *, device: str = "cpu") -> None:
    """Check ``codec`` alone, without ranks: messages of the promised size for odd and empty rows of every magnitude.

    Zero in, zero out; finite in, finite out; decoded + residual = what was given, to rounding; no argument is changed; rows are
    independent of one another; the same arguments give the same bits; no residual given, none returned.

    >>> from gradwire.compress.quantize import Quantize
    >>> check_compressor(Quantize(bits=4))
    """
    for numel in SIZES:
        _check_zeros(codec, torch.zeros(2, numel, device=device))
        for scale in SCALES:
            values, residual = _values(numel, 1, device) * scale, 0.1 * scale * _values(numel, 2, device)
            _check_rows(codec, values.clamp(-3e38, 3e38), residual.clamp(-1e37, 1e37))  # their sum is finite
    require(codec.phases in (1, 2), f"phases is {codec.phases}, not 1 or 2")
    require(codec.wire_bytes(1000) < codec.wire_bytes(100_000), "wire_bytes does not grow with the size")
    require(bool(codec.words()), "words() is empty")
    require(hash(codec) == hash(codec), "it has no hash")


def _check_zeros(codec: Compressor, zeros: Tensor) -> None:
    messages, left = codec.encode(zeros, zeros.clone(), key=0)
    out = codec.decode(messages, zeros.shape[1], key=0)
    require(out.shape == zeros.shape and bool((out == 0).all()), f"{zeros.shape[1]} zeros do not stay zero")
    require(left is not None and bool((left == 0).all()), f"{zeros.shape[1]} zeros leave something behind")


def _check_rows(codec: Compressor, values: Tensor, residual: Tensor) -> None:
    rows, numel = values.shape
    given, kept = values.clone(), residual.clone()
    messages, left = codec.encode(values, residual, key=7)
    require(torch.equal(values, given) and torch.equal(residual, kept), "encode changed its arguments")
    size = (rows, codec.wire_bytes(numel))
    require(messages.dtype == torch.uint8 and messages.shape == size, f"messages of {numel} are not {size} bytes")
    out = codec.decode(messages, numel, key=7)
    require(out.dtype == torch.float32 and out.shape == values.shape, f"decode gives {out.dtype} {tuple(out.shape)}")
    require(bool(out.isfinite().all()), f"{numel} finite numbers are decoded to others")
    total, expected = torch.empty_like(values[0]), torch.empty_like(values[0])
    codec.decode_sum(messages, total, key=7)
    add_rows(codec, messages, expected, key=7)
    require(
        torch.equal(total.nan_to_num(), expected.nan_to_num()),
        f"decode_sum of {numel} is not the sum of the rows that decode gives",
    )
    require(left is not None and left.shape == values.shape, "a residual was given and none came back")
    if left is not None:
        error = (out.double() + left.double() - values.double() - residual.double()).abs()
        bound = 1e-6 * (values.abs() + residual.abs() + out.abs()).double() + 1e-44  # denormals have steps of 1e-45
        require(bool((error <= bound).all()), f"{numel}: decoded + residual is not what was given")
    again, _ = codec.encode(values, residual, key=7)
    require(torch.equal(again, messages), "the same arguments give other bits")
    alone, _ = codec.encode(values[1:], residual[1:], key=7)
    require(torch.equal(alone, messages[1:]), "a row depends on the rows before it")
    _, none = codec.encode(values, None, key=7)
    require(none is None, "no residual was given and one came back")


def _values(numel: int, seed: int, device: str) -> Tensor:
    return torch.randn(2, numel, generator=torch.Generator().manual_seed(seed)).to(device)
