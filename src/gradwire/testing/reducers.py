"""`check_reducer`: what every `Reducer` must do. Call it on all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.comm.gloo import SoloGroup
from gradwire.comm.text import all_gather_text
from gradwire.core.group import Group
from gradwire.core.reducer import Bucket, Link, Piece, Reducer, State
from gradwire.testing.checks import SIZES, require

DTYPES = (torch.float64, torch.float16, torch.bfloat16)
TOLERANCE = 1e-5  # of the largest number that was added: float32 sums of a few dozen terms


def check_reducer(reducer: Reducer, group: Group, *, exact: bool, steps: int = 5, device: str = "cpu") -> None:
    """Check ``reducer`` on ``group``; all ranks call it.

    Odd, empty and one-element buckets, of every dtype; zeros stay zero; the mean is the same bits on all ranks; ``state`` is
    not changed in place, nor spoiled by a NaN on one rank; an exact reducer gives the sum of contributions to rounding, and
    one that keeps a ``residual`` loses nothing: means given + what is still to send = true means; a copied state goes
    on with the same bits; another world size takes over what is still to send; 100 buckets end; the cost grows.

    >>> from gradwire.compress.exact import AllReduce
    >>> check_reducer(AllReduce(), SoloGroup("data/main"), exact=True)
    """
    for numel in SIZES:
        zeros = torch.zeros(numel, device=device)
        zero, _ = reducer.reduce(_bucket(zeros.clone()), reducer.init(_bucket(zeros), group), group, 0)
        require(bool((zero == 0).all()), f"{numel} zeros do not stay zero")
        _check_steps(reducer, group, zeros, exact=exact, steps=steps)
    for dtype in DTYPES:
        _check_dtype(reducer, group, torch.zeros(1023, dtype=dtype, device=device))
    _check_nonfinite(reducer, group, torch.zeros(4096, device=device))
    _check_copied_state(reducer, group, torch.zeros(4096, device=device))
    for index in range(100):
        bucket = _bucket(_values(torch.zeros(33, device=device), index, group.rank), index)
        reducer.reduce(bucket, reducer.init(bucket, group), group, 0)
    _check_words(reducer, group.size)


def _check_steps(reducer: Reducer, group: Group, zeros: Tensor, *, exact: bool, steps: int) -> None:
    state = reducer.init(_bucket(zeros), group)
    given, truth, largest = zeros.clone(), zeros.clone(), 0.0
    for step in range(steps):
        what = f"the mean of {zeros.numel()} at step {step}"
        before = {name: value.clone() for name, value in state.items()}
        mine = _values(zeros, step, group.rank) / group.size
        mean, following = reducer.reduce(_bucket(mine.clone()), state, group, step)
        require(mean.shape == mine.shape, f"{what} has shape {tuple(mean.shape)}")
        require(_equal(state, before), "reduce changed its state in place")
        _same_everywhere(mean, group, what)
        true = torch.stack([_values(zeros, step, rank) / group.size for rank in range(group.size)]).sum(0)
        require(not exact or torch.allclose(mean, true, rtol=1e-6, atol=1e-6), f"{what} is wrong")
        given, truth, state = given + mean, truth + true, following
        largest = max([largest, *truth.abs().tolist(), *given.abs().tolist()])
    states = _states_of_all(state, group)
    pending = reducer.resplit(states, _bucket(zeros), SoloGroup("paper")).get("residual")
    if pending is not None:
        error = (given + pending[: zeros.numel()] - truth).abs()
        require(
            bool((error <= TOLERANCE * largest).all()), f"{zeros.numel()}: means + residuals are not the true means"
        )
        _check_resplit(reducer, states, zeros)


def _check_resplit(reducer: Reducer, states: Sequence[State], zeros: Tensor) -> None:
    """A world of any size takes over what is still to send, in equal parts."""
    bucket, solo = _bucket(zeros), SoloGroup("paper")
    total = reducer.resplit(states, bucket, solo)["residual"][: zeros.numel()]
    for size in (1, 2, 3, 5):
        parts = [reducer.resplit(states, bucket, _PaperGroup(rank, size)) for rank in range(size)]
        again = reducer.resplit(parts, bucket, solo)["residual"][: zeros.numel()]
        close = torch.allclose(again, total, rtol=TOLERANCE, atol=TOLERANCE)
        require(close, f"resplit from {len(states)} ranks to {size} changes what is still to send")
        shapes = {name: value.shape for name, value in reducer.init(bucket, _PaperGroup(0, size)).items()}
        found = {name: value.shape for name, value in parts[0].items()}
        require(found == shapes, f"resplit to {size} ranks gives {found}, init {shapes}")


def _check_dtype(reducer: Reducer, group: Group, zeros: Tensor) -> None:
    bucket = _bucket(_values(zeros, 0, group.rank) / group.size)
    mean, _ = reducer.reduce(bucket, reducer.init(_bucket(zeros), group), group, 0)
    require(mean.dtype == zeros.dtype, f"the mean of {zeros.dtype} is {mean.dtype}")
    require(bool(mean.isfinite().all()), f"the mean of {zeros.dtype} is not finite")
    _same_everywhere(mean, group, f"the mean of {zeros.dtype}")


def _check_nonfinite(reducer: Reducer, group: Group, zeros: Tensor) -> None:
    """A NaN on the last rank ends the step without a hang, and the state before it is still good."""
    mine = _values(zeros, 0, group.rank) / group.size
    _, state = reducer.reduce(_bucket(mine.clone()), reducer.init(_bucket(zeros), group), group, 0)
    before = {name: value.clone() for name, value in state.items()}
    spoiled = mine.clone()
    if group.rank == group.size - 1:
        spoiled[::512], spoiled[1::512], spoiled[2::512] = float("nan"), float("inf"), -float("inf")
    reducer.reduce(_bucket(spoiled), state, group, 1)
    require(_equal(state, before), "a step with a NaN changed the state before it")
    mean, following = reducer.reduce(_bucket(mine.clone()), state, group, 2)
    require(bool(mean.isfinite().all()), "the step after a thrown away one is not finite")
    require(all(bool(value.isfinite().all()) for value in following.values()), "so is the state after it")


def _check_copied_state(reducer: Reducer, group: Group, zeros: Tensor) -> None:
    state = reducer.init(_bucket(zeros), group)
    for step in range(3):
        _, state = reducer.reduce(_bucket(_values(zeros, step, group.rank)), state, group, step)
    results: list[tuple[Tensor, State]] = []
    for copied in (state, {name: value.clone() for name, value in state.items()}):
        results.append(reducer.reduce(_bucket(_values(zeros, 3, group.rank)), copied, group, 3))
    same = torch.equal(results[0][0], results[1][0]) and _equal(results[0][1], results[1][1])
    require(same, "a copied state does not go on with the same bits")


def _check_words(reducer: Reducer, num_ranks: int) -> None:
    link = Link(latency_s=1e-4, bandwidth_bytes_per_s=1e8, num_ranks=max(2, num_ranks))
    require(0 < reducer.cost(1_000, link) < reducer.cost(1_000_000, link), "cost does not grow with the size")
    require(reducer.sent_bytes(1_000_000, link.num_ranks) > 0, "sent_bytes is not above 0")
    require(bool(reducer.words()), "words() is empty")
    require(hash(reducer) == hash(reducer), "it has no hash")


class _PaperGroup(SoloGroup):
    """A rank of a world that is not there: `Reducer.init` and `resplit` only ask who they are."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("paper")
        self.rank = rank
        self.size = size


def _states_of_all(state: State, group: Group) -> list[State]:
    """By rank; ranks may keep different things (only a host's first one does, under `Hierarchical`)."""
    kept = {name: list(value.shape) for name, value in state.items()}
    texts = all_gather_text(group, json.dumps(kept), torch.device("cpu"))
    return [
        {
            name: group.broadcast(state[name].clone() if rank == group.rank else torch.zeros(shape), rank)
            for name, shape in json.loads(text).items()
        }
        for rank, text in enumerate(texts)
    ]


def _same_everywhere(tensor: Tensor, group: Group, what: str) -> None:
    rows = group.all_gather(tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor)
    require(all(torch.equal(row, rows[0]) for row in rows), f"{what} differs between ranks")


def _equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def _values(zeros: Tensor, step: int, rank: int) -> Tensor:
    """Random numbers of all magnitudes, like ``zeros`` in shape, dtype and device."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    return torch.randn(zeros.numel(), generator=generator).to(zeros)


def _bucket(flat: Tensor, index: int = 0) -> Bucket:
    """A matrix, as large as it gets, and a vector."""
    rows = flat.numel() // 32
    pieces = (
        Piece(name="matrix", shape=(rows, 16), offset=0),
        Piece(name="vector", shape=(flat.numel() - 16 * rows,), offset=16 * rows),
    )
    return Bucket(index=index, flat=flat, pieces=pieces)
