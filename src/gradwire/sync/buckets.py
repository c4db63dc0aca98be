"""The bucket layout: which parameters travel together, in which fixed order, and how large a bucket should be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.core.reducer import Link, Reducer

START_BUCKET_BYTES = 2 << 20
MIN_BUCKET_BYTES = 512 << 10
MAX_BUCKET_BYTES = 32 << 20
ALIGNMENT_BYTES = 64  # a slot starts on a cache line, so that the optimizer's kernels see aligned gradients


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """What the layout must know of one parameter. index: its place in registration order. reducer: which takes it."""

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    reducer: Reducer

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One parameter's place in its bucket; offset in elements."""

    param: ParamSpec
    offset: int


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """One bucket. numel counts the alignment gaps, which stay zero."""

    slots: tuple[Slot, ...]
    numel: int

    @property
    def dtype(self) -> torch.dtype:
        return self.slots[0].param.dtype

    @property
    def device(self) -> torch.device:
        return self.slots[0].param.device

    @property
    def reducer(self) -> Reducer:
        return self.slots[0].param.reducer


def lay_out(params: Sequence[ParamSpec], bucket_bytes: int) -> tuple[BucketSpec, ...]:
    """Fill buckets in reverse registration order, which is about the order in which backward finishes.

    A bucket holds one dtype, device and reducer, and at most ``bucket_bytes``, except that a parameter larger than that has a
    bucket to itself. The result depends on the arguments only, so it is the same on all ranks.

    >>> from gradwire.compress.exact import AllReduce
    >>> cpu, f32 = torch.device("cpu"), torch.float32
    >>> one = dict(dtype=f32, device=cpu, reducer=AllReduce())
    >>> specs = [ParamSpec(index=i, name=f"w{i}", shape=(n,), **one) for i, n in enumerate([100, 3, 5])]
    >>> [[slot.param.name for slot in bucket.slots] for bucket in lay_out(specs, bucket_bytes=256)]
    [['w2', 'w1'], ['w0']]
    """
    buckets: list[BucketSpec] = []
    open_slots: dict[tuple[torch.dtype, torch.device, Reducer], list[Slot]] = {}
    for param in reversed(params):
        key = (param.dtype, param.device, param.reducer)
        slots = open_slots.setdefault(key, [])
        if slots and (_end(slots[-1]) + param.numel) * param.dtype.itemsize > bucket_bytes:
            buckets.append(_closed(slots))
            open_slots[key] = slots = []
        slots.append(Slot(param=param, offset=_end(slots[-1]) if slots else 0))
    return (*buckets, *(_closed(slots) for slots in open_slots.values() if slots))


def _end(slot: Slot) -> int:
    """Where the next slot may start, in elements."""
    unit = max(1, ALIGNMENT_BYTES // slot.param.dtype.itemsize)
    return math.ceil((slot.offset + slot.param.numel) / unit) * unit


def _closed(slots: list[Slot]) -> BucketSpec:
    return BucketSpec(slots=tuple(slots), numel=_end(slots[-1]))


def best_bucket_bytes(total_bytes: int, link: Link, *, backward_s: float) -> int:
    """The size that leaves the least exposed, within 0.5 to 32 MiB.

    With nb buckets about ``T_c / nb + nb latency`` stays exposed when backward outlasts the exchange, and
    ``T_c - T_b + T_b / nb + nb latency`` when it does not (T_c the exchange's, T_b backward's seconds); either way the best
    nb is ``sqrt(min(T_c, T_b) / latency)``.

    >>> gigabit = Link(latency_s=300e-6, bandwidth_bytes_per_s=119e6, num_ranks=2)
    >>> best_bucket_bytes(45_000_000, gigabit, backward_s=0.28) // 1000
    1472
    """
    exchange_s = link.ring_factor * total_bytes / link.bandwidth_bytes_per_s
    hidden_s = min(exchange_s, backward_s)
    if hidden_s <= 0 or link.latency_s <= 0:
        return START_BUCKET_BYTES
    wanted = total_bytes * math.sqrt(link.latency_s / hidden_s)
    return int(min(max(wanted, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES))
