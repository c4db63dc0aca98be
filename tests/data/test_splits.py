"""Splits: every sample once, sizes and mixes as promised, for any batch and world."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.data import ByClass, Local, Proportional, Random, Sample, Stratified, Uniform
from gradwire.data.order import permutation
from gradwire.errors import DataError

LABELS = [place % 7 % 3 for place in range(200)]
batches = st.lists(st.integers(0, 199), max_size=40)
keys = st.tuples(*[st.integers(0, 5)] * 4)


def splits_for(size):
    shares = [rank + 1 for rank in range(size)]
    fractions = [share / sum(shares) for share in shares]
    return [
        Uniform(),
        Stratified(LABELS),
        ByClass(LABELS),
        Random(fractions=fractions),
        Random(fractions=fractions, fixed=True),
        Proportional(shares),
        Sample(0.5, split=Stratified(LABELS)),
    ]


@given(batches, st.integers(1, 5), keys)
def test_the_union_of_the_parts_is_the_batch(batch, size, key):
    for split in splits_for(size):
        parts = split.parts(batch, size, key)
        assert len(parts) == size
        assert Counter(sum(parts, [])) == Counter(batch)
        assert parts == split.parts(list(batch), size, key)


@given(batches, st.integers(1, 5), keys)
def test_uniform_and_stratified_sizes_differ_by_at_most_one(batch, size, key):
    for split in (Uniform(), Stratified(LABELS)):
        sizes = [len(part) for part in split.parts(batch, size, key)]
        assert max(sizes) - min(sizes) <= 1


@given(batches, st.integers(1, 5), keys)
def test_stratified_ranks_differ_by_at_most_one_in_every_class(batch, size, key):
    parts = Stratified(LABELS).parts(batch, size, key)
    for label in set(LABELS):
        counts = [sum(LABELS[index] == label for index in part) for part in parts]
        assert max(counts) - min(counts) <= 1


@given(batches, st.integers(1, 5), keys)
def test_a_class_stays_on_one_rank_for_the_whole_run(batch, size, key):
    split = ByClass(LABELS)
    owner = split.owners(size)
    for rank, part in enumerate(split.parts(batch, size, key)):
        assert all(owner[LABELS[index]] == rank for index in part)


def test_classes_are_balanced_by_their_counts():
    labels = ["a"] * 50 + ["b"] * 30 + ["c"] * 25 + ["d"] * 5
    parts = ByClass(labels).parts(list(range(110)), 2, (0, 0, 0, 0))
    assert [len(part) for part in parts] == [55, 55]


def test_random_parts_keep_their_shares_and_change_with_every_batch():
    split = Random(fractions=[0.7, 0.2, 0.1])
    sizes = np.array([[len(part) for part in split.parts(range(8), 3, (0, 0, step, 0))] for step in range(3000)])
    assert np.all(np.abs(sizes - 8 * np.array([0.7, 0.2, 0.1])) < 1)
    # systematic rounding: the standard error of a mean of 3000 values in an interval of length 1 is below 0.01
    assert np.allclose(sizes.mean(0), 8 * np.array([0.7, 0.2, 0.1]), atol=0.04)
    assert split.parts(range(8), 3, (0, 0, 0, 0)) != split.parts(range(8), 3, (0, 0, 1, 0))


def test_fixed_random_owners_never_change_and_hold_their_shares():
    split = Random(fractions=[0.7, 0.2, 0.1], fixed=True)
    everything = range(20000)
    first = split.parts(everything, 3, (0, 0, 0, 0))
    assert first == split.parts(everything, 3, (0, 9, 9, 9))
    assert first != split.parts(everything, 3, (1, 0, 0, 0))
    # binomial: 4 standard deviations of 20000 lots are below 0.015
    assert np.allclose([len(part) / 20000 for part in first], [0.7, 0.2, 0.1], atol=0.015)


def test_proportional_parts_follow_the_speeds():
    assert [len(part) for part in Proportional([3, 1]).parts(range(64), 2, (0, 0, 0, 0))] == [48, 16]


@given(st.integers(1, 300), st.integers(0, 9), st.integers(0, 9))
def test_an_order_has_each_index_once(length, seed, epoch):
    order = permutation(length, (seed, epoch))
    assert sorted(order.tolist()) == list(range(length))
    assert (order == permutation(length, (seed, epoch))).all()


def test_all_orders_of_three_come_equally_often():
    found = Counter(tuple(permutation(3, (0, epoch)).tolist()) for epoch in range(6000))
    # 6 orders, expectation 1000, standard deviation 29: 5 of them
    assert len(found) == 6 and all(abs(count - 1000) < 150 for count in found.values())


def test_a_sample_without_replacement_has_no_index_twice_and_changes_each_epoch():
    order = permutation(100, (0, 0))
    first, second = Sample(0.3).draw(order, (0, 0)), Sample(0.3).draw(order, (0, 1))
    assert len(first) == len(set(first.tolist())) == 30
    assert first.tolist() != second.tolist()
    assert (first == Sample(0.3).draw(order, (0, 0))).all()


def test_a_weighted_sample_follows_its_weights():
    order = permutation(4, (0, 0))
    drawn = Sample(10_000, weights=[0, 1, 2, 5]).draw(order, (0, 0))
    counts = np.bincount(drawn, minlength=4) / len(drawn)
    assert len(drawn) == 40_000 and counts[0] == 0
    # 4 standard deviations of 40000 draws are below 0.01
    assert np.allclose(counts, np.array([0, 1, 2, 5]) / 8, atol=0.01)


def test_a_weighted_sample_without_replacement_leaves_out_weight_zero():
    drawn = Sample(0.5, weights=[0, 1, 0, 9], replacement=False).draw(np.arange(4), (0, 0))
    assert sorted(drawn.tolist()) == [1, 3]


def test_labels_may_be_lists_arrays_tensors_or_words():
    for labels in ([0, 1] * 4, np.array([0, 1] * 4), torch.tensor([0, 1] * 4), ["cat", "dog"] * 4):
        assert Stratified(labels).parts(range(4), 2, (0, 0, 0, 0)) == [[0, 1], [2, 3]]


def test_different_labels_have_different_words():
    assert Stratified([0, 1, 0]).words() != Stratified([0, 1, 1]).words()


def test_local_has_no_common_batch():
    with pytest.raises(DataError, match="own"):
        Local().parts([1], 2, (0, 0, 0, 0))
