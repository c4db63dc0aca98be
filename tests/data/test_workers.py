"""Loader workers: seeds, failures by name, and no orphans."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from data_doubles import epoch_of, world
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, get_worker_info

from gradwire.data import DataLoader, shard
from gradwire.data.watch import OnChild
from gradwire.errors import DataError


class Noise:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([random.random(), float(np.random.rand()), torch.rand(1).item()], dtype=torch.float64)


class Collects:
    """Looks, in the worker, whether its collector takes what the parent had thrown away."""

    def __init__(self):
        self.collected = []

    def __len__(self):
        return 2

    def __getitem__(self, index):
        gc.collect()
        return len(self.collected)


class Cycle:
    def __init__(self, told):
        self.me, self.told = self, told

    def __del__(self):
        self.told.append(os.getpid())


def test_a_worker_does_not_collect_what_its_parent_threw_away():
    """A Gloo group's end would wait there for threads that only the parent has."""
    dataset = Collects()
    gc.collect()
    gc.disable()
    try:
        Cycle(dataset.collected)
        found = [batch.tolist() for batch in DataLoader(dataset, 1, num_workers=1, shuffle=False, world=world())]
    finally:
        gc.enable()
    assert found == [[0], [0]]
    gc.collect()
    assert dataset.collected == [os.getpid()]


class Broken:
    def __init__(self, bad=7, action=None):
        self.bad, self.action = bad, action

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index == self.bad and self.action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.bad and self.action == "stop":
            raise StopIteration
        if index == self.bad:
            raise KeyError("no such image")
        return index


class Who:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.getpid()


class Halved(IterableDataset):
    """A stream that parts itself among torch's workers."""

    def __iter__(self):
        info = get_worker_info()
        return iter(range(12)) if info is None else iter(range(info.id, 12, info.num_workers))


class BrokenStream(IterableDataset):
    def __iter__(self):
        yield from range(5)
        raise OSError("disk gone")


def noise(rank=0, seed=0, epochs=1, **how):
    loader = DataLoader(Noise(), 4, seed=seed, num_workers=2, world=world(rank, 2), **how)
    return [[batch.tolist() for batch in loader] for _ in range(epochs)]


def test_workers_seeds_are_a_function_of_seed_epoch_rank_and_worker():
    first = noise(epochs=2)
    torch.manual_seed(77)
    random.seed(77)
    assert noise(epochs=2) == first
    numbers = [
        number for run in (first, noise(rank=1), noise(seed=1)) for epoch in run for batch in epoch for number in batch
    ]
    assert len({tuple(row) for row in numbers}) == len(numbers)


def test_the_loader_leaves_torchs_default_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    epoch_of(DataLoader(range(8), 4, world=world()))
    assert torch.rand(1) == expected


def test_persistent_workers_go_on_for_several_epochs():
    plain = DataLoader(range(10), 4, world=world())
    loader = DataLoader(range(10), 4, num_workers=2, persistent_workers=True, world=world())
    assert [epoch_of(loader) for _ in range(3)] == [epoch_of(plain) for _ in range(3)]
    stream = DataLoader(Halved(), 4, num_workers=2, persistent_workers=True, world=world())
    next(iter(stream))
    assert [epoch_of(stream) for _ in range(2)] == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]] * 2


def test_a_stream_that_parts_itself_among_workers_still_comes_once():
    for loader in (
        DataLoader(Halved(), 4, num_workers=2, world=world()),
        shard(TorchDataLoader(Halved(), batch_size=4, num_workers=2), world=world()),
    ):
        assert sorted(sum(epoch_of(loader), [])) == list(range(12))


def test_worker_init_fn_runs_in_each_worker_and_sees_torchs_worker_info():
    def init(worker):
        assert get_worker_info().id == worker
        torch.manual_seed(5)

    batches = noise(worker_init_fn=init)[0]
    assert batches[0][0][2] == batches[1][0][2]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_in_the_data_set_names_rank_worker_and_samples(workers):
    loader = DataLoader(Broken(), 4, shuffle=False, num_workers=workers, world=world(1, 2))
    with pytest.raises(DataError) as caught:
        epoch_of(loader)
    message = str(caught.value)
    assert "rank 1" in message and "samples [6, 7] (step 1 of epoch 0)" in message and "no such image" in message
    assert ("in loader worker 1" if workers else "in this process") in message
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_stop_iteration_in_the_data_set_does_not_end_the_epoch_silently():
    with pytest.raises(DataError, match=r"samples \[4, 5, 6, 7\]"):
        epoch_of(DataLoader(Broken(action="stop"), 4, shuffle=False, world=world()))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_in_a_stream_names_the_batch(workers):
    with pytest.raises(DataError, match=r"batch 1 of the stream.*disk gone"):
        epoch_of(DataLoader(BrokenStream(), 4, num_workers=workers, world=world()))


def test_a_killed_worker_is_named_with_its_samples():
    start = time.monotonic()
    with pytest.raises(DataError, match=r"rank 0: loader worker 1 \(pid \d+\).*Killed.*samples \[4, 5, 6, 7\]"):
        epoch_of(DataLoader(Broken(action="die"), 4, shuffle=False, num_workers=2, world=world()))
    assert time.monotonic() - start < 5


def test_workers_end_with_the_error_even_if_it_is_kept():
    loader = DataLoader(Broken(), 4, shuffle=False, num_workers=2, world=world())
    with pytest.raises(DataError) as kept:
        epoch_of(loader)
    assert kept.value.__traceback__ is not None
    assert multiprocessing.active_children() == []


def test_a_worker_killed_during_the_loop_body_is_named_by_the_next_batch():
    loader = DataLoader(Who(), 1, num_workers=2, shuffle=False, world=world())
    batches = iter(loader)
    worker = int(next(batches)[0])
    os.kill(worker, signal.SIGKILL)
    while not _is_zombie(worker):  # torch's handler would have raised in this loop
        os.sched_yield()
    with pytest.raises(DataError, match=rf"rank 0: loader worker 0 \(pid {worker}\).*samples \[2\]"):
        list(batches)


def test_another_loaders_worker_is_reported_as_torch_does():
    def theirs(number, frame):
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    kept = DataLoader(range(8), 4, num_workers=1, world=world())
    epoch_of(kept)
    with pytest.raises(RuntimeError, match="worker") as caught:
        OnChild(theirs)(signal.SIGCHLD, None)
    assert not isinstance(caught.value, DataError)


SCRIPT = """
import os, sys, time
sys.path[:0] = {path!r}
from data_doubles import world
from gradwire.data import DataLoader

class Who:
    def __len__(self): return 2
    def __getitem__(self, index): return os.getpid()

if __name__ == "__main__":
    for batch in DataLoader(Who(), 2, num_workers=1, persistent_workers=True, world=world()):
        print(int(batch[0]), flush=True)
        time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_no_worker_outlives_its_killed_rank():
    script = SCRIPT.format(path=[os.path.dirname(__file__), *[entry for entry in sys.path if entry]])
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        worker = int(rank.stdout.readline())
        rank.kill()
    deadline = time.monotonic() + 2
    while os.path.exists(f"/proc/{worker}") and not _is_zombie(worker):
        assert time.monotonic() < deadline, f"worker {worker} outlived its rank"
        os.sched_yield()


def _is_zombie(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_timeout_is_named():
    class Stuck:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            threading.Event().wait(1.5)

    with pytest.raises(DataError, match=r"samples \[0, 1\].*timed out after 0.5 s"):
        epoch_of(DataLoader(Stuck(), 2, shuffle=False, num_workers=1, timeout_s=0.5, world=world()))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_workers_work_too(method):
    plain = TorchDataLoader(range(8), batch_size=4, num_workers=1, multiprocessing_context=method)
    assert epoch_of(shard(plain, world=world())) == [[0, 1, 2, 3], [4, 5, 6, 7]]
