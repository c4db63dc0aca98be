"""`Sampled`: entries drawn by lot, the same ones on all ranks, so that no index travels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compress.topk import num_kept, require_ratio
from gradwire.core.compressor import add_rows


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Keep ``ratio`` of the entries, one drawn from each of so many equal stretches: 4 bytes a kept entry.

    All ranks draw alike from ``key``, so a sum of messages is a message, and its second encoding loses nothing. Entries are
    not scaled by 1/ratio: `ErrorFeedback` sends later what was not drawn (Stich et al. 2018, arXiv 1809.07599).

    >>> codec = Sampled(ratio=0.25)
    >>> message, left = codec.encode(torch.ones(1, 8), torch.zeros(1, 8), key=3)
    >>> float(codec.decode(message, 8, key=3).sum()), float(left.sum())
    (2.0, 6.0)
    """

    ratio: float
    phases = 2

    def __post_init__(self) -> None:
        require_ratio("Sampled", self.ratio)

    def wire_bytes(self, numel: int) -> int:
        return 4 * num_kept(numel, self.ratio)

    def encode(self, values: Tensor, residual: Tensor | None, *, key: int) -> tuple[Tensor, Tensor | None]:
        wanted = values if residual is None else values + residual
        places = self._places(values.shape[1], key).to(values.device)
        left = None if residual is None else wanted.index_fill(1, places, 0.0)
        return wanted[:, places].view(torch.uint8), left

    def decode(self, messages: Tensor, numel: int, *, key: int) -> Tensor:
        rows, places = messages.shape[0], self._places(numel, key).to(messages.device)
        numbers = messages.reshape(-1).view(torch.float32).view(rows, len(places))
        return torch.zeros(rows, numel, device=messages.device).index_copy_(1, places, numbers)

    def decode_sum(self, messages: Tensor, out: Tensor, *, key: int) -> None:
        add_rows(self, messages, out, key=key)

    def words(self) -> str:
        return f"{100 * self.ratio:g} % drawn by lot"

    def _places(self, numel: int, key: int) -> Tensor:
        """(kept,) increasing indices; the work grows with what is kept, not with numel."""
        kept = num_kept(numel, self.ratio)
        starts = torch.arange(kept + 1) * numel // max(1, kept)
        lots = torch.randint(1 << 31, (kept,), generator=torch.Generator().manual_seed(key))
        return starts[:-1] + lots % starts.diff()
