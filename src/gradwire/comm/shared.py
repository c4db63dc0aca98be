"""`SharedGroup`: the ranks of one host, through memory they share."""

from __future__ import annotations

import mmap
import sys
from collections import deque
from collections.abc import Callable
from functools import cache
from math import ceil
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor

from gradwire.comm import futex
from gradwire.comm.arrivals import Arrivals
from gradwire.comm.memory import HEADER_BYTES, populate, share_memory
from gradwire.comm.stage import STAGE_BYTES, Stage, combine, share_of
from gradwire.comm.text import all_gather_text
from gradwire.core.group import Group, Levels, Op

_STAGED, _READY, _DONE = range(3)
_CPU = torch.device("cpu")
_PAGE_BYTES = 4096
_PASS_BYTES = 256 << 10  # so much of every rank's copy is summed and written back before the next
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
_SUMS = frozenset((*_FLOATS, *_INTEGERS))


def open_shared(inner: Group, *, timeout_s: float) -> Group:
    """A `SharedGroup` over ``inner``, whose ranks share a host; all ranks must call it.

    If any rank cannot, all get ``inner`` itself, and rank 0 says why, once a reason; on another system than Linux on x86-64
    it is ``inner`` without a word.
    """
    if not futex.supported():
        return inner
    start = HEADER_BYTES + ceil(Arrivals.num_bytes(3, inner.size) / _PAGE_BYTES) * _PAGE_BYTES
    shared = share_memory(start - HEADER_BYTES + 2 * inner.size * STAGE_BYTES, inner)
    if isinstance(shared, str):
        return _without(inner, shared)
    arrivals, trouble = None, ""
    try:
        arrivals = Arrivals(
            shared.memory, kinds=3, peers=shared.peers, rank=inner.rank, name=inner.name, timeout_s=timeout_s
        )
    except OSError as error:
        trouble = f"other processes cannot be watched ({error})"
    troubles = [f"rank {rank}: {why}" for rank, why in enumerate(all_gather_text(inner, trouble, _CPU)) if why]
    if arrivals is None or troubles:
        if arrivals is not None:
            arrivals.close()
        return _without(inner, troubles[0])
    memory = torch.frombuffer(shared.memory, dtype=torch.uint8, offset=start).view(2, inner.size, STAGE_BYTES)
    stage = Stage(memory, arrivals, _STAGED, rank=inner.rank, size=inner.size)
    return SharedGroup(inner, arrivals, stage)


def _without(inner: Group, why: str) -> Group:
    if inner.rank == 0:
        _say(f"gradwire: the ranks of this host talk over the network, not through memory they share: {why}")
    return inner


@cache
def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class SharedGroup:
    """A ``Group`` whose ranks, processes or threads, are on one host and whose tensors are on the CPU.

    What ``new_zeros`` gives is *resident*: all ranks' copies are in one memory, and ``all_reduce`` of it (or of a view,
    the same on all ranks) sums in place, every rank its share of all copies. Other tensors are copied in and out through a
    `Stage`. ``send`` and ``recv``, and sums of numbers that torch cannot add, go through ``inner``.

    Sums are in rank order. Every rank must call ``new_zeros`` alike. A copy or a pickle of a resident tensor's *storage*
    holds all ranks' copies.
    """

    sums_in_rank_order = True

    def __init__(self, inner: Group, arrivals: Arrivals, stage: Stage) -> None:
        self._inner = inner
        self._arrivals = arrivals
        self._stage = stage
        self._resident: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # by the address of its first row
        self._begun: deque[Callable[[], None]] = deque()
        self.name = inner.name
        self.rank = inner.rank
        self.size = inner.size
        self.levels: Levels | None = None
        finalize(self, arrivals.close)

    # --- memory ------------------------------------------------------------------------------------------------------

    def new_zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not numel or device.type != "cpu" or dtype not in _SUMS:
            return torch.zeros(numel, dtype=dtype, device=device)
        row_bytes = ceil(numel * dtype.itemsize / _PAGE_BYTES) * _PAGE_BYTES
        shared = share_memory(row_bytes * self.size, self)
        if isinstance(shared, str):
            _without(self, shared)
            return torch.zeros(numel, dtype=dtype, device=device)
        return self._copy(shared.memory, row_bytes)[: numel * dtype.itemsize].view(dtype)

    def _copy(self, memory: mmap.mmap, row_bytes: int) -> Tensor:
        """This rank's row of it (row_bytes,). The memory lives as long as tensors in it do: here only its address is kept."""
        populate(memory)
        whole = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES)
        self._resident[whole.data_ptr()] = memory
        return whole[self.rank * row_bytes :]

    def _row(self, flat: Tensor) -> int:
        """How far apart, in elements, all ranks' copies of ``flat`` are in its storage; 0 if it is not resident."""
        memory = self._resident.get(flat.untyped_storage().data_ptr())
        return 0 if memory is None else (len(memory) - HEADER_BYTES) // self.size // flat.itemsize

    # --- sums --------------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        self._finish_begun()
        if not _takes(tensor) or tensor.dtype not in _SUMS or not tensor.is_contiguous():
            return self._inner.all_reduce(tensor, op)
        if tensor.numel():
            self._start(tensor.detach().view(-1), op)()
        return tensor

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        if not _takes(tensor) or tensor.dtype not in _SUMS or not tensor.is_contiguous():
            return self._inner.begin_all_reduce(tensor)
        if not tensor.numel():
            return lambda: tensor
        finish = self._start(tensor.detach().view(-1), "sum")
        self._begun.append(finish)

        def wait() -> Tensor:
            while finish in self._begun:
                self._begun.popleft()()
            return tensor

        return wait

    def _start(self, flat: Tensor, op: Op) -> Callable[[], None]:
        """Say that a resident ``flat`` is ready; the rest is left to the returned function."""
        row = self._row(flat)
        if not row:
            return lambda: self._stage.all_reduce(flat, op)
        number = self._arrivals.post(_READY)
        return lambda: self._all_reduce_resident(flat, row, op, number)

    def _all_reduce_resident(self, flat: Tensor, row: int, op: Op, number: int) -> None:
        self._arrivals.wait(_READY, number)
        share = share_of(flat, self.rank, self.size)
        first, step = flat.storage_offset() - self.rank * row, _PASS_BYTES // flat.itemsize
        for start in range(share.start, share.stop, step):
            shape = (min(step, share.stop - start),)
            parts = [flat.as_strided(shape, (1,), first + rank * row + start) for rank in range(self.size)]
            combine(parts, op, out=parts[0])
            for part in parts[1:]:
                part.copy_(parts[0])
        self._arrivals.wait(_DONE, self._arrivals.post(_DONE))

    def _finish_begun(self) -> None:
        """Every rank has begun the same ones before the collective that comes now."""
        while self._begun:
            self._begun.popleft()()

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        if not _takes(tensor) or tensor.dtype not in _SUMS:
            return self._inner.reduce_scatter(tensor)
        self._finish_begun()
        if not tensor.numel():
            return tensor.new_empty(tensor.shape[1:])
        rows = tensor.detach().contiguous().view(self.size, -1)
        total = torch.empty_like(rows[0])
        self._stage.reduce_scatter(rows, total)
        return total.view(tensor.shape[1:])

    # --- bytes from rank to rank -------------------------------------------------------------------------------------

    def all_gather(self, tensor: Tensor) -> Tensor:
        if not _takes(tensor):
            return self._inner.all_gather(tensor)
        self._finish_begun()
        gathered = tensor.new_empty((self.size, *tensor.shape))
        if tensor.numel():
            self._stage.all_gather(_bytes(tensor).view(-1), _bytes(gathered).view(self.size, -1))
        return gathered

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        if not _takes(tensor) or not tensor.is_contiguous():
            return self._inner.broadcast(tensor, src)
        self._finish_begun()
        if tensor.numel():
            self._stage.broadcast(_bytes(tensor).view(-1), src)
        return tensor

    def all_to_all(self, tensor: Tensor) -> Tensor:
        if not _takes(tensor):
            return self._inner.all_to_all(tensor)
        self._finish_begun()
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if tensor.numel():
            self._stage.all_to_all(_bytes(tensor).view(self.size, -1), _bytes(received).view(self.size, -1))
        return received

    def barrier(self) -> None:
        self._finish_begun()
        self._arrivals.wait(_DONE, self._arrivals.post(_DONE))

    def send(self, tensor: Tensor, dst: int) -> None:
        self._inner.send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        return self._inner.recv(tensor, src)


def _takes(tensor: Tensor) -> bool:
    lazy = tensor.is_conj() or tensor.is_neg()  # its memory does not hold its values
    return tensor.is_cpu and tensor.layout is torch.strided and not lazy


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
