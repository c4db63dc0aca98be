"""A batch cut into micro-batches, uneven ones included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import cast

from torch import Tensor

from gradwire.errors import UsageError


def num_samples(x: object) -> int:
    """How many samples every tensor in ``x`` (a tensor, or tuples, lists and dicts of them) has in its first dimension.

    Raises UsageError if there is no tensor, or they differ.
    """
    sizes = {len(t) if t.dim() else 0 for t in _tensors(x)}
    if len(sizes) != 1 or not min(sizes):
        raise UsageError(
            f"gw.forward_backward cuts a batch along the first dimension of its tensors, which have {sorted(sizes) or 'none'}; "
            "give tensors of (samples, ...), and make masks and the like in the model's forward"
        )
    return sizes.pop()


def cut(x: object, num_parts: int) -> list[object]:
    """``num_parts`` (or, of a smaller batch, as many as samples) nearly equal parts, the larger ones first.

    >>> import torch
    >>> [part.tolist() for part in cut(torch.arange(5), 3)]
    [[0, 1], [2, 3], [4]]
    """
    total = num_samples(x)
    num_parts = min(num_parts, total)
    base, more = divmod(total, num_parts)
    bounds = [part * base + min(part, more) for part in range(num_parts + 1)]
    return [_mapped(x, lambda t, start=start, stop=stop: t[start:stop]) for start, stop in pairwise(bounds)]


def _mapped(x: object, act: Callable[[Tensor], Tensor]) -> object:
    if isinstance(x, Tensor):
        return act(x)
    if isinstance(x, dict):
        return {key: _mapped(value, act) for key, value in cast("dict[object, object]", x).items()}
    if isinstance(x, tuple | list):
        items = [_mapped(value, act) for value in cast("tuple[object, ...]", x)]
        return tuple(items) if isinstance(x, tuple) else items
    return x


def _tensors(x: object) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    inside = cast("dict[object, object]", x).values() if isinstance(x, dict) else x
    if isinstance(inside, tuple | list) or isinstance(x, dict):
        for value in cast("tuple[object, ...]", inside):
            yield from _tensors(value)
