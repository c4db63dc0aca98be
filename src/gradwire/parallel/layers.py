"""Layers whose weights tensor parallel ranks share. A layer becomes one of these in place, by its class: names stay."""

# nn's modules declare forward(input: Tensor); ours also take and give parts
# pyright: reportIncompatibleMethodOverride=false, reportUnknownParameterType=false

from __future__ import annotations

from functools import lru_cache
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from gradwire.parallel import part_math, part_shapes
from gradwire.parallel.moves import Ranks, Segments, enter, leave, move_rows, take
from gradwire.parallel.part import Part

KNOWN_OPERATIONS = (part_math, part_shapes)  # what a piece of an activation can do stands in these


class Shared(nn.Module):
    """Marks every layer that ranks share; who traces a model takes it as one step."""

    ranks: Ranks


def mine(param: Tensor) -> Tensor:
    """This rank's piece of a parameter."""
    return param.to_local() if isinstance(param, DTensor) else param


def has_bias(linear: nn.Linear) -> bool:
    """torch's annotation says every Linear has one."""
    return cast("Tensor | None", linear.bias) is not None


def whole(value: Tensor | Part) -> Tensor:
    """``value`` as it would be on one process."""
    return value.full_tensor() if isinstance(value, Part) else value


class ColumnLinear(Shared, nn.Linear):
    """Each rank has 1/n of the outputs: of every one of ``segments``, where the outputs are several things in one.

    weight: (out, in), ``Shard(0)``; bias: (out,), ``Shard(0)``. x: (..., in), whole. Gives a `Part` of (..., out); whole
    with ``gathers``.
    """

    segments: Segments
    gathers: bool

    def forward(self, x: Tensor | Part) -> Tensor | Part:
        weight, bias = mine(self.weight), mine(self.bias) if has_bias(self) else None
        if len(self.segments) > 1:
            if bias is None:
                weight = move_rows(weight, self.segments, self.ranks)
            else:  # in one message
                moved = move_rows(torch.cat([weight, bias[:, None]], 1), self.segments, self.ranks)
                weight, bias = moved[:, :-1], moved[:, -1]
        y = F.linear(enter(whole(x), self.ranks), weight, bias)
        part = Part(y, y.dim() - 1, self.segments, self.ranks)
        return part.full_tensor() if self.gathers else part


class RowLinear(Shared, nn.Linear):
    """Each rank has 1/n of the inputs; the outputs' summands are summed over ranks.

    weight: (out, in), ``Shard(1)``; bias: (out,), on every rank. x: (..., in), a `Part` of it or whole. Gives (..., out), whole.
    """

    def forward(self, x: Tensor | Part) -> Tensor:
        y = leave(F.linear(features_of(x, self.in_features, self.ranks), mine(self.weight)), self.ranks)
        return y + self.bias if has_bias(self) else y


def features_of(x: Tensor | Part, features: int, ranks: Ranks) -> Tensor:
    """This rank's 1/n of the last dim."""
    if isinstance(x, Part) and x.tail == -1 and x.segments == (features,):
        return x.local
    x = whole(x)
    return take(x, x.dim() - 1, (features,), ranks)


class VocabularyEmbedding(Shared, nn.Embedding):
    """Each rank has 1/n of the rows, looks up the indices it has, and the ranks' results are summed.

    weight: (rows, features), ``Shard(0)``. x: integers of any shape. Gives (..., features), whole.
    """

    def forward(self, x: Tensor) -> Tensor:
        ids = whole(x)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError(
                f"index out of range: {int(ids.min())} to {int(ids.max())} in a table of {self.num_embeddings} rows"
            )
        rows = self.num_embeddings // self.ranks.size
        local = ids - self.ranks.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        pad = None if self.padding_idx is None else self.padding_idx - self.ranks.rank * rows
        pad = pad if pad is not None and 0 <= pad < rows else None
        found = F.embedding(local.masked_fill(elsewhere, 0), mine(self.weight), pad)
        return leave(found.masked_fill(elsewhere[..., None], 0.0), self.ranks)


class OverSequence(Shared):
    """Each rank works on 1/n of the positions: the last dim but one. Parameters are on every rank, their gradients summed."""

    def forward(self, x: Tensor | Part) -> Tensor | Part:
        if not isinstance(x, Part) and x.dim() > 1 and x.shape[-2] % self.ranks.size == 0:
            dim = x.dim() - 2
            x = Part(take(x, dim, (x.shape[dim],), self.ranks), dim, (x.shape[dim],), self.ranks)
        return super().forward(x)


@lru_cache(maxsize=64)
def over_sequence(kind: type[nn.Module]) -> type[nn.Module]:
    """``kind``, a norm or a dropout, with its work shared over positions."""
    return cast("type[nn.Module]", type(f"Sequence{kind.__name__}", (OverSequence, kind), {}))
