"""Where a model is cut."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.core.balance import STATE_FACTOR, Unit, balance, stage_bytes
from gradwire.errors import PlanError

UNITS = st.lists(
    st.builds(
        lambda f, b, p, a, s: Unit(name="u", forward_s=f, backward_s=b, parameter_bytes=p, activation_bytes=a, sent_bytes=s),
        st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 3),
    ),
    min_size=4, max_size=9,
)  # fmt: skip


def stages(units, starts):
    return [units[a:b] for a, b in pairwise([0, *starts, len(units)])]


def slowest_s(units, starts, speeds):
    return max(sum(u.seconds for u in part) / speeds[s % len(speeds)] for s, part in enumerate(stages(units, starts)))


def fits(units, starts, limits, live, per_rank):
    return all(
        stage_bytes(part, live[s]) <= limits[s % len(limits)] / per_rank for s, part in enumerate(stages(units, starts))
    )


def sent(units, starts):
    return sum(units[start - 1].sent_bytes for start in starts)


@settings(max_examples=150, deadline=None)
@given(
    UNITS,
    st.integers(1, 2),
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=2, max_size=2),
    st.lists(st.integers(50, 400), min_size=2, max_size=2),
    st.sampled_from([0.0, 0.3]),
)
def test_no_other_cut_is_faster_and_among_the_fast_ones_none_sends_less(units, per_rank, speeds, limits, slack):
    num_stages, live = 2 * per_rank, [2 * per_rank - s for s in range(2 * per_rank)]
    possible = [
        starts
        for starts in combinations(range(1, len(units)), num_stages - 1)
        if fits(units, starts, limits, live, per_rank)
    ]
    given_settings = {
        "num_ranks": 2,
        "stages_per_rank": per_rank,
        "speeds": speeds,
        "memory_bytes": limits,
        "live": live,
    }
    if not possible:
        with pytest.raises(PlanError, match="fits pipeline"):
            balance(units, **given_settings)
        return
    found = balance(units, **given_settings, slack=slack)
    assert found in possible
    best = min(slowest_s(units, starts, speeds) for starts in possible)
    limit = best * (1 + slack) + 1e-9
    assert slowest_s(units, found, speeds) <= limit
    assert sent(units, found) == min(sent(units, s) for s in possible if slowest_s(units, s, speeds) <= limit)


@settings(max_examples=40, deadline=None)
@given(UNITS)
def test_three_stages_of_equal_workers_are_balanced(units):
    best = min(slowest_s(units, starts, [1.0]) for starts in combinations(range(1, len(units)), 2))
    assert slowest_s(units, balance(units, num_ranks=3), [1.0]) == pytest.approx(best)


def test_a_worker_at_half_speed_gets_half():
    units = [Unit(name=str(i)) for i in range(9)]
    assert balance(units, num_ranks=2, speeds=[2.0, 1.0]) == (6,)


def test_memory_moves_a_cut():
    units = [Unit(name=str(i), parameter_bytes=10) for i in range(4)]
    assert balance(units, num_ranks=2) == (2,)
    assert balance(units, num_ranks=2, memory_bytes=[10 * STATE_FACTOR, 1000]) == (1,)


def test_fewer_blocks_than_stages_are_refused_with_the_cure():
    with pytest.raises(PlanError, match=r"2 blocks \(a, b\), too few for 3 stages; use pipeline=2"):
        balance([Unit(name="a"), Unit(name="b")], num_ranks=3)
