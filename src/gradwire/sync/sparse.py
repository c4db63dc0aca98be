"""Sparse gradients: ranks gather one another's rows."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.core.group import Group


def sum_sparse(grad: Tensor | None, like: Tensor, group: Group) -> Tensor:
    """Sum sparse COO gradients over the ranks by gathering their rows.

    grad: sparse (*shape) or None for no rows. like: the parameter (*shape), dense. Returns coalesced sparse (*shape), the
    same on all ranks. Sends (n-1) x rows x (8 + row bytes), so it pays while a batch touches few rows.
    """
    empty = torch.sparse_coo_tensor(
        torch.zeros((1, 0), dtype=torch.int64, device=like.device),
        like.new_zeros((0, *like.shape[1:])),
        like.shape,
        check_invariants=False,
    )
    mine = empty if grad is None else grad.coalesce()
    rows, values = mine.indices()[0], mine.values()
    counts = group.all_gather(torch.tensor([rows.numel()], device=like.device)).flatten().tolist()
    longest = max(counts)
    all_rows = group.all_gather(torch.nn.functional.pad(rows, (0, longest - rows.numel())))
    padding = values.new_zeros((longest - values.shape[0], *values.shape[1:]))
    all_values = group.all_gather(torch.cat([values, padding]))
    kept_rows = torch.cat([row[:count] for row, count in zip(all_rows, counts, strict=True)])
    kept_values = torch.cat([value[:count] for value, count in zip(all_values, counts, strict=True)])
    return torch.sparse_coo_tensor(kept_rows.unsqueeze(0), kept_values, like.shape, check_invariants=False).coalesce()
