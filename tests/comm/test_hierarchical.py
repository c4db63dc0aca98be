"""`Hierarchical` over hosts made by hand, beside the single sum; and which ranks share a host."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextvars import Context
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.comm.hosts import Place, hosts_of
from gradwire.comm.meeting import Meeting, memory_store
from gradwire.comm.traced import TracedGroup
from gradwire.comm.world import World, adopt
from gradwire.compress.exact import AllReduce
from gradwire.compress.hierarchical import Hierarchical
from gradwire.core.group import Group
from gradwire.core.reducer import Bucket, Link, Piece, Reducer, State
from gradwire.testing import check_group, check_reducer, run_ranks

WORLDS = {"2+1": (2, 1), "2+2": (2, 2), "1+3": (1, 3), "3+1": (3, 1)}


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """A lossy reducer with a state: whole numbers travel, what was lost is kept; all ranks send everything."""

    def choose(self, name: str, shape: tuple[int, ...]) -> Reducer:
        return AllReduce() if len(shape) < 2 else self

    def init(self, bucket: Bucket, group: Group) -> State:
        return {"residual": torch.zeros_like(bucket.flat)}

    def reduce(self, bucket: Bucket, state: State, group: Group, step: int) -> tuple[Tensor, State]:
        wanted = bucket.flat + state["residual"]
        sent = wanted.round()
        return group.all_gather(sent).sum(0), {"residual": wanted - sent}

    def resplit(self, states: Sequence[State], bucket: Bucket, group: Group) -> State:
        return {"residual": torch.stack([state["residual"] for state in states]).sum(0) / group.size}

    def plain(self, group: Group) -> bool:
        return False

    def sent_bytes(self, numel: int, num_ranks: int) -> float:
        return 4 * numel * (num_ranks - 1)

    def cost(self, numel: int, link: Link) -> float:
        return link.seconds(self.sent_bytes(numel, link.num_ranks))

    def words(self) -> str:
        return "whole numbers"


def on_hosts(sizes: Sequence[int], function, timeout_s: float = 30.0) -> list:
    """``function(world)`` on ranks as threads whose meetings put them on hosts of these sizes."""
    places = [(node, local, size) for node, size in enumerate(sizes) for local in range(size)]
    store = memory_store()

    def run(outside: World):
        node, local, size = places[outside.rank]
        meeting = Meeting(
            rank=outside.rank, size=outside.size, local_rank=local, local_size=size,
            node_rank=node, store=store, timeout_s=timeout_s,
        )  # fmt: skip

        def inside():
            with adopt(meeting, plan=outside.plan, device="cpu") as world:
                return function(world)

        return Context().run(inside)  # where no other world is open

    return run_ranks(len(places), run, timeout_s=timeout_s)


def values(numel: int, rank: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def bucket_of(flat: Tensor) -> Bucket:
    return Bucket(index=0, flat=flat, pieces=(Piece(name="values", shape=(flat.numel(),), offset=0),))


@pytest.mark.parametrize("sizes", WORLDS.values(), ids=WORLDS.keys())
def test_a_world_on_several_hosts_has_two_levels(sizes: Sequence[int]) -> None:
    def run(world: World) -> tuple[int, int, int | None]:
        check_group(world.group())
        levels = world.group().levels
        assert levels is not None
        check_group(levels.inside)
        if levels.between is not None:
            check_group(levels.between)
        return levels.inside.rank, levels.inside.size, levels.between and levels.between.rank

    expected = [(i, n, h if i == 0 else None) for h, n in enumerate(sizes) for i in range(n)]
    assert on_hosts(sizes, run) == expected


@pytest.mark.parametrize("sizes", [(1, 1), (3,)], ids=["one rank on each host", "one host"])
def test_worlds_of_one_level_have_no_levels(sizes: Sequence[int]) -> None:
    assert on_hosts(sizes, lambda world: world.group().levels) == [None] * sum(sizes)


@pytest.mark.parametrize("sizes", WORLDS.values(), ids=WORLDS.keys())
@pytest.mark.parametrize("outer", [AllReduce(), Rounded()], ids=["exact", "lossy"])
def test_it_conforms(sizes: Sequence[int], outer: Reducer) -> None:
    exact = isinstance(outer, AllReduce)
    on_hosts(sizes, lambda world: check_reducer(Hierarchical(outer=outer), world.group(), exact=exact))


def test_without_levels_it_is_the_outer_reducer_to_the_bit() -> None:
    def run(world: World) -> bool:
        group = world.group()
        mine = values(1001, world.rank)
        pairs = []
        for reducer in (Rounded(), Hierarchical(outer=Rounded())):
            state = reducer.init(bucket_of(mine), group)
            mean, following = reducer.reduce(bucket_of(mine.clone()), state, group, 0)
            pairs.append((mean, following["residual"]))
        return all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))

    assert all(run_ranks(3, run))


def test_the_hosts_sums_are_what_the_outer_reducer_sees() -> None:
    def run(world: World) -> None:
        group = world.group()
        reducer = Hierarchical(outer=Rounded())
        mine = bucket_of(values(1001, world.rank))
        mean, state = reducer.reduce(mine, reducer.init(mine, group), group, 0)
        hosts = [values(1001, 0) + values(1001, 1), values(1001, 2) + values(1001, 3)]
        assert torch.equal(mean, hosts[0].round() + hosts[1].round())
        if group.levels is None or group.levels.between is None:
            assert state == {}
        else:
            host = hosts[world.rank // 2]
            assert torch.equal(state["residual"], host - host.round())

    on_hosts((2, 2), run)


def test_nothing_is_lost_when_the_hosts_change() -> None:
    earlier = [{"residual": values(9, 0)}, {}, {"residual": values(9, 1)}, {}]

    def run(world: World) -> Tensor:
        state = Hierarchical(outer=Rounded()).resplit(earlier, bucket_of(torch.zeros(9)), world.group())
        return state.get("residual", torch.zeros(9))

    for sizes in ((2, 1), (1, 1), (3,)):
        kept = torch.stack(on_hosts(sizes, run)).sum(0)
        assert torch.allclose(kept, values(9, 0) + values(9, 1), atol=1e-6)  # sums in another order


def test_a_choice_stays_chosen_and_a_plain_one_is_plain_without_levels() -> None:
    reducer = Hierarchical(outer=Rounded())
    small = reducer.choose("bias", (3,))
    assert small == Hierarchical(outer=AllReduce()) == small.choose("bias", (3,))
    assert reducer.choose("weight", (3, 3)) == reducer

    def run(world: World) -> tuple[bool, bool]:
        return small.plain(world.group()), reducer.plain(world.group())

    assert run_ranks(3, run) == [(True, False)] * 3
    assert on_hosts((2, 1), run) == [(False, False)] * 3


def test_groups_of_some_ranks_are_stamped_with_them() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.groups: dict[str, tuple[int, ...] | None] = {}

        def arrive(self, group: str, op: str, seq: int, ranks: tuple[int, ...] | None = None) -> None:
            self.groups[group] = ranks

        def complete(self, group: str) -> None:
            return

        def forget(self, group: str) -> None:
            return

        def verdict(self, wait_s: float) -> None:
            return None

    class Watched(Meeting):
        recorder = Recorder()

        @property
        def watch(self) -> Recorder:
            return self.recorder

    store = memory_store()

    def run(outside: World) -> None:
        node, local, size = [(0, 0, 2), (0, 1, 2), (1, 0, 1)][outside.rank]
        meeting = Watched(
            rank=outside.rank, size=3, local_rank=local, local_size=size, node_rank=node, store=store, timeout_s=20
        )
        group = World(meeting, device=outside.device, plan=outside.plan).group()
        assert isinstance(group, TracedGroup)
        Hierarchical(outer=AllReduce()).reduce(bucket_of(torch.ones(5)), {}, group, 0)

    run_ranks(3, run, timeout_s=20)
    assert Watched.recorder.groups == {
        "hosts": None,
        "data/main/host0": (0, 1),
        "data/main/host1": (2,),
        "data/main/hosts": (0, 2),
    }


@pytest.mark.parametrize(
    ("places", "hosts"),
    [
        ([(0, "a", 0, 2), (0, "a", 1, 2)], ((0, 1),)),
        ([(0, "a", 0, 1), (1, "a", 0, 1)], ((0,), (1,))),  # the lab: one name, two hosts
        ([(0, "a", 0, 2), (1, "b", 0, 1), (0, "a", 1, 2)], ((0, 2), (1,))),
        ([(0, "a", 0, 1), (0, "a", 0, 1)], ((0,), (1,))),  # RANK alone was set
        ([(0, "a", 0, 2), (0, "a", 0, 2)], ((0,), (1,))),  # LOCAL_RANK too
        ([(0, "a", 0, 2), (0, "b", 1, 2)], ((0,), (1,))),  # Open MPI, its nodes guessed wrongly
    ],
)
def test_ranks_share_a_host_if_all_that_is_said_agrees(places: list[tuple[int, str, int, int]], hosts: object) -> None:
    said = [Place(node_rank=node, host=host, local_rank=local, local_size=size) for node, host, local, size in places]
    assert hosts_of(said) == hosts


MODEL = nn.Sequential(nn.Linear(30, 60), nn.Tanh(), nn.Linear(60, 50))
SYNCS = [
    "exact",
    "bf16",
    "q4",
    "lowrank",
    "topk:ratio=0.1",
    "q8:exact_steps=2",
    "delayed:codec=q4",
    "accumulate:every=2,codec=q8",
]


@pytest.mark.parametrize("sync", [*SYNCS, "local:every=2,codec=q4,exact_steps=0"])
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)], ids=["2+1", "2+2"])
def test_any_plan_trains_on_several_hosts(sizes: Sequence[int], sync: str) -> None:
    """Past the third exchange, where the bucket size is chosen: only a host's first rank remembers what was not sent."""

    def run(world: World) -> list[Tensor]:
        model = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        training = gw.distribute(model, optimizer, sync=sync)
        for batch in range(6):
            x, y = values(8 * 30, 10 * batch + world.rank).view(8, 30), values(8 * 50, 100 + world.rank).view(8, 50)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        training.agree()
        return [param.detach().clone() for param in model.parameters()]

    ranks = on_hosts(sizes, run)
    for own in ranks:
        assert all(torch.equal(mine, first) for mine, first in zip(own, ranks[0], strict=True))
    assert not torch.equal(ranks[0][0], MODEL[0].weight)
