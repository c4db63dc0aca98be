"""The bucket layout: which parameters travel together, in which fixed order, and how large a bucket should be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradwire.comm.dtensor import local_of, rows_of
from gradwire.compress import kernels
from gradwire.core.reducer import Reducer

START_BUCKET_BYTES = 2 << 20
MIN_BUCKET_BYTES = 512 << 10
MAX_BUCKET_BYTES = 32 << 20
ALIGNMENT_BYTES = 64  # a slot starts on a cache line, so that the optimizer's kernels see aligned gradients


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """What the layout must know of one parameter. index: its place in registration order. reducer: which takes it.

    num_parts: how many ranks own rows of it; shape: of the largest part; whole_shape: of all. summed: over the ranks along
    ``shard`` already.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    reducer: Reducer
    num_parts: int = 1
    whole_shape: tuple[int, ...] = ()
    summed: bool = False

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
    """One bucket: ``num_parts`` (ranks that own rows) times ``numel`` elements, alignment gaps, which stay zero, included."""

    slots: tuple[Slot, ...]
    numel: int

    @property
    def num_parts(self) -> int:
        return self.slots[0].param.num_parts

    @property
    def summed(self) -> bool:
        return self.slots[0].param.summed

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

    A bucket holds one dtype, device, reducer and number of parts, and at most ``bucket_bytes``, except that a parameter larger
    than that has a bucket to itself. The result depends on the arguments only, so it is the same on all ranks.

    >>> from gradwire.compress.exact import AllReduce
    >>> cpu, f32 = torch.device("cpu"), torch.float32
    >>> one = dict(dtype=f32, device=cpu, reducer=AllReduce())
    >>> specs = [ParamSpec(index=i, name=f"w{i}", shape=(n,), **one) for i, n in enumerate([100, 3, 5])]
    >>> [[slot.param.name for slot in bucket.slots] for bucket in lay_out(specs, bucket_bytes=256)]
    [['w2', 'w1'], ['w0']]
    """
    buckets: list[BucketSpec] = []
    open_slots: dict[tuple[torch.dtype, torch.device, Reducer, int, bool], list[Slot]] = {}
    for param in reversed(params):
        key = (param.dtype, param.device, param.reducer, param.num_parts, param.summed)
        slots = open_slots.setdefault(key, [])
        if slots and (_end(slots[-1]) + param.numel) * param.num_parts * param.dtype.itemsize > bucket_bytes:
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


def spec_of(
    index: int, name: str, param: Tensor, reducer: Reducer, *, num_parts: int = 1, summed: bool = False
) -> ParamSpec:
    """A parameter as the layout sees it; ``reducer`` chooses who takes it. num_parts: ranks that own rows of it."""
    whole = tuple(local_of(param).shape)
    parts = num_parts if whole else 1  # a scalar has no rows: everybody's
    largest = rows_of(whole[0], parts, 0).stop if whole else 0
    shape = (largest, *whole[1:]) if whole else whole
    return ParamSpec(
        index=index,
        name=name,
        shape=shape,
        dtype=param.dtype,
        device=param.device,
        reducer=reducer.choose(name, shape),
        num_parts=parts,
        whole_shape=whole,
        summed=summed,
    )


def is_finite(values: Tensor) -> Tensor | bool:
    """Whether no value is NaN or infinite; a bool tensor () is not waited for.

    Where no kernel looks at each value the sum tells, 60 times faster than torch's look at each. Half precision is summed in
    float32; values so large that their sum overflows count as infinite.
    """
    if (fine := kernels.finite(values)) is not None:
        return fine
    total = values.sum(dtype=torch.float32) if values.dtype in (torch.float16, torch.bfloat16) else values.sum()
    return torch.isfinite(total)


def difference(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor | bool:
    """``out = left - right``; returns whether all of it is finite, as `is_finite` does."""
    if (fine := kernels.subtract(left, right, out)) is not None:
        return fine
    torch.sub(left, right, out=out)
    return is_finite(out)


def nonfinite_grads(names: Sequence[str], params: Sequence[nn.Parameter]) -> list[str]:
    """Whose ``.grad`` has a NaN or an infinity."""
    grads = [(name, param.grad) for name, param in zip(names, params, strict=True) if param.grad is not None]
    dense = [(name, grad.coalesce().values() if grad.is_sparse else local_of(grad)) for name, grad in grads]
    return [name for name, fine in [(name, is_finite(grad)) for name, grad in dense] if not fine]


def best_bucket_bytes(total_bytes: int, exchange_s: float, *, latency_s: float, backward_s: float) -> int:
    """The size that leaves the least exposed, within 0.5 to 32 MiB.

    With nb buckets about ``T_c / nb + nb latency`` stays exposed when backward outlasts the exchange, and
    ``T_c - T_b + T_b / nb + nb latency`` when it does not (T_c the exchange's, T_b backward's seconds); either way the best
    nb is ``sqrt(min(T_c, T_b) / latency)``. A bucket costs its rank's core about as much again as its latency (0.23 ms beside
    0.2 ms, measured), so latency counts twice.

    >>> best_bucket_bytes(45_000_000, 0.378, latency_s=300e-6, backward_s=0.28) // 1000
    2083
    """
    hidden_s = min(exchange_s, backward_s)
    if hidden_s <= 0 or latency_s <= 0:
        return START_BUCKET_BYTES
    wanted = total_bytes * math.sqrt(2 * latency_s / hidden_s)
    return int(min(max(wanted, MIN_BUCKET_BYTES), MAX_BUCKET_BYTES))
