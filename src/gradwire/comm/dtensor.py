"""Tensors of which each rank holds a part (torch's `DTensor`), beside plain ones: what this rank holds, and back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


@torch.no_grad()
def local_of(value: Tensor) -> Tensor:
    """What this rank holds of ``value``, the very tensor; a plain one itself."""
    return value.to_local() if isinstance(value, DTensor) else value


@torch.no_grad()
def laid_as(value: Tensor, like: Tensor) -> Tensor:
    """``value`` (a gradient) parted and replicated as ``like``: sums still to be taken over ranks are taken now."""
    if isinstance(value, DTensor) and isinstance(like, DTensor) and value.placements != like.placements:
        return value.redistribute(placements=like.placements)
    return value


@torch.no_grad()
def part_of(local: Tensor, like: Tensor) -> Tensor:
    """``local`` as this rank's part of a tensor such as ``like``; itself if ``like`` is plain."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@torch.no_grad()
def cut_as(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part, a copy, of a plain tensor that every rank has whole, laid out as ``like``."""
    if not isinstance(like, DTensor):
        return whole
    everywhere = [Replicate()] * like.device_mesh.ndim
    parted = DTensor.from_local(whole, like.device_mesh, everywhere, run_check=False).redistribute(
        placements=like.placements
    )
    return parted.to_local().clone()


def rows_of(num_rows: int, num_ranks: int, rank: int) -> slice:
    """Which of ``num_rows`` rows are ``rank``'s: shares of equal size, rounded up, so that the last may be short or empty.

    >>> [rows_of(5, 3, rank) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    share = -(-num_rows // num_ranks)
    return slice(min(rank * share, num_rows), min((rank + 1) * share, num_rows))


def row_maker(mesh: DeviceMesh) -> Callable[[Tensor, Tensor], Tensor]:
    """Makes ``(rows, param)`` a `DTensor` in the parameter's shape: ``rows`` are this rank's (`rows_of`) of what its copy has.

    mesh: with dimensions ``shard`` and ``tensor``. A parameter parted along ``tensor`` already is parted twice, in that order.
    """
    twice = _tensor_then_shard(mesh) if mesh["tensor"].size() > 1 else mesh["shard"]

    def as_rows(rows: Tensor, param: Tensor) -> Tensor:
        before = param.placements if isinstance(param, DTensor) else ()
        where, placements = (twice, (*before, Shard(0))) if before else (mesh["shard"], (Shard(0),))
        with torch.no_grad():
            return DTensor.from_local(
                rows, where, placements, run_check=False, shape=param.shape, stride=param.stride()
            )

    return as_rows


def _tensor_then_shard(mesh: DeviceMesh) -> DeviceMesh:
    names = ("tensor", "shard")
    ranks = mesh["shard", "tensor"].mesh.T.contiguous()
    groups = [mesh[name].get_group() for name in names]
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=names)


def mesh_place(value: Tensor) -> tuple[int, int]:
    """This rank's place along the first dimension of a `DTensor`'s mesh, and that dimension's size."""
    mesh = value.device_mesh if isinstance(value, DTensor) else None
    return (0, 1) if mesh is None else (mesh.get_local_rank(0), mesh.size(0))


def is_parted(value: Tensor) -> bool:
    """Whether each rank holds a part of ``value`` only."""
    return isinstance(value, DTensor)
