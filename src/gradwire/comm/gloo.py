"""Groups over one torch process group, and the group of one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.core.group import Levels, Op

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def open_group(
    store: dist.Store, *, name: str, rank: int, size: int, device: torch.device, timeout_s: float
) -> TorchGroup | SoloGroup:
    """Meet the other ranks under ``name`` in ``store`` and return the group; every rank of it must call this."""
    if size == 1:
        return SoloGroup(name)
    prefixed = dist.PrefixStore(f"group/{name}", store)
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # pyright: ignore[reportPrivateUsage]  # torch offers no public setter here
        made: object = dist.ProcessGroupNCCL(prefixed, rank, size, options)
    else:
        made = dist.ProcessGroupGloo(prefixed, rank, size, timeout)
    return TorchGroup(cast("dist.ProcessGroup", made), name)  # torch's stubs call them backends, without collectives


class TorchGroup:
    """A ``Group`` over a torch process group (Gloo on CPU, NCCL on GPUs).

    The process group's own methods are used, not ``torch.distributed``'s functions, because those only know groups
    made from the one default group of a process, and ranks may be threads here.
    """

    def __init__(self, process_group: dist.ProcessGroup, name: str) -> None:
        self._group = process_group
        self.name = name
        self.rank = process_group.rank()
        self.size = process_group.size()
        self.sums_in_rank_order = self.size < 3  # a ring adds in an order that depends on where the buffer is cut
        self.levels: Levels | None = None

    def new_zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.levels is not None:
            return self.levels.inside.new_zeros(numel, dtype, device)
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        if tensor.numel():
            self._group.allreduce([tensor], _OPS[op]).wait()
        return tensor

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        if not tensor.numel():
            return lambda: tensor
        work = self._group.allreduce([tensor], _OPS["sum"])

        def wait() -> Tensor:
            work.wait()
            return tensor

        return wait

    def all_gather(self, tensor: Tensor) -> Tensor:
        rows = tensor.new_empty((self.size, *tensor.shape))
        if tensor.numel():
            self._group.allgather([list(rows.unbind(0))], [tensor.contiguous()]).wait()
        return rows

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        # Gloo's own reduce-scatter moves twice the bytes and adds in an order that depends on the layout.
        rows = self.all_to_all(tensor)
        total = rows[0]
        for row in rows[1:]:
            total += row
        return total

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        if tensor.numel():
            self._group.broadcast([tensor], _broadcast_from(src)).wait()
        return tensor

    def all_to_all(self, tensor: Tensor) -> Tensor:
        rows = torch.empty_like(tensor)
        if tensor.numel():
            self._group.alltoall_base(rows, tensor.contiguous(), [], []).wait()
        return rows

    def send(self, tensor: Tensor, dst: int) -> None:
        self._group.send([tensor.contiguous()], dst, 0).wait()

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        self._group.recv([tensor], src, 0).wait()
        return tensor

    def barrier(self) -> None:
        self._group.barrier().wait()


def _broadcast_from(src: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = src
    return options


class SoloGroup:
    """The group of one rank: every collective is the identity, so that one process runs the same lines."""

    rank = 0
    size = 1
    sums_in_rank_order = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.levels: Levels | None = None

    def new_zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        return tensor

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        return tensor[0]

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        return tensor

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return tensor

    def send(self, tensor: Tensor, dst: int) -> None:
        raise ValueError(f"group {self.name} has one rank: there is nobody to send to")

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        raise ValueError(f"group {self.name} has one rank: there is nobody to receive from")

    def barrier(self) -> None:
        return
