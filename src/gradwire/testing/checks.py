"""`check_group`: what every `Group` must do. Call it on all ranks."""

from __future__ import annotations

import torch

from gradwire.core.group import Group

SIZES = (0, 1, 2, 3, 7, 64, 1023, 4096)


def require(condition: bool, what: str) -> None:
    """Raise AssertionError saying ``what`` is wrong, unless ``condition`` holds."""
    if not condition:
        raise AssertionError(what)


def check_group(group: Group, *, device: str = "cpu") -> None:
    """Check every collective of ``group`` against its formula, for odd and empty sizes; all ranks call it.

    >>> from gradwire.comm.gloo import SoloGroup
    >>> check_group(SoloGroup("data/main"))
    """
    n, rank = group.size, group.rank
    require(0 <= rank < n, f"rank {rank} is outside 0..{n - 1}")
    for numel in SIZES:
        mine = torch.arange(numel, dtype=torch.float64, device=device) + 1000 * rank
        whole = torch.stack([torch.arange(numel, dtype=torch.float64, device=device) + 1000 * r for r in range(n)])
        require(torch.equal(group.all_reduce(mine.clone()), whole.sum(0)), f"all_reduce sum of {numel}")
        begun = [group.begin_all_reduce(times * mine) for times in (1, 2)]
        require(torch.equal(begun[0](), whole.sum(0)), f"begin_all_reduce of {numel}")
        require(torch.equal(begun[1](), 2 * whole.sum(0)), f"the second begin_all_reduce of {numel}")
        require(torch.equal(group.all_reduce(mine.clone(), "max"), whole[-1]), f"all_reduce max of {numel}")
        require(torch.equal(group.all_reduce(mine.clone(), "min"), whole[0]), f"all_reduce min of {numel}")
        require(torch.equal(group.all_gather(mine), whole), f"all_gather of {numel}")
        for src in range(n):
            require(torch.equal(group.broadcast(mine.clone(), src), whole[src]), f"broadcast of {numel} from {src}")
        rows = mine.repeat(n, 1) + 10_000 * torch.arange(n, device=device).unsqueeze(1)
        require(torch.equal(group.all_to_all(rows), whole + 10_000 * rank), f"all_to_all of {n} x {numel}")
        total = whole.sum(0) + 10_000 * rank * n
        require(torch.equal(group.reduce_scatter(rows), total), f"reduce_scatter of {n} x {numel}")
    _check_neighbours(group, device)
    group.barrier()


def _check_neighbours(group: Group, device: str) -> None:
    if group.size < 2:
        return
    mine, theirs = torch.full((5,), float(group.rank), device=device), torch.zeros(5, device=device)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    if group.rank % 2 == 0:
        group.send(mine, after)
        group.recv(theirs, before)
    else:
        group.recv(theirs, before)
        group.send(mine, after)
    require(bool((theirs == before).all()), f"recv from {before}")
