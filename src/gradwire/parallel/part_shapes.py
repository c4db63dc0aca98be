"""What views, cuts and joins mean for a `Part`: where the shared dim goes. Pure arithmetic on shapes, then the same on pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.parallel.moves import Segments, take
from gradwire.parallel.part import Part, Value, beside, handles


def place_in_view(
    shape: Sequence[int], dim: int, segments: Segments, new: Sequence[int], n: int
) -> tuple[int, Segments] | None:
    """Where ``dim``, shared by n ranks, is after a view; None if a rank's piece is no piece of it.

    A piece is 1/n of every run of ``length * inner`` numbers. It is one of ``new``'s dim e if a run fills whole entries of
    e: ``part * after(e) == length * inner`` with n dividing ``part``.

    >>> place_in_view((2, 5, 12), 2, (12,), (2, 5, 4, 3), 2)  # features to heads
    (2, (4,))
    >>> place_in_view((2, 5, 24), 2, (8, 8, 8), (2, 5, 3, 4, 2), 2)  # q, k and v apart
    (3, (4,))
    """
    before, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    for e, size in enumerate(new):
        if size == sum(segments) and math.prod(new[:e]) == before:
            return e, segments
    if len(set(segments)) != 1:
        return None
    runs, run = before * len(segments), segments[0] * inner
    for e, size in enumerate(new):
        after = math.prod(new[e + 1 :])
        part = run // after if after and run % after == 0 else 0
        if part and size % part == 0 and part % n == 0 and math.prod(new[:e]) * (size // part) == runs:
            return e, (part,) * (size // part)
    return None


def cut(segments: Segments, sizes: Sequence[int]) -> list[Segments] | None:
    """The segments of each of ``sizes``; None if a cut falls inside a segment.

    >>> cut((8, 4, 4), [8, 8])
    [(8,), (4, 4)]
    """
    left, pieces = list(segments), list[Segments]()
    for size in sizes:
        piece: list[int] = []
        while left and sum(piece) + left[0] <= size:
            piece.append(left.pop(0))
        if sum(piece) != size or not piece:
            return None
        pieces.append(tuple(piece))
    return None if left else pieces


def _sizes(args: Sequence[Value]) -> list[int]:
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list, torch.Size)) else list(args)


def _viewed(part: Part, new: list[int]) -> Value:
    if -1 in new:
        known = math.prod(size for size in new if size != -1)
        new = [part.numel() // known if size == -1 else size for size in new]
    found = place_in_view(part.shape, part.axis, part.segments, new, part.ranks.size)
    if found is None or math.prod(new) != part.numel():
        return NotImplemented
    dim, segments = found
    new[dim] //= part.ranks.size
    return part.like(part.local.reshape(new), dim, segments)


@handles("view", "reshape")
def _view(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    if kwargs or not isinstance(args[0], Part) or not all(isinstance(size, int) for size in _sizes(args[1:])):
        return NotImplemented
    return _viewed(args[0], _sizes(args[1:]))


@handles("view_as", "reshape_as")
def _view_as(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    return (
        _viewed(args[0], list(args[1].shape))
        if isinstance(args[0], Part)
        else func(args[0], torch.empty(args[1].shape))
    )


@handles("flatten")
def _flatten(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    part, shape = args[0], list(args[0].shape)
    start = kwargs.get("start_dim", args[1] if len(args) > 1 else 0) % len(shape)
    end = kwargs.get("end_dim", args[2] if len(args) > 2 else -1) % len(shape)
    return _viewed(part, [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])


@handles("unflatten")
def _unflatten(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    part, shape = args[0], list(args[0].shape)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % len(shape)
    sizes = list(kwargs.get("sizes", args[2] if len(args) > 2 else ()))
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes = [shape[dim] // known if size == -1 else size for size in sizes]
    return _viewed(part, [*shape[:dim], *sizes, *shape[dim + 1 :]])


@handles(
    "permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT", "mH", "H", "adjoint", "unsqueeze",
    "view_as_real", "view_as_complex",
)  # fmt: skip
def _moved(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    """Ask torch where the dim goes: of a tensor whose shared dim alone has length 2."""
    part = args[0]
    if not isinstance(part, Part):
        return NotImplemented
    name = getattr(func, "__name__", "")
    probe = torch.ones([2 if dim == part.axis else 1 for dim in range(part.dim())], device="meta")
    if "view_as" in name:
        if name == "view_as_complex" and part.tail == -1:
            return NotImplemented
        return part.like(func(part.local))
    dim = list(func(probe, *args[1:], **kwargs).shape).index(2)
    return part.like(func(part.local, *args[1:], **kwargs), dim)


@handles("squeeze")
def _squeeze(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    part = args[0]
    given = kwargs.get("dim", args[1] if len(args) > 1 else tuple(range(part.dim())))
    dims = {dim % part.dim() for dim in (given if isinstance(given, (tuple, list)) else (given,))}
    gone = sorted(dim for dim in dims if part.shape[dim] == 1 and dim != part.axis)
    local = part.local
    for dim in reversed(gone):
        local = local.squeeze(dim)
    return part.like(local, part.axis - sum(dim < part.axis for dim in gone))


@handles("expand")
def _expand(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    part, sizes = args[0], _sizes(args[1:])
    dim = len(sizes) + part.tail
    if kwargs or sizes[dim] not in (-1, part.shape[part.axis]):
        return NotImplemented
    sizes[dim] = part.local.shape[part.axis]
    return part.like(part.local.expand(sizes), dim)


@handles("repeat")
def _repeat(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    part, times = args[0], _sizes(args[1:])
    dim = len(times) + part.tail
    return NotImplemented if kwargs else part.like(part.local.repeat(times), dim, part.segments * times[dim])


@handles("repeat_interleave")
def _repeat_interleave(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    part = args[0]
    times = kwargs.get("repeats", args[1] if len(args) > 1 else None)
    dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    if not isinstance(part, Part) or not isinstance(times, int) or dim is None:
        return NotImplemented
    grow = times if dim % part.dim() == part.axis else 1
    local = part.local.repeat_interleave(times, dim)
    return part.like(local, segments=tuple(length * grow for length in part.segments))


@handles("chunk", "split", "unbind", "split_with_sizes", "narrow", "select", "index_select", "flip", "roll")
def _cut(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    part, name = args[0], getattr(func, "__name__", "")
    if not isinstance(part, Part):
        return NotImplemented
    place = {"unbind": 1, "narrow": 1, "select": 1, "index_select": 1, "flip": 1}.get(name, 2)
    default = 0 if name in ("chunk", "split", "split_with_sizes", "unbind") else None
    given = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
    if given is None or (name == "flip" and len(args) > 2):
        return NotImplemented
    dims = {dim % part.dim() for dim in (given if isinstance(given, (tuple, list)) else (given,))}
    if part.axis not in dims:
        dropped = name in ("unbind", "select") and min(dims) < part.axis
        result = func(part.local, *args[1:], **kwargs)
        made = [
            part.like(piece, part.axis - dropped)
            for piece in (result if isinstance(result, (tuple, list)) else [result])
        ]
        return tuple(made) if isinstance(result, (tuple, list)) else made[0]
    if name not in ("chunk", "split", "split_with_sizes"):
        return NotImplemented
    count = kwargs.get(
        "chunks", kwargs.get("split_size_or_sections", kwargs.get("split_size", args[1] if len(args) > 1 else None))
    )
    return _cut_shared(part, count, chunks=name == "chunk")


def _cut_shared(part: Part, count: int | Sequence[int] | None, *, chunks: bool) -> Value:
    """The shared dim itself is cut: at the segments' ends on the piece, elsewhere by way of the whole."""
    total, n = part.shape[part.axis], part.ranks.size
    if count is None:
        return NotImplemented
    if isinstance(count, int):
        step = -(-total // count) if chunks else count
        count = [min(step, total - start) for start in range(0, total, step)]
    if found := cut(part.segments, count):
        pieces = part.local.split([sum(piece) // n for piece in found], part.axis)
        return tuple(part.like(local, segments=piece) for local, piece in zip(pieces, found, strict=True))
    if any(size % n for size in count) or sum(count) != total:
        return NotImplemented
    whole = part.full_tensor().split(list(count), part.axis)
    return tuple(
        part.like(take(piece, part.axis, (piece.shape[part.axis],), part.ranks), segments=(piece.shape[part.axis],))
        for piece in whole
    )


@handles("getitem")
def _getitem(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    part, index = args
    if not isinstance(part, Part):
        return NotImplemented
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(item is None or item is Ellipsis or type(item) in (int, slice) for item in items):
        return NotImplemented
    used = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    items[at : at + 1] = [slice(None)] * (part.dim() - used)
    source = target = 0
    for item in items:
        if item is not None and source == part.axis:
            return part.like(part.local[tuple(items)], target) if item == slice(None) else NotImplemented
        source += item is not None
        target += not isinstance(item, int)
    return NotImplemented


@handles("cat", "concat", "concatenate", "stack")
def _joined(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    tensors = list(kwargs.get("tensors", args[0] if args else ()))
    guide = next(item for item in tensors if isinstance(item, Part))
    stacks = getattr(func, "__name__", "") == "stack"
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % (guide.dim() + stacks)
    if (not stacks and dim == guide.axis) or not all(item.dim() == guide.dim() for item in tensors):
        return NotImplemented
    if not all(item.shape[guide.axis] == guide.shape[guide.axis] for item in tensors):
        return NotImplemented
    pieces: list[Tensor] = [beside(item, guide) for item in tensors]
    return guide.like(func(pieces, dim), guide.axis + (stacks and dim <= guide.axis))


@handles("pad")
def _pad(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    part = args[0]
    widths = kwargs.get("pad", args[1] if len(args) > 1 else ())
    if len(widths) // 2 >= -part.tail:
        return NotImplemented
    return part.like(func(part.local, *args[1:], **kwargs))
