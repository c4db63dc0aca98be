"""`Cast`: half the bytes, summed in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compress import kernels
from gradwire.core.compressor import add_rows
from gradwire.errors import UsageError


@dataclass(frozen=True)
class Cast:
    """Round to bfloat16 (8 bits of precision, float32's range) or float16 (11 bits, at most 65,504): 2 bytes a number.

    What is beyond the type's range travels as its largest number, never as infinity; error feedback sends the rest later.
    Sums are taken in float32, so averaging 40000 and 40000 in float16 gives 40000.

    >>> codec = Cast(torch.float16)
    >>> message, _ = codec.encode(torch.tensor([[1.0, 1e6]]), None, key=0)
    >>> codec.decode(message, 2, key=0)
    tensor([[1.0000e+00, 6.5504e+04]])
    """

    dtype: torch.dtype
    phases = 2

    def __post_init__(self) -> None:
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise UsageError(f"Cast({self.dtype!r}) must be torch.bfloat16 or torch.float16")

    def wire_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, residual: Tensor | None, *, key: int) -> tuple[Tensor, Tensor | None]:
        made = kernels.to_bfloat16(values, residual) if self.dtype is torch.bfloat16 else None
        return made or encode_eager(values, residual, self.dtype)

    def decode(self, messages: Tensor, numel: int, *, key: int) -> Tensor:
        return messages.contiguous().view(self.dtype).to(torch.float32)

    def decode_sum(self, messages: Tensor, out: Tensor, *, key: int) -> None:
        add_rows(self, messages, out, key=key)

    def words(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def encode_eager(values: Tensor, residual: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """`Cast.encode` in torch's own operations, for any device: what the kernel must equal bit for bit."""
    wanted = values if residual is None else values + residual
    largest = torch.finfo(dtype).max
    sent = wanted.clamp(-largest, largest).to(dtype)
    left = None if residual is None else wanted - sent.to(torch.float32)
    return sent.view(torch.uint8), left
