"""torch's own door to the same groups: what torch builds on a `DeviceMesh` (FSDP2, DTensor) goes through `Group` too."""

# torch's stubs of ProcessGroup name and type these methods in other ways than its own callers use them
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gradwire.core.group import Group, Op
from gradwire.core.mesh import AXES, Mesh
from gradwire.errors import UsageError


class HasOp(Protocol):
    """torch's options of a reducing collective."""

    reduceOp: object


class HasRoot(Protocol):
    """torch's options of a collective with a root."""

    rootRank: int


_OPS: Mapping[Op, object] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_SERIAL = itertools.count()


def open_torch_mesh(mesh: Mesh, rank: int, group: Callable[[str], Group], device: torch.device) -> DeviceMesh:
    """A ``DeviceMesh`` with the dimensions `AXES`, whose collectives are those of ``group(axis)``.

    So torch's collectives are stamped, add in rank order and move the fewest bytes, and on one host go through shared
    memory, as ours do. Needs torch's default group; all ranks call it.
    """
    if not dist.is_initialized():
        raise UsageError("a mesh with several axes needs processes of their own; start with gradwire run")
    groups = [_open(mesh.ranks_along((axis,), rank), group(axis), device) for axis in AXES]
    ranks = torch.arange(mesh.size).view(mesh.sizes)
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=AXES)


def _open(ranks: Sequence[int], group: Group, device: torch.device) -> dist.ProcessGroup:
    backend = f"gradwire{next(_SERIAL)}"
    dist.Backend.register_backend(backend, lambda *_: GroupAsTorch(group), devices=[device.type])
    return cast("dist.ProcessGroup", dist.new_group(list(ranks), backend=backend, use_local_synchronization=True))


class _Done(dist.Work):
    """A collective that has ended."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class GroupAsTorch(dist.ProcessGroup):
    """A torch process group whose collectives are a `Group`'s. Blocking: the work it returns is done."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group.size)  # pyright: ignore[reportCallIssue]
        self._group = group
        self._name = group.name

    # --- what torch asks of a process group made in Python -----------------------------------------------------------

    def getBackendName(self) -> str:
        return "gradwire"

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._group.name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._group.name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        """It has one."""

    # --- collectives -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: HasOp | None = None) -> dist.Work:
        mean = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        op: Op = "sum" if mean else _op(opts)
        for tensor in tensors:
            _into(tensor, lambda whole: self._group.all_reduce(whole, op))
            if mean:
                tensor.div_(self._group.size)
        return _Done()

    def allreduce_coalesced(self, tensors: list[Tensor], opts: HasOp | None = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: HasRoot | None = None) -> dist.Work:
        src = 0 if opts is None else opts.rootRank
        for tensor in tensors:
            _into(tensor, lambda whole: self._group.broadcast(whole, src))
        return _Done()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> dist.Work:
        for rows, mine in zip(outputs, inputs, strict=True):
            for row, value in zip(rows, self._group.all_gather(mine.contiguous()), strict=True):
                row.copy_(value)
        return _Done()

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: object = None) -> dist.Work:
        output.view(-1).copy_(self._group.all_gather(mine.contiguous()).view(-1))
        return _Done()

    def reduce_scatter_single(self, output: Tensor, rows: Tensor, opts: HasOp | None = None) -> dist.Work:
        mean = opts is not None and opts.reduceOp == dist.ReduceOp.AVG
        if not mean and (op := _op(opts)) != "sum":
            raise UsageError(f"reduce-scatter by {op} over {self._group.name}; use SUM or AVG")
        total = self._group.reduce_scatter(rows.contiguous().view(self._group.size, *output.shape))
        output.copy_(total / self._group.size if mean else total)
        return _Done()

    def all_to_all_single(
        self, output: Tensor, rows: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: object = None
    ) -> dist.Work:
        if len({*output_sizes, *input_sizes}) > 1:
            raise UsageError(f"all-to-all of unequal parts over {self._group.name}; use equal parts")
        mine = rows.contiguous().view(self._group.size, -1)
        output.view(-1).copy_(self._group.all_to_all(mine).view(-1))
        return _Done()

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: HasRoot | None = None) -> dist.Work:
        src = 0 if opts is None else opts.rootRank
        if self._group.rank != src:
            _into(outputs[0], lambda whole: self._group.recv(whole, src))
            return _Done()
        for rank, value in enumerate(inputs[0]):
            if rank == src:
                outputs[0].copy_(value)
            else:
                self._group.send(value.contiguous(), rank)
        return _Done()

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        self._group.send(tensors[0].contiguous(), dst)
        return _Done()

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        _into(tensors[0], lambda whole: self._group.recv(whole, src))
        return _Done()

    def barrier(self, opts: object = None) -> dist.Work:
        self._group.barrier()
        return _Done()

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None
    ) -> dist.Work:
        for output, mine in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, mine)
        return _Done()

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: HasOp | None = None
    ) -> dist.Work:
        for output, rows in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, rows, opts)
        return _Done()

    # the names by which torch's C++ asks for the same
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _op(opts: HasOp | None) -> Op:
    if opts is None:
        return "sum"
    for name, known in _OPS.items():
        if opts.reduceOp == known:
            return name
    raise UsageError(f"reducing by {opts.reduceOp}; use SUM, AVG, MAX or MIN")


def _into(tensor: Tensor, collective: Callable[[Tensor], Tensor]) -> None:
    """``tensor`` becomes what ``collective`` makes of it, whatever its strides."""
    whole = tensor.contiguous()
    result = collective(whole)
    if result.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.copy_(result)
