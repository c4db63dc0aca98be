"""`ErrorFeedback` and `Compressed`: a codec's messages become an exchange whose replicas are bit-identical."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gradwire.compress.exact import AllReduce
from gradwire.core.compressor import Compressor
from gradwire.core.group import Group
from gradwire.core.reducer import Bucket, Link, Reducer, State
from gradwire.errors import UsageError

SMALLEST_CODED = 1024  # below it a message costs its latency, not its bytes
SMALL_EXACT = f"tensors below {SMALLEST_CODED:,} numbers exact"
UNIT = 256  # a share is whole blocks of every codec
CODEC_S_PER_NUMBER = 2e-9  # encode and decode on one core, about: enough to tell a codec from none on a fast network


class _Coded:
    """What both have in common: the exchange. Sums are float32, whatever the bucket's dtype."""

    codec: Compressor

    def _check(self) -> None:
        if not hasattr(self.codec, "encode"):
            name = type(self).__name__
            raise UsageError(f"{name}({self.codec!r}) needs a codec such as Quantize(bits=4), which says how to encode")

    def choose(self, name: str, shape: tuple[int, ...]) -> Reducer:
        numel = torch.Size(shape).numel()
        return AllReduce() if numel < SMALLEST_CODED else cast("Reducer", self)

    def plain(self, group: Group) -> bool:
        return False

    def sent_bytes(self, numel: int, num_ranks: int) -> float:
        if not _two_phases(self.codec, num_ranks):
            return (num_ranks - 1) * self.codec.wire_bytes(numel)
        return 2 * (num_ranks - 1) * self.codec.wire_bytes(share_of(numel, num_ranks))

    def cost(self, numel: int, link: Link) -> float:
        rounds = 2 if _two_phases(self.codec, link.num_ranks) else 1
        sent = self.sent_bytes(numel, link.num_ranks)
        return link.seconds(sent, rounds=rounds) + CODEC_S_PER_NUMBER * numel


@dataclass(frozen=True)
class Compressed(_Coded):
    """Agree through ``codec``, and forget what it loses. For codes whose error is small beside the noise: bfloat16, 8 bits.

    The exchange is that of `ErrorFeedback`; there is no state.

    >>> from gradwire.compress.cast import Cast
    >>> Compressed(Cast(torch.bfloat16)).words()
    'bfloat16, tensors below 1,024 numbers exact'
    """

    codec: Compressor

    def __post_init__(self) -> None:
        self._check()

    def init(self, bucket: Bucket, group: Group) -> State:
        return {}

    def reduce(self, bucket: Bucket, state: State, group: Group, step: int) -> tuple[Tensor, State]:
        return exchange(self.codec, bucket, state, group, key_of(step, bucket.index))

    def resplit(self, states: Sequence[State], bucket: Bucket, group: Group) -> State:
        return {}

    def words(self) -> str:
        return f"{self.codec.words()}, {SMALL_EXACT}"


@dataclass(frozen=True)
class ErrorFeedback(_Coded):
    """Agree through ``codec``; what a message loses is added to what the next one carries, so that nothing is lost for ever.

    Sum of the means given so far + all residuals = sum of the true means (Karimireddy et al., arXiv 1901.09847).

    Two ranks, or a code whose messages cannot be summed: one all-gather; every rank adds all messages in rank order.
    Otherwise an all-to-all of n equal shares; each rank adds its share in rank order, encodes the sum (that loss has a
    residual too, at the share's owner) and gathers: every rank decodes the same bytes, so replicas are bit-identical.
    Tensors of fewer than 1,024 numbers travel exact.

    State: ``residual`` (numel, padded to n shares of whole blocks,) and, with shares, ``shard_residual`` (share,), float32.

    >>> from gradwire.compress.quantize import Quantize
    >>> ErrorFeedback(Quantize(bits=4)).sent_bytes(1_000_000, num_ranks=2)
    515724
    """

    codec: Compressor

    def __post_init__(self) -> None:
        self._check()

    def init(self, bucket: Bucket, group: Group) -> State:
        numel, device = bucket.flat.numel(), bucket.flat.device
        if not _two_phases(self.codec, group.size):
            return {"residual": torch.zeros(numel, device=device)}
        share = share_of(numel, group.size)
        return {
            "residual": torch.zeros(group.size * share, device=device),
            "shard_residual": torch.zeros(share, device=device),
        }

    def reduce(self, bucket: Bucket, state: State, group: Group, step: int) -> tuple[Tensor, State]:
        return exchange(self.codec, bucket, state, group, key_of(step, bucket.index))

    def resplit(self, states: Sequence[State], bucket: Bucket, group: Group) -> State:
        following = dict(self.init(bucket, group))
        numel = bucket.flat.numel()
        if states:
            following["residual"][:numel] = still_to_send(states, numel).to(bucket.flat.device) / group.size
        return following

    def words(self) -> str:
        return f"{self.codec.words()}, error feedback, {SMALL_EXACT}"


def key_of(step: int, index: int) -> int:
    """Equal on all ranks, another one for each step and bucket; at least 0, below 2^63.

    >>> len({key_of(step, index) for step in range(100) for index in range(100)})
    10000
    """
    return (step * 0x9E3779B97F4A7C15 + index * 0xBF58476D1CE4E5B9) % (1 << 63)


def share_of(numel: int, num_ranks: int) -> int:
    """Numbers in each of ``num_ranks`` equal shares, a multiple of 256.

    >>> share_of(1000, 3)
    512
    """
    return -(-numel // (num_ranks * UNIT)) * UNIT


def still_to_send(states: Sequence[Mapping[str, Tensor]], numel: int) -> Tensor:
    """(numel,) float32: what the ranks with these states, in rank order, have together still to send."""
    total = torch.stack([state["residual"][:numel] for state in states]).sum(0)
    shards = [state["shard_residual"] for state in states if "shard_residual" in state]
    return total + torch.cat(shards)[:numel] if shards else total


def exchange(codec: Compressor, bucket: Bucket, state: State, group: Group, key: int) -> tuple[Tensor, State]:
    """The sum of all ranks' ``bucket.flat + residual``, as far as the codec tells it, and what it lost.

    A state without residuals gives none back. ``bucket.flat`` may be overwritten.
    """
    if not bucket.flat.numel():
        return bucket.flat, state
    two = _two_phases(codec, group.size)
    mean, following = (_in_shares if two else _at_once)(codec, bucket.flat, state, group, key)
    return mean[: bucket.flat.numel()].to(bucket.flat.dtype), following


def _two_phases(codec: Compressor, num_ranks: int) -> bool:
    return codec.phases == 2 and num_ranks > 2


def _at_once(codec: Compressor, flat: Tensor, state: State, group: Group, key: int) -> tuple[Tensor, State]:
    residual = state.get("residual")
    row = None if residual is None else residual.unsqueeze(0)
    message, left = codec.encode(flat.to(torch.float32).unsqueeze(0), row, key=key)
    total = flat if flat.dtype is torch.float32 else torch.empty(flat.numel(), device=flat.device)
    codec.decode_sum(group.all_gather(message[0]), total, key=key)
    return total, {} if left is None else {"residual": left[0]}


def _in_shares(codec: Compressor, flat: Tensor, state: State, group: Group, key: int) -> tuple[Tensor, State]:
    share = share_of(flat.numel(), group.size)
    residual, shard_residual = state.get("residual"), state.get("shard_residual")
    rows = None if residual is None else residual.view(group.size, share)
    messages, left = codec.encode(_padded(flat, group.size * share).view(group.size, share), rows, key=key)
    total = torch.empty(1, share, device=flat.device)
    codec.decode_sum(group.all_to_all(messages), total[0], key=key)
    row = None if shard_residual is None else shard_residual.unsqueeze(0)
    message, shard_left = codec.encode(total, row, key=key)
    mean = codec.decode(group.all_gather(message[0]), share, key=key).view(-1)
    if left is None or shard_left is None:
        return mean, {}
    return mean, {"residual": left.view(-1), "shard_residual": shard_left[0]}


def _padded(flat: Tensor, numel: int) -> Tensor:
    if flat.numel() == numel:
        return flat.to(torch.float32)
    padded = torch.empty(numel, device=flat.device)
    padded[: flat.numel()] = flat
    padded[flat.numel() :] = 0
    return padded
