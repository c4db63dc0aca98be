"""Plain tensors and `DTensor`s alike: the part of the whole that this rank holds, and a tensor laid out like another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from gradwire.checkpoint.pieces import Box, cut
from gradwire.comm.dtensor import local_of
from gradwire.errors import UsageError


class _Strided(Protocol):
    """torch's private placement of a dimension that a later mesh dimension has cut before this one (FSDP2 on tensor parallel)."""

    dim: int


def held(name: str, tensor: Tensor) -> tuple[Box, Tensor]:
    """The part of ``tensor`` that this rank holds, and where it lies in the whole.

    A rank outside a DTensor's mesh holds an empty part. Raises UsageError for a DTensor that is cut in no known way.
    """
    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape), tensor
    local = tensor.to_local()
    box = box_of(name, tensor)
    if box.numel and tuple(local.shape) != box.length:
        raise UsageError(
            f"{name} is cut as {tensor.placements}, but this rank holds {tuple(local.shape)} of it; use rows"
        )
    return box, local


def box_of(name: str, tensor: DTensor) -> Box:
    """Where this rank's part of a DTensor lies in the whole."""
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return Box((0,) * tensor.dim(), (0,) * tensor.dim())
    first: list[tuple[int, int, int]] = []
    last: list[tuple[int, int, int]] = []
    for index, placement in enumerate(tensor.placements):
        parts = tensor.device_mesh.size(index)
        if isinstance(placement, Shard):
            first.append((placement.dim % tensor.dim(), parts, place[index]))
        elif type(placement).__name__ == "_StridedShard":
            last.insert(0, (cast("_Strided", placement).dim % tensor.dim(), parts, place[index]))
        elif not placement.is_replicate():
            raise UsageError(f"{name} is cut as {placement}; a checkpoint holds sums, not what is still to be summed")
    return cut(tensor.shape, first + last)


def wanted(name: str, like: Tensor) -> Box:
    """The part that this rank needs of a tensor laid out like ``like``."""
    return box_of(name, like) if isinstance(like, DTensor) else Box.whole(like.shape)


def laid_out(local: Tensor, like: Tensor) -> Tensor:
    """``local``, this rank's part, as a tensor like ``like``: on its device, and on its mesh if it has one."""
    if not isinstance(like, DTensor):
        return local.to(like.device)
    local = local.to(like.to_local().device)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=_strides(like.shape)
    )


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two names of one tensor: where its entries lie."""
    local = local_of(tensor)
    where = (local.untyped_storage().data_ptr(), local.storage_offset(), local.stride(), tuple(local.shape))
    return (*where, tensor.dtype, tuple(tensor.shape))
