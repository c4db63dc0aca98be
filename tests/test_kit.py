"""The testing kit tests itself: groups, reducers, ranks that fail."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from gradwire.comm.world import World
from gradwire.compress.exact import AllReduce, ordered_sum
from gradwire.testing import FaultyGroup, InjectedFault, RankError, SlowGroup, check_group, check_reducer, run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_groups_conform(num_ranks: int) -> None:
    run_ranks(num_ranks, lambda world: check_group(world.group()))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_all_reduce_conforms(num_ranks: int) -> None:
    run_ranks(num_ranks, lambda world: check_reducer(AllReduce(), world.group(), exact=True))


def test_a_wrong_reducer_is_found() -> None:
    class Local(AllReduce):
        def reduce(self, bucket, state, group, step):
            return bucket.flat * group.size, state

    with pytest.raises(RankError, match="differs between ranks"):
        run_ranks(2, lambda world: check_reducer(Local(), world.group(), exact=True), timeout_s=10)


def test_the_ordered_sum_has_the_bits_of_the_rank_order() -> None:
    def run(world: World) -> bool:
        parts = [torch.randn(1001, generator=torch.Generator().manual_seed(rank)) for rank in range(world.size)]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return torch.equal(ordered_sum(parts[world.rank].clone(), world.group()), total)

    assert all(run_ranks(4, run))


def test_a_faulty_group_fails_where_it_is_told_to() -> None:
    def run(world: World) -> None:
        group = FaultyGroup(world.group(), fail_at=2)
        group.barrier()
        with pytest.raises(InjectedFault, match="barrier #2"):
            group.barrier()

    run_ranks(2, run)


def test_a_slow_group_still_conforms() -> None:
    def run(world: World) -> float:
        group = SlowGroup(world.group(), delay_s=0.01 * world.rank)
        return float(group.all_reduce(torch.ones(1)))

    assert run_ranks(3, run) == [3.0] * 3


def test_a_raising_rank_is_named() -> None:
    def run(world: World) -> None:
        if world.rank == 1:
            raise KeyError("lost")
        world.group().barrier()

    with pytest.raises(RankError, match="rank 1 of 2 raised KeyError"):
        run_ranks(2, run, timeout_s=5)


def _sum_of_ranks(world: World) -> int:
    return world.sum(world.rank)


def _die(world: World) -> int:
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return world.rank


def test_ranks_as_processes() -> None:
    assert run_ranks(2, _sum_of_ranks, processes=True) == [1, 1]


def test_a_killed_process_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(2, _die, processes=True)
