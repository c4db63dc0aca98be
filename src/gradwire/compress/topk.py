"""`TopK`: only the largest entries travel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.core.compressor import add_rows
from gradwire.errors import UsageError


def require_ratio(owner: str, ratio: object) -> None:
    """Raise UsageError unless ``ratio`` is a share that can be kept."""
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 0 < ratio <= 1:
        raise UsageError(f"{owner}(ratio={ratio!r}) must be the kept share, above 0 and at most 1; 0.01 keeps 1 in 100")


def num_kept(numel: int, ratio: float) -> int:
    """At least one entry of what is not empty.

    >>> [num_kept(numel, 0.01) for numel in (0, 5, 1000)]
    [0, 1, 10]
    """
    return min(numel, max(1, math.floor(ratio * numel + 1e-9)))


@dataclass(frozen=True, kw_only=True)
class TopK:
    """Keep the largest ``ratio`` of the entries by magnitude: float32 values and int32 indices, 8 bytes a kept entry.

    Biased: wrap it in `ErrorFeedback` (Stich et al. 2018, arXiv 1809.07599, Alg. 1). Ranks keep different entries, so
    every rank sends its message to all others: (n-1) x 8 x ratio bytes a number.

    >>> codec = TopK(ratio=0.5)
    >>> message, left = codec.encode(torch.tensor([[1.0, -3.0, 2.0, 0.5]]), torch.zeros(1, 4), key=0)
    >>> codec.decode(message, 4, key=0), left
    (tensor([[ 0., -3.,  2.,  0.]]), tensor([[1.0000, 0.0000, 0.0000, 0.5000]]))
    """

    ratio: float
    phases = 1

    def __post_init__(self) -> None:
        require_ratio("TopK", self.ratio)

    def wire_bytes(self, numel: int) -> int:
        return 8 * num_kept(numel, self.ratio)

    def encode(self, values: Tensor, residual: Tensor | None, *, key: int) -> tuple[Tensor, Tensor | None]:
        wanted = values if residual is None else values + residual
        kept = num_kept(values.shape[1], self.ratio)
        indices = torch.topk(wanted.abs(), kept, dim=1, sorted=False).indices
        numbers = wanted.gather(1, indices).view(torch.uint8)
        left = None if residual is None else wanted.scatter(1, indices, 0.0)
        return torch.cat([numbers, indices.to(torch.int32).view(torch.uint8)], 1), left

    def decode(self, messages: Tensor, numel: int, *, key: int) -> Tensor:
        rows, half = messages.shape[0], messages.shape[1] // 2
        numbers = messages[:, :half].reshape(-1).view(torch.float32).view(rows, half // 4)
        places = messages[:, half:].reshape(-1).view(torch.int32).view(rows, half // 4).to(torch.int64)
        return torch.zeros(rows, numel, device=messages.device).scatter_(1, places, numbers)

    def decode_sum(self, messages: Tensor, out: Tensor, *, key: int) -> None:
        add_rows(self, messages, out, key=key)

    def words(self) -> str:
        return f"the largest {100 * self.ratio:g} %"
