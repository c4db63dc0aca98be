"""`shard`: a plain torch loader's own batches, parted; a world of one is the plain loader to the bit."""

from __future__ import annotations

import json

import pytest
import torch
from data_doubles import by_step, epoch_of, on_ranks, world
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler, WeightedRandomSampler
from torch.utils.data import DataLoader as TorchDataLoader

from gradwire.data import shard
from gradwire.errors import MismatchError

LENGTH = 23


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(LENGTH))


class Endless:
    """A batch sampler without end, drawing from torch's default generator as it goes."""

    def __iter__(self):
        while True:
            yield torch.randint(LENGTH, (4,)).tolist()


class Pairs:
    """A custom batch sampler that draws in ``__iter__`` itself."""

    def __iter__(self):
        return iter(torch.randperm(LENGTH)[:20].view(10, 2).tolist())

    def __len__(self):
        return 10


def generator():
    return torch.Generator().manual_seed(5)


PLAIN = {
    "in order": lambda **how: TorchDataLoader(range(LENGTH), batch_size=8, **how),
    "shuffled": lambda **how: TorchDataLoader(range(LENGTH), batch_size=8, shuffle=True, **how),
    "drop last": lambda **how: TorchDataLoader(range(LENGTH), batch_size=8, shuffle=True, drop_last=True, **how),
    "generator": lambda **how: TorchDataLoader(range(LENGTH), batch_size=8, shuffle=True, generator=generator(), **how),
    "sampler's generator": lambda **how: TorchDataLoader(
        range(LENGTH), batch_size=8, sampler=RandomSampler(range(LENGTH), generator=generator()), **how
    ),
    "weighted": lambda **how: TorchDataLoader(
        range(LENGTH), batch_size=8, sampler=WeightedRandomSampler([1.0] * 5 + [3.0] * 18, 40), **how
    ),
    "batch sampler": lambda **how: TorchDataLoader(
        range(LENGTH), batch_sampler=BatchSampler(SequentialSampler(range(LENGTH)), 9, False), **how
    ),
    "custom": lambda **how: TorchDataLoader(range(LENGTH), batch_sampler=Pairs(), **how),
    "stream": lambda **how: TorchDataLoader(Stream(), batch_size=8, **how),
}


def trained(loader, epochs=2):
    """Batches and random numbers of a loop that draws some itself."""
    torch.manual_seed(3)
    found = []
    for _ in range(epochs):
        for batch in loader:
            found.append((batch.tolist(), torch.rand(2).tolist()))
    return found, torch.rand(3).tolist()


@pytest.mark.parametrize("name", PLAIN)
def test_a_world_of_one_is_the_plain_loader_to_the_bit(name):
    assert trained(shard(PLAIN[name](), world=world())) == trained(PLAIN[name]())


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", ["shuffled", "generator", "custom"])
def test_with_workers_too(name, persistent):
    how = {"num_workers": 2, "persistent_workers": persistent}
    assert trained(shard(PLAIN[name](**how), world=world())) == trained(PLAIN[name](**how))


class Noisy:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(3)


def test_the_workers_of_a_world_of_one_have_torchs_own_seeds():
    def noise(loader):
        torch.manual_seed(0)
        return [batch.tolist() for batch in loader]

    plain = TorchDataLoader(Noisy(), batch_size=4, num_workers=2)
    assert noise(shard(plain, world=world())) == noise(plain)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", PLAIN)
def test_the_union_of_the_ranks_is_the_plain_batch(name, size):
    torch.manual_seed(3)
    alone = [batch.tolist() for batch in PLAIN[name]()]

    def run(mine):
        loader = shard(PLAIN[name](), world=mine)
        loader.attach(1)
        return loader

    # threads share torch's default generator, so the ranks are made one after the other with a group of one's own
    batches = [[] for _ in alone]
    for rank in range(size):
        torch.manual_seed(3)
        mine = world(rank, size, Agreeing(size))
        for (step, _), samples in by_step(run(mine)).items():
            batches[step].extend(samples)
    assert batches == alone


class Agreeing:
    """A group whose other ranks always say the same."""

    def __init__(self, size):
        self.size = size

    def all_gather(self, tensor):
        return tensor.expand(self.size, *tensor.shape)


def test_ranks_that_draw_different_orders_are_named_with_the_cure():
    def run(mine):
        seeded = torch.Generator().manual_seed(int(mine.rank == 2))
        plain = TorchDataLoader(range(LENGTH), batch_size=8, shuffle=True, generator=seeded)
        return epoch_of(shard(plain, world=mine))

    for found in on_ranks(3, run):
        assert isinstance(found, MismatchError)
        assert "ranks 0 and 2" in str(found) and "torch.manual_seed(0)" in str(found)


def test_ranks_with_samplers_of_different_length_are_named():
    def run(mine):
        return epoch_of(shard(TorchDataLoader(range(20 + 40 * mine.rank), batch_size=8), world=mine))

    assert all(isinstance(found, MismatchError) for found in on_ranks(2, run))


def test_orders_are_compared_once_an_epoch():
    def run(mine):
        epoch_of(shard(TorchDataLoader(range(500), batch_size=4), world=mine))
        return mine.group("data", "shard", channel="loader").num_calls

    assert on_ranks(2, run) == [1, 1]


def test_an_endless_sampler_works():
    mine = world(0, 2, Agreeing(2))
    for loader in (shard(TorchDataLoader(range(LENGTH), batch_sampler=Endless()), world=w) for w in (mine, world())):
        batches = iter(loader)
        assert all(len(next(batches)) for _ in range(1500))


@pytest.mark.parametrize(("name", "workers"), [*((name, 0) for name in PLAIN), ("shuffled", 2), ("generator", 2)])
def test_a_run_goes_on_at_the_exact_sample(name, workers):
    def train(loader, stop=None):
        found = []
        for batch in loader:
            found.append((batch.tolist(), torch.rand(1).item()))
            if len(found) == stop:
                return found, loader.state_dict()
        return found

    torch.manual_seed(3)
    whole = shard(PLAIN[name](num_workers=workers), world=world())
    epochs = [train(whole) for _ in range(3)]
    torch.manual_seed(3)
    first = shard(PLAIN[name](num_workers=workers), world=world())
    train(first)
    head, state = train(first, stop=2)
    own_random = torch.get_rng_state()
    torch.manual_seed(99)
    second = shard(PLAIN[name](num_workers=workers), world=world())
    second.load_state_dict(json.loads(json.dumps(state)))
    torch.set_rng_state(own_random)  # as a checkpoint does
    assert head + train(second) == epochs[1]
    assert train(second) == epochs[2]


@pytest.mark.parametrize("name", sorted(PLAIN.keys() - {"stream", "custom"}))  # no length; batches below the world
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("accumulate", [0, 3])
def test_len_is_the_number_of_turns(name, size, accumulate):
    for rank in range(size):
        torch.manual_seed(3)
        loader = shard(PLAIN[name](), world=world(rank, size, Agreeing(size)))
        if accumulate:
            loader.attach(accumulate)
        assert len(loader) == len(epoch_of(loader))
