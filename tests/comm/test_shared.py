"""`SharedGroup`: sums beside a formula, memory that goes away, and what happens when a peer does not come."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradwire.comm import futex, shared
from gradwire.comm.gloo import open_group
from gradwire.comm.meeting import file_store, memory_store
from gradwire.comm.shared import SharedGroup, open_shared
from gradwire.comm.wake import shut_sockets
from gradwire.comm.world import World
from gradwire.core.group import Group
from gradwire.testing import check_group, run_ranks

pytestmark = pytest.mark.skipif(not futex.supported(), reason="shared memory is for Linux on x86-64")

CPU = torch.device("cpu")
BEYOND = 3 * (512 << 10) + 12  # bytes: several turns of the stage and a rest
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
Function = Callable[[Group], object]


def on_groups(num_ranks: int, function: Function, *, timeout_s: float = 20.0) -> list:
    """``function(group)`` on ranks as threads, each with a bare `SharedGroup`."""
    store = memory_store()

    def run(world: World) -> object:
        inner = open_group(store, name="test", rank=world.rank, size=world.size, device=CPU, timeout_s=timeout_s)
        group = open_shared(inner, timeout_s=timeout_s)
        assert isinstance(group, SharedGroup)
        return function(group)

    return run_ranks(num_ranks, run, timeout_s=timeout_s)


def values(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    return (drawn * 3).abs().to(dtype) if not dtype.is_floating_point else drawn.to(dtype)


def rank_order_sum(numel: int, dtype: torch.dtype, num_ranks: int) -> Tensor:
    total = values(numel, dtype, 0)
    for rank in range(1, num_ranks):
        total = total + values(numel, dtype, rank)
    return total


def resident(group: Group, value: Tensor) -> Tensor:
    made = group.new_zeros(value.numel(), value.dtype, CPU)
    assert not made.any()
    return made.copy_(value)


# --- collectives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_worlds_groups_are_shared_and_conform(num_ranks: int) -> None:
    def run(world: World) -> bool:
        group = world.group()
        check_group(group)
        return group.sums_in_rank_order

    assert all(run_ranks(num_ranks, run))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_have_the_bits_of_the_rank_order_whatever_the_size_and_place(num_ranks: int, dtype: torch.dtype) -> None:
    sizes = (1, 17, 4095, 70_001, BEYOND // dtype.itemsize)

    def run(group: Group) -> None:
        for numel in sizes:
            expected = rank_order_sum(numel, dtype, num_ranks)
            mine = values(numel, dtype, group.rank)
            assert torch.equal(group.all_reduce(mine.clone()), expected), f"{numel} copied"
            assert torch.equal(group.all_reduce(resident(group, mine)), expected), f"{numel} resident"
            assert torch.equal(group.begin_all_reduce(resident(group, mine))(), expected), f"{numel} begun"

    on_groups(num_ranks, run)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_collectives_larger_than_the_stage(num_ranks: int) -> None:
    numel = BEYOND // 4

    def run(group: Group) -> None:
        whole = torch.stack([values(numel, torch.float32, rank) for rank in range(num_ranks)])
        mine = whole[group.rank]
        assert torch.equal(group.all_gather(mine), whole)
        assert torch.equal(group.broadcast(mine.clone(), num_ranks - 1), whole[-1])
        assert torch.equal(group.all_reduce(mine.clone(), "max"), whole.max(0).values)
        rows = mine.repeat(num_ranks, 1) + torch.arange(num_ranks).unsqueeze(1)
        assert torch.equal(group.all_to_all(rows), whole + group.rank)
        total = whole[0] + group.rank
        for row in whole[1:]:
            total = total + (row + group.rank)
        assert torch.equal(group.reduce_scatter(rows), total)

    on_groups(num_ranks, run)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int16, torch.complex64, torch.bool], ids=str)
def test_any_dtype_travels(dtype: torch.dtype) -> None:
    def run(group: Group) -> None:
        mine = torch.full((5,), group.rank + 1).to(dtype)
        gathered = group.all_gather(mine)
        assert gathered.dtype == dtype
        expected = torch.stack([torch.full((5,), rank + 1).to(dtype) for rank in range(2)])
        assert torch.equal(gathered.view(torch.uint8), expected.view(torch.uint8))

    on_groups(2, run)


def test_shapes_and_parameters_come_through() -> None:
    def run(group: Group) -> None:
        assert group.all_reduce(torch.tensor(2.0)).shape == ()
        assert group.all_gather(torch.tensor(2.0)).shape == (2,)
        assert group.all_gather(torch.arange(6.0).view(2, 3).T).tolist() == [[[0, 3], [1, 4], [2, 5]]] * 2
        assert group.all_gather(torch.zeros(0, 3)).shape == (2, 0, 3)
        parameter = torch.nn.Parameter(torch.full((3,), float(group.rank)))
        group.broadcast(parameter, 1)
        group.all_reduce(parameter)
        assert parameter.tolist() == [2.0] * 3

    on_groups(2, run)


def test_several_begun_reductions_among_other_collectives() -> None:
    sizes = (3, 5000, BEYOND // 4, 1, 0)

    def run(group: Group) -> None:
        mine = [values(numel, torch.float32, group.rank) for numel in sizes]
        begun = [group.begin_all_reduce(resident(group, value)) for value in mine[:3]]
        begun.append(group.begin_all_reduce(mine[3].clone()))  # not resident
        begun.append(group.begin_all_reduce(mine[4].clone()))
        assert float(group.all_reduce(torch.ones(1))) == group.size
        group.barrier()
        for numel, wait in zip(sizes, begun, strict=True):
            assert torch.equal(wait(), rank_order_sum(numel, torch.float32, group.size))
            assert torch.equal(wait(), rank_order_sum(numel, torch.float32, group.size))

    on_groups(3, run)


@pytest.mark.parametrize("numel", [3, BEYOND // 4])
def test_one_rank_may_begin_what_another_waits_for_at_once(numel: int) -> None:
    def run(group: Group) -> None:
        for make in (resident, lambda group, value: value.clone()):
            mine = make(group, values(numel, torch.float32, group.rank))
            begun = group.begin_all_reduce(mine) if group.rank == 0 else partial(group.all_reduce, mine)
            assert torch.equal(begun(), rank_order_sum(numel, torch.float32, group.size))

    on_groups(3, run)


def test_a_view_of_a_resident_tensor_is_reduced_in_place_and_nothing_else_is_touched() -> None:
    def run(group: Group) -> None:
        whole = resident(group, values(100_000, torch.float32, group.rank))
        group.all_reduce(whole[1000:90_001].view(3, -1))
        expected = values(100_000, torch.float32, group.rank)
        expected[1000:90_001] = rank_order_sum(100_000, torch.float32, group.size)[1000:90_001]
        assert torch.equal(whole, expected)

    on_groups(3, run)


def test_a_late_rank_is_waited_for_and_its_last_values_count() -> None:
    come = threading.Event()

    def run(group: Group) -> None:
        mine = resident(group, torch.ones(1000))
        if group.rank == 1:
            come.wait(5)
            mine.fill_(2)
        wait = group.begin_all_reduce(mine)
        come.set()
        assert (wait() == 3).all()

    on_groups(2, run)


# --- memory ----------------------------------------------------------------------------------------------------------


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:gradwire")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_memory_goes_with_its_tensors_and_nothing_is_left_after_the_world() -> None:
    before_files = set(os.listdir("/dev/shm"))
    on_groups(2, lambda group: None)  # whatever torch opens once
    gc.collect()
    before = num_mappings(), num_descriptors()
    met = threading.Barrier(2)

    def run(group: Group) -> None:
        group.new_zeros(10, torch.float32, CPU)
        met.wait(5)
        few = num_mappings()
        met.wait(5)
        for _ in range(20):  # buckets built anew
            tensor = group.new_zeros(1 << 16, torch.float32, CPU)
        del tensor
        met.wait(5)
        assert num_mappings() == few

    on_groups(2, run)
    gc.collect()
    assert (num_mappings(), num_descriptors()) == before
    assert set(os.listdir("/dev/shm")) == before_files


def test_an_ordinary_tensor_is_never_taken_for_a_resident_one() -> None:
    def run(group: Group) -> None:
        assert isinstance(group, SharedGroup)
        for _ in range(50):  # freed and made at the same addresses, with luck
            mine = resident(group, torch.ones(40_000))
            assert group._row(mine) == group._row(mine[7:]) >= 40_000 and not group._row(mine.clone())
            group.all_reduce(mine)
            del mine
            assert (group.all_reduce(torch.ones(40_000)) == group.size).all()

    on_groups(2, run)


def test_all_ranks_use_the_network_if_one_cannot_open_the_memory(monkeypatch, capsys) -> None:
    opened = os.open
    main = threading.current_thread()

    def refuse(path, *args, **kwargs):
        if str(path).startswith("/proc/") and "/fd/" in str(path) and threading.current_thread() is not main:
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    shared._say.cache_clear()

    def run(world: World) -> bool:
        check_group(world.group())
        world.group(channel="second")
        return world.group().sums_in_rank_order

    assert run_ranks(3, run) == [False] * 3
    said = capsys.readouterr().err
    assert said.count("not through memory they share: rank 1: ") == 1
    assert "Permission denied" in said


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_wait_ends_with_the_timeout_and_the_group_stays_broken() -> None:
    done = threading.Event()

    def run(group: Group) -> None:
        if group.rank == 1:
            assert done.wait(10)
            return
        with pytest.raises(RuntimeError, match=r"test: rank 1 did not come within 0\.2 s"):
            group.barrier()
        with pytest.raises(RuntimeError, match="rank 1 did not come"):
            group.all_reduce(torch.ones(1))
        done.set()

    store = memory_store()

    def opened(world: World) -> None:
        inner = open_group(store, name="test", rank=world.rank, size=2, device=CPU, timeout_s=10.0)
        run(open_shared(inner, timeout_s=0.2))

    run_ranks(2, opened, timeout_s=20)


def test_a_rank_that_closed_its_group_is_named() -> None:
    def run(group: Group) -> None:
        if group.rank == 0:
            began_s = time.monotonic()
            with pytest.raises(RuntimeError, match="rank 1 has left the group"):
                group.all_reduce(torch.ones(5))
            assert time.monotonic() - began_s < 2

    on_groups(2, run)


def test_a_forked_child_that_ends_does_not_speak_for_its_parent() -> None:
    def run(group: Group) -> None:
        arrivals = group._arrivals
        if group.rank == 1 and (child := os.fork()):
            assert os.waitpid(child, 0)[1] == 0
        elif group.rank == 1:
            arrivals.close()
            os._exit(0)
        assert float(group.all_reduce(torch.ones(1))) == group.size
        with pytest.raises(RuntimeError, match="has left"):  # the parent's own close does
            arrivals.close() if group.rank == 1 else group.barrier()
            raise RuntimeError("rank 1 itself has left")

    on_groups(2, run)


# --- processes -------------------------------------------------------------------------------------------------------

Rank = Callable[[Group, Connection], None]


def _rank(function: Rank, rank: int, size: int, path: str, out: Connection) -> None:
    torch.set_num_threads(1)
    if function is _wait_for_the_late:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    inner = open_group(file_store(path, size), name="test", rank=rank, size=size, device=CPU, timeout_s=20.0)
    group = open_shared(inner, timeout_s=20.0)
    out.send(isinstance(group, SharedGroup))
    function(group, out)


@contextmanager
def processes(function: Rank, size: int, folder: Path) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    """``size`` processes that have opened a group and are in ``function``; killed at the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gradwire.testing.ranks"])
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            child = context.Process(
                target=_rank, args=(function, rank, size, str(folder / "store"), there), daemon=True
            )
            child.start()
            there.close()
            started.append((child, here))
        for _, here in started:
            assert heard(here) is True
        yield started
    finally:
        for child, _ in started:
            child.kill()
            child.join(10)


def heard(connection: Connection, timeout_s: float = 20.0) -> object:
    assert connection.poll(timeout_s), "a rank said nothing"
    return connection.recv()


def _wait_for_rank_1(group: Group, out: Connection) -> None:
    if group.rank == 1:
        signal.pause()
    try:
        group.all_reduce(torch.ones(5))
    except RuntimeError as error:
        out.send(str(error))


def _shut_own_sockets(group: Group, out: Connection) -> None:
    if group.rank == 0:
        pid = os.getpid()
        threading.Thread(target=lambda: (sleeping(pid), shut_sockets(keep=frozenset()))).start()
    _wait_for_rank_1(group, out)


def _wait_for_the_late(group: Group, out: Connection) -> None:
    if group.rank == group.size - 1:
        time.sleep(1.0)
    used_s, began_s = time.process_time(), time.monotonic()
    group.barrier()
    out.send((time.process_time() - used_s, time.monotonic() - began_s))


def sleeping(pid: int) -> None:
    """Return when the main thread of ``pid`` sleeps in a futex (x86-64's system call 202)."""
    deadline_s = time.monotonic() + 10
    while not Path(f"/proc/{pid}/syscall").read_text().startswith("202 ") and time.monotonic() < deadline_s:
        os.sched_yield()


def test_the_survivors_of_a_killed_rank_raise_and_nothing_is_left(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    with processes(_wait_for_rank_1, 3, tmp_path) as ranks:
        for survivor in (0, 2):
            sleeping(ranks[survivor][0].pid or 0)
        began_s = time.monotonic()
        os.kill(ranks[1][0].pid or 0, signal.SIGKILL)
        for survivor in (0, 2):
            said = heard(ranks[survivor][1])
            assert "test: rank 1 (process" in str(said) and "has ended" in str(said)
        assert time.monotonic() - began_s < 2
    assert set(os.listdir("/dev/shm")) == before


def test_shutting_a_process_sockets_ends_its_waits(tmp_path: Path) -> None:
    with processes(_shut_own_sockets, 2, tmp_path) as ranks:
        assert "the connections of this process were shut" in str(heard(ranks[0][1]))


def test_ranks_without_a_core_each_sleep_while_they_wait(tmp_path: Path) -> None:
    with processes(_wait_for_the_late, 4, tmp_path) as ranks:
        for _, out in ranks[:3]:
            used_s, waited_s = heard(out)
            assert waited_s > 0.5
            assert used_s < 0.05
