"""Boxes of indices: which part of a tensor a rank holds, what two parts share, who writes which. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Box:
    """Indices offset[d] <= i < offset[d] + length[d] in each dimension d of a tensor.

    >>> Box((2, 0), (3, 4)).meet(Box((4, 1), (9, 1)))
    Box(offset=(4, 1), length=(1, 1))
    """

    offset: tuple[int, ...]
    length: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """How many entries it has; 1 for a scalar."""
        return math.prod(self.length)

    def meet(self, other: Box) -> Box | None:
        """What both have; None if that is nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = [
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.length, other.offset, other.length, strict=True)
        ]
        lengths = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, lengths) if all(length > 0 for length in lengths) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where it lies in a tensor that holds just ``outer``."""
        places = zip(self.offset, self.length, outer.offset, strict=True)
        return tuple(slice(start - base, start - base + length) for start, length, base in places)


def cut(shape: Sequence[int], cuts: Sequence[tuple[int, int, int]]) -> Box:
    """What is left of a tensor after cuts (dim, number of parts, which one), each of what the one before left.

    Parts are ``torch.chunk``'s: all of ceil(n / parts), then a smaller one, then empty ones.

    >>> [cut((7, 2), [(0, 4, part)]).length[0] for part in range(4)], cut((7, 2), [(0, 2, 1), (0, 2, 1)])
    ([2, 2, 2, 1], Box(offset=(6, 0), length=(1, 2)))
    """
    offset, length = [0] * len(shape), list(shape)
    for dim, parts, which in cuts:
        size = -(-length[dim] // parts)
        start = min(which * size, length[dim])
        offset[dim] += start
        length[dim] = min(size, length[dim] - start)
    return Box(tuple(offset), tuple(length))


def gaps(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Why these boxes are not each entry of the tensor exactly once; empty if they are.

    >>> gaps((4,), [Box((0,), (2,)), Box((1,), (3,))])
    'parts at (0,) and (1,) overlap'
    """
    whole = Box.whole(shape)
    for box in boxes:
        if box.meet(whole) != box:
            return f"a part at {box.offset} of {box.length} is not inside {tuple(shape)}"
    for one, other in combinations(boxes, 2):
        if one.meet(other):
            return f"parts at {one.offset} and {other.offset} overlap"
    missing = whole.numel - sum(box.numel for box in boxes)
    return f"{missing} of {whole.numel} entries are missing" if missing else ""


def share_out(num_bytes: Mapping[Key, int], able: Mapping[Key, Sequence[int]]) -> dict[Key, int]:
    """Who does what: each key goes to one of the ranks that are able to, so that their bytes are about even.

    The largest first, to whoever has least so far; the same answer on all ranks.

    >>> share_out({"a": 9, "b": 5, "c": 4}, {"a": [0, 1], "b": [0, 1], "c": [1]})
    {'a': 0, 'b': 1, 'c': 1}
    """
    load: dict[int, int] = {}
    chosen: dict[Key, int] = {}
    for key in sorted(num_bytes, key=lambda key: -num_bytes[key]):  # stable: equal sizes stay in the given order
        rank = min(able[key], key=lambda rank: (load.get(rank, 0), rank))
        chosen[key] = rank
        load[rank] = load.get(rank, 0) + num_bytes[key]
    return chosen
