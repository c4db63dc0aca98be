"""`Quantize`: 4 or 8 bits a number, in blocks of 256 that share a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.compress import kernels
from gradwire.core.compressor import add_rows
from gradwire.errors import UsageError

BLOCK = 256
SCALE_BYTES = 4
LARGEST = 3e38  # so that a decoded number cannot overflow
SMALLEST = 1e-36  # below it 1 / scale would overflow: the block is sent as zeros


@dataclass(frozen=True, kw_only=True)
class Quantize:
    """Round to whole multiples of a scale: ``scale = absmax / 7`` (4 bits) or ``/ 127`` (8), half to even.

    A block of 256 numbers is one float32 scale and 128 or 256 bytes, so 0.516 or 1.016 bytes a number; a row is whole
    blocks. The error is at most half a scale. Biased with 4 bits on small numbers beside large ones: wrap it in
    `ErrorFeedback` (Karimireddy et al., arXiv 1901.09847). A block whose largest magnitude is below 1e-36 is sent as zeros.

    >>> codec = Quantize(bits=4)
    >>> message, _ = codec.encode(torch.tensor([[7.0, -3.2, 0.4]]), None, key=0)
    >>> codec.decode(message, 3, key=0)
    tensor([[ 7., -3.,  0.]])
    """

    bits: Literal[4, 8] = 8
    phases = 2

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise UsageError(f"Quantize(bits={self.bits!r}) must be 4 or 8")

    def wire_bytes(self, numel: int) -> int:
        return -(-numel // BLOCK) * (SCALE_BYTES + BLOCK * self.bits // 8)

    def encode(self, values: Tensor, residual: Tensor | None, *, key: int) -> tuple[Tensor, Tensor | None]:
        made = kernels.quantize(values, residual, self.bits, self.wire_bytes(values.shape[1]))
        return made or encode_eager(values, residual, self.bits)

    def decode(self, messages: Tensor, numel: int, *, key: int) -> Tensor:
        made = kernels.dequantize(messages, numel, self.bits)
        return decode_eager(messages, numel, self.bits) if made is None else made

    def decode_sum(self, messages: Tensor, out: Tensor, *, key: int) -> None:
        if not kernels.dequantize_sum(messages, out, self.bits):
            add_rows(self, messages, out, key=key)

    def words(self) -> str:
        return f"{self.bits} bits in blocks of {BLOCK}"


def encode_eager(values: Tensor, residual: Tensor | None, bits: int) -> tuple[Tensor, Tensor | None]:
    """`Quantize.encode` in torch's own operations, for any device: what the kernel must equal bit for bit."""
    rows, numel = values.shape
    wanted = values if residual is None else values + residual
    whole = pad(wanted, (0, -numel % BLOCK)) if numel % BLOCK else wanted
    blocks = whole.reshape(rows, -(-numel // BLOCK), BLOCK)
    levels = 2 ** (bits - 1) - 1
    absmax = torch.linalg.vector_norm(blocks, torch.inf, dim=2, keepdim=True)
    scale = torch.where(absmax < SMALLEST, 0.0, absmax.clamp(max=LARGEST) / levels)
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    codes = (blocks * inverse).clamp_(-levels, levels).round_().add_(0.0)  # -0 + 0 is +0: whole numbers have one zero
    if bits == 4:
        offset = (codes + 8).to(torch.uint8)
        packed = offset[..., : BLOCK // 2] | offset[..., BLOCK // 2 :] << 4
    else:
        packed = codes.to(torch.int8).view(torch.uint8)
    left = None if residual is None else wanted - codes.mul_(scale).view(rows, -1)[:, :numel]
    return torch.cat([scale.view(torch.uint8), packed], 2).view(rows, -1), left


def decode_eager(messages: Tensor, numel: int, bits: int) -> Tensor:
    """`Quantize.decode` in torch's own operations."""
    blocks = messages.view(messages.shape[0], -1, SCALE_BYTES + BLOCK * bits // 8)
    scale = blocks[..., :SCALE_BYTES].contiguous().view(torch.float32)
    packed = blocks[..., SCALE_BYTES:]
    if bits == 4:
        codes = torch.cat([packed & 15, packed >> 4], 2).to(torch.float32).sub_(8)
    else:
        codes = packed.contiguous().view(torch.int8).to(torch.float32)
    return codes.mul_(scale).view(messages.shape[0], -1)[:, :numel].contiguous()
