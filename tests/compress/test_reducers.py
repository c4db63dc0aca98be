"""Every lossy reducer on worlds of 1 to 4."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import gradwire as gw
from gradwire.comm.gloo import SoloGroup
from gradwire.comm.world import World
from gradwire.compress import kernels
from gradwire.core.compressor import Compressor
from gradwire.core.reducer import Link, Reducer
from gradwire.testing import FaultyGroup, InjectedFault, RankError, check_reducer, run_ranks
from tests.compress.buckets import CountingGroup, bucket_of, normal
from tests.compress.test_codecs import CODECS

Q4 = gw.ErrorFeedback(gw.Quantize(bits=4))
ONE_OF_EACH = [codec for codec in CODECS if getattr(codec, "ratio", 0.1) == 0.1]
REDUCERS: list[Reducer] = [
    *(gw.ErrorFeedback(codec) for codec in ONE_OF_EACH),
    *(gw.Compressed(codec) for codec in ONE_OF_EACH),
    gw.LowRank(rank=4),
    gw.After(steps=2, reducer=Q4),
    gw.ByShape(matrix=gw.LowRank(rank=2), other=Q4),
    gw.ByName({"p*": gw.Compressed(gw.Cast(torch.bfloat16))}, other=Q4),
]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
def test_a_reducer_keeps_the_contract(reducer: Reducer, num_ranks: int) -> None:
    run_ranks(num_ranks, lambda world: check_reducer(reducer, world.group(), exact=False))


def test_eager_and_compiled_ranks_may_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    def means(world: World) -> list[Tensor]:
        given, state = [], Q4.init(bucket_of(torch.zeros(5000)), world.group())
        for step in range(3):
            mine = normal(5000, 10 * step + world.rank)
            mean, state = Q4.reduce(bucket_of(mine), state, world.group(), step)
            given.append(mean)
        return given

    compiled = run_ranks(3, means)
    monkeypatch.setattr(kernels, "_built", [kernels.Built(library=None, words="eager: for this test")])
    eager = run_ranks(3, means)
    assert all(
        torch.equal(a, b) for one, other in zip(compiled, eager, strict=True) for a, b in zip(one, other, strict=True)
    )


def test_case_14_top_1_with_feedback() -> None:
    codec = gw.ErrorFeedback(gw.TopK(ratio=0.25))
    group, flat = SoloGroup("data/main"), torch.tensor([4.0, 3.0, 2.0, 1.0])
    sent, state = torch.zeros(4), codec.init(bucket_of(flat), group)
    for step in range(4):
        mean, state = codec.reduce(bucket_of(flat.clone()), state, group, step)
        sent += mean
    assert sent.tolist() == [12, 6, 8, 0]
    assert state["residual"].tolist() == [4, 6, 0, 4]


def test_float16_means_do_not_overflow() -> None:
    reducer = gw.Compressed(gw.Cast(torch.float16))

    def mean(world: World) -> float:
        flat = torch.full((2000,), 40000.0 / world.size)
        return float(reducer.reduce(bucket_of(flat), {}, world.group(), 0)[0].max())

    assert run_ranks(3, mean) == pytest.approx([40000.0] * 3, rel=1e-3)  # float16 has 11 bits


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("reducer", REDUCERS[:-3], ids=repr)
def test_the_bytes_sent_are_those_promised(reducer: Reducer, num_ranks: int) -> None:
    side = 512

    def sent(world: World) -> float:
        group, bucket = CountingGroup(world.group()), bucket_of(torch.zeros(side * side), (side, side))
        state = reducer.init(bucket, group)
        for step in range(2):
            _, state = reducer.reduce(bucket, state, group, step)
        return group.sent / 2

    promised = reducer.sent_bytes(side * side, num_ranks)
    assert run_ranks(num_ranks, sent) == pytest.approx([promised] * num_ranks, rel=0.03)


@pytest.mark.parametrize(
    ("num_ranks", "calls"), [(1, ["all_gather"]), (2, ["all_gather"]), (3, ["all_to_all", "all_gather"])]
)
def test_two_ranks_need_one_collective_and_more_need_two(num_ranks: int, calls: list[str]) -> None:
    def seen(world: World) -> list[str]:
        group, bucket = CountingGroup(world.group()), bucket_of(torch.zeros(3000))
        Q4.reduce(bucket, Q4.init(bucket, group), group, 0)
        return group.calls

    assert run_ranks(num_ranks, seen) == [calls] * num_ranks


def test_feedback_makes_four_bits_unbiased_in_the_long_run() -> None:
    """Small numbers beside a large one: without feedback they are never sent, with it their mean is right."""
    flat = torch.full((2048,), 0.01)
    flat[::256] = 1.0

    def mean(reducer: Reducer) -> Tensor:
        state, total = reducer.init(bucket_of(flat), SoloGroup("solo")), torch.zeros(2048)
        for step in range(100):
            given, state = reducer.reduce(bucket_of(flat.clone()), state, SoloGroup("solo"), step)
            total += given / 100
        return total

    assert float(mean(gw.Compressed(gw.Quantize(bits=4)))[1]) == 0.0
    # what is still in the residual is at most half a scale of 1/7, once in 100 steps
    assert torch.allclose(mean(Q4), flat, atol=0.5 / 7 / 100 * 1.01)


@pytest.mark.parametrize("fail_at", [1, 2])
@pytest.mark.parametrize("reducer", [Q4, gw.LowRank(rank=2), gw.ErrorFeedback(gw.TopK(ratio=0.1))], ids=repr)
def test_a_collective_that_fails_is_an_error_and_spoils_no_state(reducer: Reducer, fail_at: int) -> None:
    def body(world: World) -> bool:
        group = world.group()
        state = reducer.init(bucket_of(torch.zeros(4096), (64, 64)), group)
        before = {name: value.clone() for name, value in state.items()}
        faulty = FaultyGroup(group, fail_at=fail_at)
        try:
            reducer.reduce(bucket_of(normal(4096, world.rank), (64, 64)), state, faulty, 0)
        except InjectedFault:
            return all(torch.equal(state[name], value) for name, value in before.items())
        return fail_at == 2 and reducer != Q4  # it has one collective only

    assert run_ranks(3, body) == [True] * 3


@pytest.mark.parametrize("fail_at", [1, 2])
def test_a_peer_that_dies_inside_a_reduction_is_an_error_on_the_others_too(fail_at: int) -> None:
    raised: dict[int, str] = {}

    def body(world: World) -> None:
        flat, group = normal(4096, world.rank), world.group()
        mine = FaultyGroup(group, fail_at=fail_at) if world.rank == 1 else group
        try:
            Q4.reduce(bucket_of(flat), Q4.init(bucket_of(flat), group), mine, 0)
        except Exception as error:
            raised[world.rank] = type(error).__name__
            raise

    with pytest.raises(RankError, match="rank 1 of 3 raised InjectedFault"):
        run_ranks(3, body, timeout_s=20)
    assert sorted(raised) == [0, 1, 2]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_small_tensors_travel_exact(codec: Compressor) -> None:
    for reducer in (gw.ErrorFeedback(codec), gw.Compressed(codec)):
        assert reducer.choose("bias", (1023,)) == gw.AllReduce()
        assert reducer.choose("weight", (32, 32)) is reducer
        assert reducer.choose("scale", ()) == gw.AllReduce()


def test_the_cost_follows_the_bytes_on_a_slow_line() -> None:
    slow = Link(latency_s=1e-4, bandwidth_bytes_per_s=12.5e6, num_ranks=2)
    bf16, q8, exact = gw.ErrorFeedback(CODECS[0]), gw.ErrorFeedback(CODECS[2]), gw.AllReduce()
    costs = [reducer.cost(10_000_000, slow) for reducer in (Q4, q8, bf16, exact)]
    assert costs == sorted(costs) and costs[0] < costs[3] / 6


def test_a_plan_in_words_makes_these() -> None:
    from gradwire.sync.named import policy_of

    assert policy_of("q4").reducer == Q4
    assert policy_of("topk:ratio=0.1,exact_steps=3").reducer == gw.After(
        steps=3, reducer=gw.ErrorFeedback(gw.TopK(ratio=0.1))
    )
    assert policy_of("local:every=4,codec=lowrank(rank=2)").reducer == gw.LowRank(rank=2)
