"""Wrong calls are answered at once, with the argument, the value and the cure."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from data_doubles import world
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler

from gradwire.data import (
    ByClass,
    DataLoader,
    Local,
    Proportional,
    Random,
    Sample,
    ShardedSampler,
    Stratified,
    Uniform,
    shard,
)
from gradwire.errors import DataError


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


def load(dataset=range(100), batch_size=8, size=4, **how):
    return lambda: DataLoader(dataset, batch_size, world=world(0, size), **how)


def sharded(*args, size=4, **how):
    return lambda: shard(TorchDataLoader(*args, **how), world=world(0, size))


def sample(length=100, batch_size=8, **how):
    return lambda: ShardedSampler(length, batch_size, world=world(0, 4), **how)


def distributed():
    sampler = DistributedSampler(range(100), num_replicas=4, rank=0)
    return shard(TorchDataLoader(range(100), batch_size=8, sampler=sampler), world=world(0, 4))


WRONG = [
    (load(batch_size=0), "batch_size=0 must be 1 or more"),
    (load(batch_size=-8), "batch_size=-8"),
    (load(batch_size=True), "batch_size=True must be a whole number"),
    (load(batch_size=8.0), "batch_size=8.0 must be a whole number"),
    (load(batch_size="8"), "batch_size='8'"),
    (load(batch_size=None), "batch_size=None"),
    (load(batch_size=2), "batch_size=2 is smaller than the 4 ranks.*batch_size=4"),
    (load(seed=-1), "seed=-1"),
    (load(seed=0.5), "seed=0.5"),
    (load(seed=None), "seed=None"),
    (load(shuffle="yes"), "shuffle='yes'"),
    (load(Stream(), shuffle=True), "shuffle=True cannot reorder.*shuffle inside"),
    (load(drop_last=1), "drop_last=1"),
    (load(range(7), drop_last=True), "7 samples make no whole batch of 8.*drop_last=False"),
    (load(range(7), split=Local(), size=1, drop_last=True), "no whole batch of 8"),
    (load(split=Sample(0.05), drop_last=True), "5 samples make no whole batch"),
    (load(num_workers=-1), "num_workers=-1"),
    (load(num_workers=1.5), "num_workers=1.5"),
    (load(persistent_workers=True), "persistent_workers=True needs num_workers"),
    (load(prefetch_factor=2), "prefetch_factor needs num_workers"),
    (load(prefetch_factor=0, num_workers=1), "prefetch_factor=0"),
    (load(timeout_s=-1.0), "timeout_s=-1.0"),
    (load(timeout_s=float("nan")), "timeout_s=nan"),
    (load(timeout_s=5.0), "timeout_s=5 needs num_workers"),
    (load(pin_memory="cuda"), "pin_memory='cuda'"),
    (load(collate_fn=3), "collate_fn=3"),
    (load(worker_init_fn=[], num_workers=1), r"worker_init_fn=\[\]"),
    (load([]), "rank 0: the data set is empty"),
    (load([], split=Local()), "rank 0: the data set is empty"),
    (load(3), "a int is not a data set.*__getitem__"),
    (load(None), "a NoneType is not a data set"),
    (load("text"), "a str is not a data set"),
    (load({"a": 1}), "a dict is not a data set"),
    (load(iter(range(9))), "can be read only once"),
    (load(split="uniform"), r"split='uniform' is not a split; use one of Uniform\(\)"),
    (load(split=None), "split=None is not a split"),
    (load(split=Uniform), r"write split=Uniform\(...\)"),
    (load(split=Stratified([0, 1])), "2 labels for 100 samples"),
    (load(split=ByClass([0] * 101)), "101 labels for 100 samples"),
    (load(split=Random(fractions=[0.5, 0.5])), "fractions has 2 entries for 4 ranks"),
    (load(split=Proportional([1, 1, 1])), "speeds has 3 entries for 4 ranks"),
    (load(split=Sample(0.5, split=Proportional([1]))), "speeds has 1 entries for 4 ranks"),
    (load(split=Sample(0.5, weights=[1.0])), "1 weights for 100 samples"),
    (load(split=Sample(0.5, weights=[1] + [0] * 99, replacement=False)), "draws 50 samples but only 1"),
    (load(Stream(), split=Sample(0.5)), "Sample needs a data set with a length"),
    (lambda: Stratified([]), "labels are empty"),
    (lambda: Stratified("cats"), "labels='cats'"),
    (lambda: Stratified(7), "labels=7"),
    (lambda: Stratified(np.eye(3)), r"shape \(3, 3\).*argmax"),
    (lambda: Stratified([[1], [2, 3]]), "labels"),
    (lambda: Random(fractions=[0.5, 0.4]), "fractions sum to 0.9"),
    (lambda: Random(fractions=[1.5, -0.5]), r"fractions\[1\] is -0.5"),
    (lambda: Random(fractions=[float("nan"), 1]), r"fractions\[0\] is nan"),
    (lambda: Random(fractions=0.5), "fractions=0.5 must be a list"),
    (lambda: Random(fractions=[]), "fractions sum to 0"),
    (lambda: Proportional([1, 0]), r"speeds\[1\] is 0"),
    (lambda: Proportional([-1.0]), r"speeds\[0\] is -1"),
    (lambda: Proportional(["fast"]), "speeds="),
    (lambda: Sample(0), "fraction=0 must be above 0"),
    (lambda: Sample(-0.1), "fraction=-0.1"),
    (lambda: Sample("half"), "fraction='half'"),
    (lambda: Sample(True), "fraction=True"),
    (lambda: Sample(float("inf")), "fraction=inf"),
    (lambda: Sample(1.5, replacement=False), "fraction=1.5 is above 1"),
    (lambda: Sample(0.5, weights=[0, 0]), "all weights are 0"),
    (lambda: Sample(0.5, weights=[1, -1]), r"weights\[1\] is -1"),
    (lambda: Sample(0.5, weights=[[1, 2]]), r"weights have shape \(1, 2\)"),
    (lambda: Sample(0.5, weights=["a"]), "weights of type list"),
    (sharded(range(100), batch_size=2), "batch_size=2 is smaller than the 4 ranks"),
    (sharded(range(100), batch_size=None), "batch_size=None"),
    (sharded(range(100), batch_size=8, num_workers=1, in_order=False), "in_order=True"),
    (sharded([], batch_size=8), "the data set is empty"),
    (distributed, "DistributedSampler parts the data already"),
    (lambda: shard(range(100), world=world(0, 4)), r"not a range; for a data set use gw.DataLoader"),
    (lambda: shard(load()(), world=world(0, 4)), "gradwire's already"),
    (sample(length=0), "dataset=0"),
    (sample(length=2.5), "dataset=2.5"),
    (sample(batch_size=3), "batch_size=3 is smaller than the 4 ranks"),
    (sample(split="x"), "split='x'"),
    (lambda: sample()().set_epoch(-1), "epoch=-1"),
    (lambda: load()().attach(0), "accumulate=0"),
    (lambda: load()().attach(True), "accumulate=True"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "named"), WRONG)
def test_a_wrong_call_is_refused_at_once_by_name(call, named):
    start = time.perf_counter()
    with pytest.raises(DataError, match=named):
        call()
    assert time.perf_counter() - start < 0.5


def test_a_split_that_loses_samples_is_named():
    class Lossy(Uniform):
        def parts(self, batch, size, key):
            return [part[:-1] for part in super().parts(batch, size, key)]

        def words(self):
            return "lossy"

    with pytest.raises(DataError, match="split 'lossy' made 4 parts of 4 samples from a batch of 8"):
        list(load(split=Lossy())())


def test_a_stream_that_outgrows_its_labels_is_named():
    with pytest.raises(DataError, match="has no label: there are 9 labels"):
        list(DataLoader(Stream(), 4, split=Stratified([0] * 9), world=world(0, 2)))


def test_a_torch_sampler_is_no_split():
    with pytest.raises(DataError, match="is not a split"):
        load(split=RandomSampler(range(3)))()
    assert torch.is_tensor(next(iter(load()())))
