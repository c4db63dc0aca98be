"""Which reducer takes which parameter."""

from __future__ import annotations

import torch

import gradwire as gw
from gradwire.comm.gloo import SoloGroup
from tests.compress.buckets import bucket_of, normal

Q4, Q8 = gw.ErrorFeedback(gw.Quantize(bits=4)), gw.ErrorFeedback(gw.Quantize(bits=8))


def test_by_shape_asks_the_chosen_one_in_turn() -> None:
    rule = gw.ByShape(matrix=gw.LowRank(rank=4), other=Q8)
    assert rule.choose("w", (64, 64)) == gw.LowRank(rank=4)
    assert rule.choose("w", (4, 4)) == gw.AllReduce()
    assert rule.choose("b", (5000,)) == Q8
    assert rule.choose("b", (50,)) == gw.AllReduce()


def test_by_name_takes_the_first_pattern_that_matches_the_whole_name() -> None:
    rule = gw.ByName({"head.*": gw.AllReduce(), "*.weight": Q4}, other=Q8)
    assert rule.choose("head.weight", (100, 100)) == gw.AllReduce()
    assert rule.choose("body.weight", (100, 100)) == Q4
    assert rule.choose("body.weight_v", (100, 100)) == Q8


def test_a_rule_by_name_is_a_value() -> None:
    one, other = (gw.ByName({"a*": Q4}, other=Q8) for _ in range(2))
    assert one == other and hash(one) == hash(other) and {one: 1}[other] == 1
    assert one == gw.ByName(one.rules, other=Q8)


def test_what_was_chosen_chooses_itself() -> None:
    for rule in (
        gw.ByShape(matrix=gw.After(steps=3, reducer=Q4), other=Q8),
        gw.ByName({"w*": gw.LowRank(rank=2)}, other=Q8),
        gw.After(steps=3, reducer=gw.ByShape(matrix=Q4, other=Q8)),
    ):
        for shape in ((100, 100), (5000,), (3,)):
            chosen = rule.choose("weight", shape)
            assert chosen.choose("weight", shape) == chosen


def test_after_is_exact_first_and_then_starts_from_nothing() -> None:
    reducer, group = gw.After(steps=2, reducer=Q4), SoloGroup("solo")
    state = reducer.init(bucket_of(torch.zeros(2000)), group)
    for step in range(3):
        mine = normal(2000, step)
        mean, state = reducer.reduce(bucket_of(mine.clone()), state, group, step)
        assert torch.equal(mean, mine) == (step < 2)
        assert bool(state["residual"].any()) == (step >= 2)
    expected, _ = Q4.reduce(bucket_of(normal(2000, 2)), Q4.init(bucket_of(mine), group), group, 2)
    assert torch.equal(mean, expected)


def test_after_leaves_exact_parameters_with_the_plain_reducer() -> None:
    chosen = gw.After(steps=2, reducer=Q4).choose("bias", (10,))
    assert chosen == gw.AllReduce() and chosen.plain(SoloGroup("solo"))
    assert not gw.After(steps=2, reducer=Q4).plain(SoloGroup("solo"))
