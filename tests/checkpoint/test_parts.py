"""The pure parts: boxes, trees, the plan of who writes what, the manifest's text."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.checkpoint.files import DTYPES, Entry, bytes_of, write_file
from gradwire.checkpoint.manifest import File, Manifest, Section, from_text, to_text
from gradwire.checkpoint.pieces import Box, cut, gaps, share_out
from gradwire.checkpoint.trees import from_json, to_json
from gradwire.checkpoint.writing import collect
from gradwire.errors import MismatchError

SHAPE = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)


@given(SHAPE, st.integers(1, 5), st.integers(1, 4), st.data())
def test_cuts_are_torchs_chunks_of_chunks_and_leave_nothing_out(shape, first, second, data):
    one, two = (data.draw(st.integers(0, len(shape) - 1)) for _ in range(2))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    boxes = [cut(shape, [(one, first, a), (two, second, b)]) for a in range(first) for b in range(second)]
    assert gaps(shape, [box for box in boxes if box.numel]) == ""
    for a, part in enumerate(whole.chunk(first, one)):
        for b, piece in enumerate(part.chunk(second, two)):
            assert torch.equal(whole[boxes[a * second + b].within(Box.whole(shape))], piece)


@given(st.data())
def test_what_two_boxes_share_is_what_their_masks_share(data):
    def box() -> Box:
        offset = data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
        return Box(offset, data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5))))

    def mask(of: Box) -> np.ndarray:
        filled = np.zeros((12, 12), bool)
        filled[of.within(Box.whole((12, 12)))] = True
        return filled

    one, other = box(), box()
    shared, both = one.meet(other), mask(one) & mask(other)
    assert not both.any() if shared is None else (mask(shared) == both).all()


@given(st.lists(st.integers(0, 100), min_size=1), st.integers(1, 5))
def test_shares_differ_by_no_more_than_the_largest_piece(sizes, ranks):
    keys = dict(enumerate(sizes))
    chosen = share_out(keys, dict.fromkeys(keys, range(ranks)))
    load = [sum(size for key, size in keys.items() if chosen[key] == rank) for rank in range(ranks)]
    assert max(load) - min(load) <= max(sizes)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TREES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["$tensor", "$dict", "$x"]), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text()), inner)
    ),
)


@given(TREES)
def test_a_tree_comes_back_from_its_json(tree):
    text = json.dumps(to_json(tree, "a", {}), allow_nan=False)
    again = from_json(json.loads(text), lambda name: torch.zeros(()))
    assert again == tree
    assert repr(again) == repr(tree)


def test_what_json_lacks_comes_back_too():
    tensors: dict[str, torch.Tensor] = {}
    tree = {
        "nan": float("nan"), "minus": -math.inf, "count": Counter({2: 1, 5: 3}), "numpy": np.float32(0.1), "whole": np.int64(3),
        "array": np.arange(3), "tensors": [torch.ones(2), {1: torch.zeros(())}],
    }  # fmt: skip
    again = from_json(json.loads(json.dumps(to_json(tree, "a", tensors))), tensors.__getitem__)
    assert isinstance(again, dict)
    assert math.isnan(again["nan"]) and again["minus"] == -math.inf
    assert again["count"] == tree["count"] and isinstance(again["count"], Counter)
    assert again["numpy"] == float(np.float32(0.1)) and type(again["whole"]) is int
    assert isinstance(again["array"], np.ndarray) and again["array"].tolist() == [0, 1, 2]
    assert list(tensors) == ["a.array", "a.tensors.0", "a.tensors.1.1"]
    assert again["tensors"][1][1] is tensors["a.tensors.1.1"]


def whole(crc32: str) -> list[tuple[str, str, tuple[int, ...], Box, str]]:
    return [("m/w", "float32", (4,), Box.whole((4,)), crc32)]


def row(rank: int) -> list[tuple[str, str, tuple[int, ...], Box, str]]:
    return [("m/w", "float32", (4,), Box((2 * rank,), (2,)), "")]


def test_equal_copies_are_written_once_and_others_each_with_their_ranks():
    same = collect([whole("a"), whole("a"), whole("a")])["m/w"]
    assert [(piece.file, piece.ranks) for piece in same.pieces] == [("rank-0.safetensors", None)]
    differ = collect([whole("a"), whole("b"), whole("a")])["m/w"]
    assert [(piece.file, piece.ranks) for piece in differ.pieces] == [
        ("rank-0.safetensors", (0, 2)),
        ("rank-1.safetensors", (1,)),
    ]


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ([row(0), whole("")], "overlap"),
        ([row(0), row(2)], "not inside"),
        ([row(0)], "2 of 4 entries are missing; all ranks"),
        ([whole(""), [("m/w", "float64", (4,), Box.whole((4,)), "")]], r"float32 \(4,\) on rank 0 and float64"),
    ],
)
def test_parts_that_are_not_the_whole_are_refused(claims, words):
    with pytest.raises(MismatchError, match=words):
        collect(claims)


def test_a_manifest_comes_back_from_its_text():
    tensors = collect([row(0), row(1)]) | collect([[("m/e", "int64", (0, 2), Box.whole((0, 2)), "")]])
    manifest = Manifest(
        gradwire="1", torch="2", world_size=2, mesh="shard=2", plan="p", step=3,
        files={f"rank-{rank}.safetensors": File(9, "00000000") for rank in range(2)},
        tensors=tensors, aliases={"m/tied": "m/w"},
        sections={"m": Section(kind="model", about={}), "rng": Section(kind="rank", about=None, ranks=(1, {"a": None}))},
    )  # fmt: skip
    assert from_text(to_text(manifest), "here") == manifest


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_safetensors_reads_what_is_written_in_every_dtype(tmp_path, dtype):
    from safetensors.torch import load_file

    bits = torch.randint(0, 2, (6 * dtype.itemsize,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    value = bits.view(dtype).reshape(3, 2)
    entries = {
        "turned": Entry(dtype, (2, 3), lambda: value.t()), "one": Entry(dtype, (), lambda: value[0, 0]),
        "none": Entry(dtype, (0,), lambda: value[:0, 0]), "bytes": Entry(torch.uint8, (1,), lambda: bits[:1]),
    }  # fmt: skip
    file = write_file(tmp_path / "a", entries, {"format": "pt"})
    assert file.num_bytes == (tmp_path / "a").stat().st_size
    found = load_file(tmp_path / "a")
    if dtype == torch.complex128:
        found = {name: each if name == "bytes" else torch.view_as_complex(each) for name, each in found.items()}
    for name, entry in entries.items():
        assert (found[name].dtype, found[name].shape) == (entry.dtype, torch.Size(entry.shape))
        assert bytes_of(found[name]) == bytes_of(entry.fetch())
