"""`nn.MultiheadAttention` with its heads shared by tensor parallel ranks."""

# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire.errors import UsageError
from gradwire.parallel.layers import Shared, has_bias, mine, whole
from gradwire.parallel.moves import enter, leave, move_rows, take
from gradwire.parallel.part import Part, Value


class SharedAttention(Shared, nn.MultiheadAttention):
    """Each rank has 1/n of the heads.

    in_proj_weight: (3 E, E), ``Shard(0)`` in the user's order, so rows move to their heads' ranks in forward; or q, k and v
    apart, ``Shard(0)``, where nothing moves. out_proj.weight: (E, E), ``Shard(1)``. Biases are on every rank. Arguments and
    results are `nn.MultiheadAttention`'s, whole.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise UsageError("is_causal=True needs attn_mask too, as in nn.MultiheadAttention")
        sources = self._sources(query, key, value)
        batched = sources[0].dim() == 3
        time = 1 if self.batch_first and batched else 0
        # (T, B, E), (S, B, E), (S, B, E)
        by_time = [source if batched else source[:, None] for source in sources]
        by_time = [source.transpose(0, 1) if time else source for source in by_time]
        mask = self._mask(
            by_time[0],
            by_time[1],
            attn_mask,
            key_padding_mask if batched or key_padding_mask is None else key_padding_mask[None],
        )
        q, k, v = self._heads(by_time)
        k, v, mask = self._extended(k, v, mask)
        out, weights = self._attend(q, k, v, mask, need_weights=need_weights)
        out = out.permute(2, 0, 1, 3).flatten(2)  # (B, H, T, D) -> (T, B, E)
        y = leave(F.linear(out.local, mine(self.out_proj.weight)), self.ranks)
        y = y + self.out_proj.bias if has_bias(self.out_proj) else y
        y = y.transpose(0, 1) if time else y
        if weights is not None:
            weights = whole(weights)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights[0]
        return y if batched else y[:, 0], weights

    def _sources(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """The inputs, each entering once even if it is used thrice."""
        entered: dict[int, Tensor] = {}
        for source in (query, key, value):
            if id(source) not in entered:
                entered[id(source)] = enter(whole(source), self.ranks)
        return [entered[id(source)] for source in (query, key, value)]

    def _heads(self, sources: list[Tensor]) -> list[Value]:
        """q, k and v as parts of (B, H, T, D)."""
        width = self.embed_dim // self.ranks.size
        if not self._qkv_same_embed_dim:
            weights = [mine(weight) for weight in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)]
        else:
            weights = move_rows(mine(self.in_proj_weight), (self.embed_dim,) * 3, self.ranks).split(width)
        biases: tuple[Tensor | None, ...] = (None,) * 3
        if cast("Tensor | None", self.in_proj_bias) is not None:
            biases = take(self.in_proj_bias, 0, (self.embed_dim,) * 3, self.ranks).split(width)
        return [self._split(F.linear(x, w, b)) for x, w, b in zip(sources, weights, biases, strict=True)]

    def _split(self, features: Tensor) -> Part:
        heads = features.unflatten(-1, (self.num_heads // self.ranks.size, self.head_dim))  # (T, B, H/n, D)
        return Part(heads.permute(1, 2, 0, 3), 1, (self.num_heads,), self.ranks)

    def _extended(self, k: Part, v: Part, mask: Tensor | None) -> tuple[Part, Part, Tensor | None]:
        """Keys and values that every query sees: learned ones, and zeros."""
        extra: list[tuple[Tensor, Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            pair = [take(bias, 2, (self.embed_dim,), self.ranks) for bias in (self.bias_k, self.bias_v)]
            extra.append((self._split(pair[0]).local, self._split(pair[1]).local))
        if self.add_zero_attn:
            zeros = k.local.new_zeros(1, k.local.shape[1], 1, self.head_dim)
            extra.append((zeros, zeros))
        for key, value in extra:
            batch = k.local.shape[0]
            k = k.like(torch.cat([k.local, key.expand(batch, -1, -1, -1)], 2))
            v = v.like(torch.cat([v.local, value.expand(batch, -1, -1, -1)], 2))
            mask = None if mask is None else F.pad(mask, (0, 1))
        return k, v, mask

    def _mask(self, query: Tensor, key: Tensor, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """What is added to the scores: broadcastable to (B, H, T, S), or None."""
        parts: list[Tensor] = []
        if attn_mask is not None:
            added = _added(attn_mask, query)
            parts.append(
                added if added.dim() == 2 else added.view(query.shape[1], self.num_heads, query.shape[0], key.shape[0])
            )
        if padding is not None:
            parts.append(_added(padding, query)[:, None, None, :])
        return sum(parts[1:], parts[0]) if parts else None

    def _attend(self, q: Part, k: Part, v: Part, mask: Tensor | None, *, need_weights: bool) -> tuple[Value, Value]:
        dropout = self.dropout if self.training else 0.0
        arguments: tuple[Value, ...] = (q, k, v)
        if not need_weights:
            return F.scaled_dot_product_attention(*arguments, attn_mask=mask, dropout_p=dropout), None
        scores: Value = torch.matmul(q * self.head_dim**-0.5, k.transpose(-2, -1))
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, dropout) if dropout else weights
        return torch.matmul(weights, arguments[2]), weights


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers to add: a boolean one forbids where it is true."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
