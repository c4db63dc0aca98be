"""`Local`: every rank reads data of its own; ranks go on until all have used up theirs."""

from __future__ import annotations

import json

import pytest
from data_doubles import on_ranks
from torch.utils.data import IterableDataset

from gradwire.data import DataLoader, Local
from gradwire.errors import DataError


class Stream(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def data_of(rank, length, kind):
    items = list(range(100 * rank, 100 * rank + length))
    return Stream(items) if kind == "stream" else items


def run(lengths, batch_size, kind, accumulate=1, **how):
    def body(mine):
        loader = DataLoader(data_of(mine.rank, lengths[mine.rank], kind), batch_size, split=Local(), world=mine, **how)
        loader.attach(accumulate)
        turns = []
        for batch in loader:
            now = loader.current
            real = batch.tolist()[: now.samples]
            assert now.samples or len(batch) == 1
            turns.append((now.step, now.index, now.total, real, now.global_samples, now.window_samples))
        return turns

    return on_ranks(len(lengths), body)


UNEVEN = [[5, 23, 1], [9, 9, 9], [4, 5, 30]]


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize(
    ("lengths", "accumulate", "num_workers"),
    [(lengths, accumulate, 0) for lengths in UNEVEN for accumulate in (1, 3)] + [(UNEVEN[0], 3, 2)],
)
def test_all_ranks_turn_alike_until_every_sample_is_used_once(kind, lengths, accumulate, num_workers):
    ranks = run(lengths, 12, kind, accumulate, num_workers=num_workers)
    assert len({len(turns) for turns in ranks}) == 1
    for rank, turns in enumerate(ranks):
        used = sorted(sample for turn in turns for sample in turn[3])
        assert used == list(range(100 * rank, 100 * rank + lengths[rank]))
    for turns in zip(*ranks, strict=True):
        assert len({(turn[:3], turn[4:]) for turn in [(*turn[:3], *turn[4:]) for turn in turns]}) == 1
        assert turns[0][4] == sum(len(turn[3]) for turn in turns) > 0


def test_the_window_counts_the_samples_of_all_ranks():
    ranks = run([7, 3], 8, "map", accumulate=2)
    assert [(turn[4], turn[5]) for turn in ranks[0]] == [(4, 7), (3, 7), (2, 3), (1, 3)]


def test_each_rank_reads_its_share_of_the_batch():
    ranks = run([10, 10], 7, "map")
    assert [len(turn[3]) for turn in ranks[0]] == [4, 4, 2, 0]
    assert [len(turn[3]) for turn in ranks[1]] == [3, 3, 3, 1]


def test_ranks_do_not_read_in_the_same_order():
    ranks = run([50, 50], 10, "map")
    orders = [[sample % 100 for turn in turns for sample in turn[3]] for turns in ranks]
    assert orders[0] != orders[1]


def test_a_stream_without_any_sample_is_named_on_all_ranks():
    for found in run([4, 0, 4], 6, "stream"):
        assert isinstance(found, DataError) and "rank 1 has no sample at all" in str(found)


def test_evaluation_needs_no_exchange_and_pads_nothing():
    def body(mine):
        loader = DataLoader(data_of(mine.rank, 3 + 4 * mine.rank, "map"), 4, split=Local(), shuffle=False, world=mine)
        found = [batch.tolist() for batch in loader]
        assert loader.current.global_samples is None and loader.current.samples == 1
        assert len(loader) == len(found)
        return found, mine.group("data", "shard", channel="loader").num_calls

    ranks = on_ranks(2, body)
    assert ranks[0] == ([[0, 1], [2]], 0)
    assert sum(ranks[1][0], []) == list(range(100, 107))


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_run_goes_on_on_the_same_number_of_ranks(kind):
    def body(mine, stop=None, state=None):
        loader = DataLoader(data_of(mine.rank, [3, 14][mine.rank], kind), 4, split=Local(), world=mine)
        loader.attach(1)
        if state is not None:
            loader.load_state_dict(state)
        found = []
        for batch in loader:
            found.append((batch.tolist(), loader.current))
            if len(found) == stop:
                break
        return found, json.loads(json.dumps(loader.state_dict()))

    whole = on_ranks(2, body)
    for stop in (1, 4):  # before and after rank 0 has used up its samples
        heads = on_ranks(2, lambda mine, stop=stop: body(mine, stop=stop))
        tails = on_ranks(2, lambda mine, heads=heads: body(mine, state=heads[0][1]))
        for rank in range(2):
            assert heads[rank][0] + tails[rank][0] == whole[rank][0]


def test_a_state_of_another_number_of_ranks_is_refused():
    def state(mine):
        return DataLoader(range(8), 4, split=Local(), world=mine).state_dict()

    def load(mine):
        DataLoader(range(8), 4, split=Local(), world=mine).load_state_dict(taken)

    taken = on_ranks(2, state)[0]
    assert all("the same number of ranks" in str(found) for found in on_ranks(3, load))
