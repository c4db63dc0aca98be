"""The loader: the same global batches for every world, each sample once, lockstep, resumption."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from data_doubles import by_step, epoch_of, on_ranks, world
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from gradwire.data import ByClass, DataLoader, Proportional, Random, Sample, ShardedSampler, Stratified
from gradwire.errors import DataError

LABELS = [place % 3 for place in range(1000)]


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def global_batches(size, length=23, batch_size=8, accumulate=1, split=None, dataset=None, epochs=1, **how):
    """{(epoch, step, micro): samples of all ranks} with every rank in lockstep."""
    found = {}
    for rank in range(size):
        kept = {} if split is None else {"split": split(size)}
        loader = DataLoader(dataset or range(length), batch_size, world=world(rank, size), **kept, **how)
        loader.attach(accumulate)
        for epoch in range(epochs):
            for (step, micro), samples in by_step(loader).items():
                found.setdefault((epoch, step, micro), []).extend(samples)
    return found


@settings(max_examples=25, deadline=None)
@given(st.integers(5, 60), st.integers(5, 20), st.integers(1, 4), st.integers(0, 3))
def test_batches_and_micro_batches_are_the_same_lists_for_every_world_size(length, batch_size, accumulate, seed):
    alone = global_batches(1, length, batch_size, accumulate, seed=seed)
    assert sorted(sum(alone.values(), [])) == list(range(length))
    for size in range(2, 6):
        assert global_batches(size, length, batch_size, accumulate, seed=seed) == alone


SPLITS = {
    "stratified": lambda size: Stratified(LABELS[:23]),
    "by class": lambda size: ByClass(LABELS[:23]),
    "random": lambda size: Random(fractions=[1 / size] * size),
    "fixed": lambda size: Random(fractions=[1 / size] * size, fixed=True),
    "proportional": lambda size: Proportional(range(1, size + 1)),
    "sample": lambda size: Sample(0.7),
}


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_leaves_the_global_batches_as_they_are(name):
    alone = global_batches(1, split=SPLITS[name], accumulate=2, epochs=2)
    for size in (2, 3, 4):
        found = global_batches(size, split=SPLITS[name], accumulate=2, epochs=2)
        assert found.keys() == alone.keys()
        assert all(Counter(found[key]) == Counter(alone[key]) for key in alone)


def test_case_4_evaluation_reads_each_sample_once_and_pads_nothing():
    ranks = [epoch_of(DataLoader(range(10), 8, shuffle=False, world=world(rank, 4))) for rank in range(4)]
    assert sorted(sum(sum(ranks, []), [])) == list(range(10))
    wrong = sum(sample == 0 for rank in ranks for batch in rank for sample in batch)
    assert 1 - wrong / sum(len(batch) for rank in ranks for batch in rank) == 0.9


def test_case_5_epochs_differ_by_themselves_and_visit_each_index_once():
    epochs = [[], []]
    for rank in range(2):
        loader = DataLoader(range(10), 4, world=world(rank, 2))
        for epoch in epochs:
            epoch.append(epoch_of(loader))
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(sum(sum(epoch, []), [])) == list(range(10))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_case_6_each_sample_of_a_stream_comes_once_over_ranks_and_workers(num_workers):
    ranks = [epoch_of(DataLoader(Stream(12), 4, num_workers=num_workers, world=world(rank, 2))) for rank in range(2)]
    assert sorted(sum(sum(ranks, []), [])) == list(range(12))
    assert ranks[0] == [[0, 1], [4, 5], [8, 9]]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_case_8_a_run_goes_on_at_the_exact_sample_on_any_world(data):
    length, batch_size = data.draw(st.integers(5, 40)), data.draw(st.integers(5, 12))
    before, after = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    accumulate, stream = data.draw(st.integers(1, 3)), data.draw(st.booleans())

    def make(rank, size):
        return DataLoader(Stream(length) if stream else range(length), batch_size, world=world(rank, size))

    whole = global_batches(1, length, batch_size, accumulate, dataset=Stream(length) if stream else None, epochs=3)
    loader = make(before - 1, before)
    loader.attach(accumulate)
    an_epoch = sum(1 for _ in loader)
    turns = an_epoch + data.draw(st.integers(1, an_epoch))
    loader = make(before - 1, before)
    loader.attach(accumulate)
    seen = 0
    while seen < turns:
        for _ in loader:
            seen += 1
            if seen == turns:
                break
    state = json.loads(json.dumps(loader.state_dict()))
    at = loader.current
    rest = {}
    for rank in range(after):
        resumed = make(rank, after)
        resumed.attach(accumulate)
        resumed.load_state_dict(state)
        for _ in range(2):
            epoch = resumed.epoch
            for (step, micro), samples in by_step(resumed).items():
                rest.setdefault((epoch, step, micro), []).extend(samples)
    assert rest == {key: whole[key] for key in whole if key > (at.epoch, at.step, at.index)}


def test_case_8_as_reported():
    loader = DataLoader(range(10), 2, world=world())
    full = [epoch_of(loader) for _ in range(3)]
    loader = DataLoader(range(10), 2, num_workers=2, world=world())
    epoch_of(loader)
    for turn, _ in enumerate(loader):
        if turn == 2:
            break
    other = DataLoader(range(10), 2, num_workers=1, world=world())
    other.load_state_dict(loader.state_dict())
    assert other.epoch == 1
    assert epoch_of(other) == full[1][3:]
    assert epoch_of(other) == full[2]


def test_a_state_after_a_whole_epoch_starts_the_next():
    loader = DataLoader(range(10), 4, world=world())
    epochs = [epoch_of(loader) for _ in range(2)]
    loader = DataLoader(range(10), 4, world=world())
    epoch_of(loader)
    other = DataLoader(range(10), 4, world=world())
    other.load_state_dict(loader.state_dict())
    assert other.epoch == 1 and epoch_of(other) == epochs[1]


def test_a_break_starts_the_next_epoch():
    loader = DataLoader(range(10), 4, world=world())
    epochs = [epoch_of(loader) for _ in range(2)]
    loader = DataLoader(range(10), 4, world=world())
    next(iter(loader))
    assert epoch_of(loader) == epochs[1]


def test_a_rank_without_samples_gets_a_stand_in_that_counts_nothing():
    def counts(rank):
        mine = world(rank, 4)
        loader = DataLoader(range(10), 8, shuffle=False, world=mine)
        assert loader.current is None
        loader.attach(1)
        turns = []
        for batch in loader:
            assert mine.reading is loader
            now = loader.current
            turns.append((len(batch), now.samples, now.global_samples, now.window_samples))
        return turns

    assert [counts(rank)[1] for rank in range(4)] == [(1, 1, 2, 2), (1, 1, 2, 2), (1, 0, 2, 2), (1, 0, 2, 2)]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("length", [7, 9, 24])
def test_len_is_the_number_of_turns(accumulate, attached, length):
    for rank in range(4):
        loader = DataLoader(range(length), 8, split=ByClass(LABELS[:length]), world=world(rank, 4))
        if attached:
            loader.attach(accumulate)
        assert len(loader) == len(epoch_of(loader))


def test_a_short_batch_makes_fewer_micro_batches():
    loader = DataLoader(range(9), 7, shuffle=False, world=world())
    loader.attach(4)
    assert [(len(samples), key) for key, samples in by_step(loader).items()] == [
        (2, (0, 0)), (2, (0, 1)), (2, (0, 2)), (1, (0, 3)), (1, (1, 0)), (1, (1, 1)),
    ]  # fmt: skip
    assert loader.current.last and loader.current.window_samples == 2


def test_the_stream_needs_no_length_and_drop_last_leaves_out_the_rest():
    loader = DataLoader(Stream(10), 4, drop_last=True, world=world())
    assert epoch_of(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(TypeError, match="__len__"):
        len(loader)


def test_a_state_inside_a_window_asks_for_the_same_windows():
    loader = DataLoader(range(16), 8, world=world())
    loader.attach(2)
    next(iter(loader))
    state = loader.state_dict()
    loader.attach(4)
    loader.load_state_dict(state)
    with pytest.raises(DataError, match="accumulate=2"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"dataset": range(11)}, "length was 10, is 11"),
        ({"batch_size": 5}, "batch_size was 4, is 5"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"split": Stratified(LABELS[:10])}, "split was 'uniform'"),
        ({"shuffle": False}, "shuffle was 'yes', is 'no'"),
        ({"drop_last": True}, "drop_last was"),
    ],
)
def test_a_state_of_other_data_is_refused_by_name(other, named):
    state = DataLoader(range(10), 4, world=world()).state_dict()
    arguments = {"dataset": range(10), "batch_size": 4, **other}
    with pytest.raises(DataError, match=named):
        DataLoader(world=world(), **arguments).load_state_dict(state)


def test_a_state_with_per_rank_shares_goes_on_with_other_shares_on_another_world():
    state = DataLoader(range(10), 4, split=Proportional([3, 1]), world=world(0, 2)).state_dict()
    DataLoader(range(10), 4, split=Proportional([3, 1, 1]), world=world(0, 3)).load_state_dict(state)
    with pytest.raises(DataError, match="split was 'proportional to 3, 1'"):
        DataLoader(range(10), 4, split=Proportional([2, 1]), world=world(0, 2)).load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"format": 2}, [], {"format": 1, "data": {}, "ranks": 1, "epoch": -1}])
def test_a_strange_state_is_refused(state):
    with pytest.raises(DataError):
        DataLoader(range(10), 4, world=world()).load_state_dict(state)


def test_describe_tells_other_data_apart():
    one, other = (DataLoader(range(length), 4, world=world()).describe() for length in (10, 11))
    assert one != other and one["length"] == 10
    assert DataLoader(Stream(5), 4, world=world()).describe()["length"] == "stream"


def test_a_sharded_sampler_reads_what_the_loader_reads():
    for rank in range(3):
        sampler = ShardedSampler(10, 4, world=world(rank, 3))
        theirs = TorchDataLoader(range(10), batch_sampler=sampler)
        ours = DataLoader(range(10), 4, world=world(rank, 3))
        for _ in range(2):
            assert len(sampler) == len(ours)
            assert epoch_of(theirs) == epoch_of(ours)
        sampler.set_epoch(0)
        again = DataLoader(range(10), 4, world=world(rank, 3))
        assert epoch_of(theirs) == epoch_of(again)


def test_a_sharded_sampler_goes_on_where_its_state_was_taken():
    sampler = ShardedSampler(range(10), 2, world=world())
    full = [list(sampler), list(sampler)]
    sampler = ShardedSampler(range(10), 2, world=world())
    batches = iter(sampler)
    seen = [next(batches), next(batches)]
    other = ShardedSampler(range(10), 2, world=world())
    other.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    assert seen + list(other) == full[0] and list(other) == full[1]


def test_loaders_of_all_ranks_run_at_once():
    def run(mine):
        loader = DataLoader(range(31), 8, world=mine)
        loader.attach(1)
        return by_step(loader)

    ranks = on_ranks(4, run)
    assert sorted(sum((sum(rank.values(), []) for rank in ranks), [])) == list(range(31))
