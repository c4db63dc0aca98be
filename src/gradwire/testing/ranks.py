"""`run_ranks`: a function on n ranks, as threads over real Gloo groups or as processes."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

import torch

from gradwire.comm.meeting import Meeting, Store, file_store, memory_store, open_default_group
from gradwire.comm.wake import open_sockets, shut_sockets
from gradwire.comm.world import World, adopt
from gradwire.core.plan import Plan

Result = TypeVar("Result")


class RankError(AssertionError):
    """A rank raised, died or did not end; the cause is chained or in the text."""


def run_ranks(
    num_ranks: int,
    function: Callable[[World], Result],
    *,
    processes: bool = False,
    timeout_s: float = 60.0,
    plan: Plan | None = None,
    device: str = "cpu",
) -> list[Result]:
    """Call ``function(world)`` on every rank of a world of ``num_ranks``; returns the results in rank order.

    processes: False gives threads (0.05 s for four ranks), each with a world of its own; True gives processes, for kills
    and for whatever needs a process to itself (``function`` must then be importable). timeout_s bounds the run and every
    collective. device: ``"cuda"`` gives each rank a GPU of its own (with processes).
    Raises RankError, the first rank's exception chained, if any rank fails.

    >>> run_ranks(3, lambda world: world.sum(world.rank))
    [3, 3, 3]
    """
    setting = _Setting(size=num_ranks, timeout_s=timeout_s, plan=plan, device=device)
    return _processes(function, setting) if processes else _threads(function, setting)


@dataclass(frozen=True, kw_only=True)
class _Setting:
    size: int
    timeout_s: float
    plan: Plan | None
    device: str


def _threads(function: Callable[[World], Result], setting: _Setting) -> list[Result]:
    num_ranks, timeout_s = setting.size, setting.timeout_s
    store, sockets = memory_store(), open_sockets()
    results: dict[int, Result] = {}
    failures: list[tuple[int, BaseException]] = []
    changed = threading.Condition()

    def body(rank: int) -> None:
        try:
            result = _with_world(function, rank, store, setting)
            with changed:
                results[rank] = result
                changed.notify()
        except BaseException as error:  # every failure of a rank belongs to the caller
            with changed:
                failures.append((rank, error))
                changed.notify()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    with changed:
        ended = changed.wait_for(lambda: failures or len(results) == num_ranks, timeout_s)
    if failures or not ended:
        shut_sockets(keep=sockets)  # wakes the ranks that wait for the failed one
    for thread in threads:
        thread.join(5.0 if failures or not ended else timeout_s)
    if failures:
        rank, error = failures[0]
        raise RankError(f"rank {rank} of {num_ranks} raised {type(error).__name__}: {error}") from error
    if not ended:
        raise RankError(f"ranks {sorted(set(range(num_ranks)) - set(results))} did not end within {timeout_s} s")
    return [results[rank] for rank in range(num_ranks)]


def _with_world(function: Callable[[World], Result], rank: int, store: Store, setting: _Setting) -> Result:
    size = setting.size
    meeting = Meeting(rank=rank, size=size, local_rank=rank, local_size=size, store=store, timeout_s=setting.timeout_s)
    with adopt(meeting, plan=setting.plan, device=setting.device) as world:
        return function(world)


def _process(function: Callable[[World], Result], rank: int, path: str, setting: _Setting, out: Connection) -> None:
    torch.set_num_threads(1)
    store = file_store(path, setting.size)
    try:
        if setting.size > 1:
            open_default_group(store, rank, setting.size, timeout_s=setting.timeout_s, cuda=setting.device == "cuda")
        found = (True, _with_world(function, rank, store, setting))
    except BaseException:  # sent to the caller, who raises it
        found = (False, traceback.format_exc())
    out.send_bytes(pickle.dumps(found))  # send() would lend tensors' memory, which ends with this process


def _processes(function: Callable[[World], Result], setting: _Setting) -> list[Result]:
    num_ranks, timeout_s = setting.size, setting.timeout_s
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gradwire.testing.ranks"])
    results: dict[int, Result] = {}
    deadline_s = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        ends: dict[Connection, int] = {}
        children: list[BaseProcess] = []
        for rank in range(num_ranks):
            here, there = context.Pipe(duplex=False)
            args = (function, rank, path, setting, there)
            child = context.Process(target=_process, args=args, daemon=True)
            child.start()
            there.close()
            children.append(child)
            ends[here] = rank
        try:
            while ends:
                ready = wait(list(ends), timeout=max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    raise RankError(f"ranks {sorted(ends.values())} did not end within {timeout_s} s")
                for end in ready:
                    if isinstance(end, Connection):
                        rank = ends.pop(end)
                        results[rank] = _received(end, rank)
        finally:
            for child in children:
                child.kill() if len(results) < num_ranks else child.join(10)
    return [results[rank] for rank in range(num_ranks)]


def _received(end: Connection, rank: int) -> Result:  # pyright: ignore[reportInvalidTypeVarUse]
    try:
        well, value = pickle.loads(end.recv_bytes())  # noqa: S301  # from our own child
    except EOFError:
        raise RankError(f"rank {rank} died without a word") from None
    if not well:
        raise RankError(f"rank {rank} raised:\n{value}")
    return value
