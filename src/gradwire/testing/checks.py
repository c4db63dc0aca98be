"""Conformance checks: what every `Group` and every `Reducer` must do. Call them on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.core.group import Group
from gradwire.core.reducer import Bucket, Link, Piece, Reducer

SIZES = (0, 1, 2, 3, 7, 64, 1023, 4096)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def _same_everywhere(tensor: Tensor, group: Group, what: str) -> None:
    rows = group.all_gather(tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor)
    _require(all(torch.equal(row, rows[0]) for row in rows), f"{what} differs between ranks")


def check_group(group: Group, *, device: str = "cpu") -> None:
    """Check every collective of ``group`` against its formula, for odd and empty sizes; all ranks call it.

    >>> from gradwire.comm.gloo import SoloGroup
    >>> check_group(SoloGroup("data/main"))
    """
    n, rank = group.size, group.rank
    _require(0 <= rank < n, f"rank {rank} is outside 0..{n - 1}")
    for numel in SIZES:
        mine = torch.arange(numel, dtype=torch.float64, device=device) + 1000 * rank
        whole = torch.stack([torch.arange(numel, dtype=torch.float64, device=device) + 1000 * r for r in range(n)])
        _require(torch.equal(group.all_reduce(mine.clone()), whole.sum(0)), f"all_reduce sum of {numel}")
        begun = [group.begin_all_reduce(times * mine) for times in (1, 2)]
        _require(torch.equal(begun[0](), whole.sum(0)), f"begin_all_reduce of {numel}")
        _require(torch.equal(begun[1](), 2 * whole.sum(0)), f"the second begin_all_reduce of {numel}")
        _require(torch.equal(group.all_reduce(mine.clone(), "max"), whole[-1]), f"all_reduce max of {numel}")
        _require(torch.equal(group.all_reduce(mine.clone(), "min"), whole[0]), f"all_reduce min of {numel}")
        _require(torch.equal(group.all_gather(mine), whole), f"all_gather of {numel}")
        for src in range(n):
            _require(torch.equal(group.broadcast(mine.clone(), src), whole[src]), f"broadcast of {numel} from {src}")
        rows = mine.repeat(n, 1) + 10_000 * torch.arange(n, device=device).unsqueeze(1)
        _require(torch.equal(group.all_to_all(rows), whole + 10_000 * rank), f"all_to_all of {n} x {numel}")
        total = whole.sum(0) + 10_000 * rank * n
        _require(torch.equal(group.reduce_scatter(rows), total), f"reduce_scatter of {n} x {numel}")
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
    _require(bool((theirs == before).all()), f"recv from {before}")


def check_reducer(reducer: Reducer, group: Group, *, exact: bool, steps: int = 5, device: str = "cpu") -> None:
    """Check ``reducer`` on ``group``; all ranks call it.

    Odd, empty and one-element buckets; zeros stay zero; the mean is the same bits on all ranks; ``state`` is not changed
    in place; an exact reducer gives the sum of contributions to rounding; 100 buckets end; the cost grows with size.

    >>> from gradwire.comm.gloo import SoloGroup
    >>> from gradwire.compress.exact import AllReduce
    >>> check_reducer(AllReduce(), SoloGroup("data/main"), exact=True)
    """
    for numel in SIZES:
        state = reducer.init(_bucket(torch.zeros(numel, device=device)), group)
        zero, _ = reducer.reduce(_bucket(torch.zeros(numel, device=device)), state, group, 0)
        _require(bool((zero == 0).all()), f"{numel} zeros do not stay zero")
        for step in range(steps):
            mine = _values(numel, step, group.rank, device) / group.size
            before = {name: value.clone() for name, value in state.items()}
            mean, following = reducer.reduce(_bucket(mine.clone()), state, group, step)
            _require(mean.shape == mine.shape, f"mean has shape {tuple(mean.shape)} instead of {tuple(mine.shape)}")
            unchanged = all(torch.equal(state[name], value) for name, value in before.items())
            _require(unchanged, "reduce changed its state in place")
            _same_everywhere(mean, group, f"the mean of {numel} at step {step}")
            if exact:
                truth = torch.stack([_values(numel, step, r, device) / group.size for r in range(group.size)]).sum(0)
                _require(torch.allclose(mean, truth, rtol=1e-6, atol=1e-6), f"the mean of {numel} is wrong")
            state = following
    for index in range(100):
        reducer.reduce(
            _bucket(_values(33, index, group.rank, device), index),
            reducer.init(_bucket(torch.zeros(33)), group),
            group,
            0,
        )
    _check_words(reducer, group.size)


def _check_words(reducer: Reducer, num_ranks: int) -> None:
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e8, num_ranks=max(2, num_ranks))
    _require(0 < reducer.cost(1_000, link) < reducer.cost(1_000_000, link), "cost does not grow with the size")
    _require(bool(reducer.words()), "words() is empty")


def _values(numel: int, step: int, rank: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    return torch.randn(numel, generator=generator).to(device)


def _bucket(flat: Tensor, index: int = 0) -> Bucket:
    return Bucket(index=index, flat=flat, pieces=(Piece(name="values", shape=(flat.numel(),), offset=0),))
