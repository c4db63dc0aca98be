"""The order of work in a pipeline."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from gradwire.core.schedule import Action, grid, live_microbatches, make, simulate, validate
from gradwire.errors import UsageError

SETTINGS = st.tuples(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    st.integers(1, 6),
    st.integers(2, 4),
    st.integers(1, 17),
)


def made(setting):
    schedule, p, v, m = setting
    v = v if schedule == "interleaved" else 1
    return make(schedule, num_ranks=p, stages_per_rank=v, num_microbatches=m), p * v, m


@settings(max_examples=150, deadline=None)
@given(SETTINGS)
def test_every_microbatch_passes_every_stage_once_and_nobody_waits_for_ever(setting):
    order, num_stages, m = made(setting)
    validate(order, num_stages=num_stages, num_microbatches=m)
    forwards = sorted((a.stage, a.microbatch) for actions in order for a in actions if a.kind == "forward")
    assert forwards == [(s, j) for s in range(num_stages) for j in range(m)]
    ended = {action: end for spans in simulate(order, 1, 2).spans for action, _, end in spans}
    for spans in simulate(order, 1, 2).spans:
        for action, start, _ in spans:
            if action.kind == "forward" and action.stage:
                assert start >= ended[Action("forward", action.stage - 1, action.microbatch)]


@settings(max_examples=100, deadline=None)
@given(SETTINGS, st.lists(st.floats(0.01, 5), min_size=24, max_size=24), st.floats(0, 1))
def test_messages_of_a_link_may_be_received_in_the_order_they_are_sent(setting, seconds, send_s):
    """The interpreter receives so: whatever the durations, no wait becomes a circle."""
    order, num_stages, _ = made(setting)
    timeline = simulate(order, seconds[:num_stages], seconds[-num_stages:], send_s=send_s)
    assert [len(spans) for spans in timeline.spans] == [len(actions) for actions in order]
    assert all(a[2] <= b[1] + 1e-12 for spans in timeline.spans for a, b in pairwise(spans))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 7, 12])
def test_the_bubble_is_the_closed_formula(schedule, p, m):
    timeline = simulate(make(schedule, num_ranks=p, num_microbatches=m), 1, 2)
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.total_s == pytest.approx(3 * (m + p - 1))


@pytest.mark.parametrize("p", [2, 3, 4])
def test_interleaving_divides_the_bubble_and_zero_bubble_leaves_a_third(p):
    m, v = 4 * p, 2
    inter = simulate(make("interleaved", num_ranks=p, stages_per_rank=v, num_microbatches=m), 0.5, 1)
    assert inter.total_s == pytest.approx(3 * m + 3 * (p - 1) / v)  # Narayanan et al. 2021
    zero = simulate(make("zero-bubble", num_ranks=p, num_microbatches=m), 1, 2)
    assert zero.total_s == pytest.approx(3 * m + (p - 1))  # ZB-H1: forward + input - weight is 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 20))
def test_1f1b_holds_no_more_microbatches_than_stages_behind_it(p, m):
    order = make("1f1b", num_ranks=p, num_microbatches=m)
    assert [live_microbatches(actions) for actions in order] == [min(m, p - rank) for rank in range(p)]
    zero = make("zero-bubble", num_ranks=p, num_microbatches=m)
    assert all(live_microbatches(actions) <= p for actions in zero)
    assert {live_microbatches(actions) for actions in make("gpipe", num_ranks=p, num_microbatches=m)} == {m}


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (3, 2, 6), (4, 2, 8), (4, 3, 12)])
def test_interleaved_is_torchs_own_order(p, v, m):
    stage: Any = SimpleNamespace(
        is_first=False, is_last=False, has_backward=False, num_stages=p * v, group=None, device="cpu",
        group_rank=0, group_size=p, stage_index=0, submod=None,
        stage_index_to_group_rank=None,
    )  # fmt: skip
    try:
        theirs: Any = ScheduleInterleaved1F1B([stage] * v, m, loss_fn=lambda *_: None)
    except (AttributeError, TypeError) as error:
        pytest.skip(f"this torch wants real stages: {error}")
    kinds = {"F": "forward", "B": "backward"}
    for rank, actions in enumerate(make("interleaved", num_ranks=p, stages_per_rank=v, num_microbatches=m)):
        found = [
            Action(kinds[str(a)[len(str(a.stage_index))]], a.stage_index, a.microbatch_index)
            for a in theirs.pipeline_order[rank]
            if a is not None
        ]
        assert list(actions) == found


def test_orders_that_would_hang_or_leave_out_work_are_refused():
    order = make("1f1b", num_ranks=2, num_microbatches=2)
    swapped = (order[0], (order[1][1], order[1][0], *order[1][2:]))
    for wrong, words in (
        (swapped, "it must be forward, backward"),
        ((order[0][:-1], order[1]), "must be forward, backward"),
        ((order[0],), "its stage on rank"),
        ((order[0][2:] + order[0][:2], order[1]), "it must be"),
        (tuple(reversed(order)), "its stage on rank"),
    ):
        with pytest.raises(UsageError, match=words if words != "its stage on rank" else "stage"):
            validate(wrong, num_stages=2, num_microbatches=2)
    f, b = Action("forward", 0, 0), Action("backward", 0, 0)
    circle = (
        (f, b, Action("forward", 0, 1), Action("backward", 0, 1)),
        tuple(make("gpipe", num_ranks=2, num_microbatches=2)[1]),
    )
    with pytest.raises(UsageError, match="waits for ever"):
        validate(circle, num_stages=2, num_microbatches=2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": "fast"}, "allowed: gpipe, 1f1b"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"num_ranks": 0}, "num_ranks=0"),
        ({"stages_per_rank": 2}, "use interleaved"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(given, words):
    with pytest.raises(UsageError, match=words):
        make(**({"schedule": "1f1b", "num_ranks": 2, "num_microbatches": 2} | given))


def test_durations_must_be_one_or_one_for_each_stage():
    with pytest.raises(UsageError, match="3 durations for 2 stages"):
        simulate(make("gpipe", num_ranks=2, num_microbatches=1), [1, 2, 3])


def test_the_grid_has_a_row_a_rank_and_marks_stages():
    picture = grid(simulate(make("zero-bubble", num_ranks=2, num_microbatches=2), 1, 2))
    assert picture.splitlines() == ["rank 0  F0 F1 .  I0 W0 I1 W1", "rank 1  .  F0 I0 F1 I1 W0 W1"]
    several = grid(simulate(make("interleaved", num_ranks=2, stages_per_rank=2, num_microbatches=2), 1, 2))
    assert "F1/1" in several and len(several.splitlines()) == 2
