"""What arithmetic, attention and dropout mean for a `Part`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gradwire.parallel.moves import enter, leave, my_share
from gradwire.parallel.part import Part, Value, beside, handles, parts_in

POINTWISE = (
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "pow", "float_power",
    "remainder", "fmod", "neg", "negative", "positive", "abs", "exp", "expm1", "log", "log1p", "log2", "sqrt",
    "rsqrt", "square", "sin", "cos", "tan", "tanh", "sigmoid", "erf", "reciprocal", "sign", "floor", "ceil", "round",
    "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "where", "masked_fill", "lerp", "addcmul",
    "addcdiv", "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "softplus", "softsign",
    "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "threshold", "hardshrink", "tanhshrink", "softshrink",
    "nan_to_num", "isnan", "isinf", "isfinite", "logical_not", "logical_and", "logical_or", "eq", "ne", "lt", "le",
    "gt", "ge", "contiguous", "clone", "detach", "float", "double", "half", "bfloat16", "real", "imag", "conj",
    "conj_physical", "atan2", "zeros_like", "ones_like", "empty_like", "full_like", "type", "radd", "rsub", "rmul",
    "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rpow", "and", "or", "xor", "invert", "iadd", "isub",
    "imul", "itruediv",
)  # fmt: skip


@handles(*POINTWISE)
def _pointwise(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    parts = [*parts_in(args), *parts_in(list(kwargs.values()))]
    if not parts or (args and isinstance(args[0], Tensor) and getattr(func, "__name__", "").endswith("_")):
        return NotImplemented
    guide = max(parts, key=Part.dim)
    try:
        local = func(*(beside(arg, guide) for arg in args), **{key: beside(arg, guide) for key, arg in kwargs.items()})
    except ValueError:
        return NotImplemented
    return guide.like(local, local.dim() + guide.tail)


@handles("to", "type_as")
def _converted(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    part, other = args[0], args[1] if len(args) > 1 else None
    if not isinstance(part, Part):
        return part.to(other.dtype) if isinstance(other, Part) else NotImplemented
    if isinstance(other, (Part, Tensor)):
        return part.like(part.local.to(device=other.device, dtype=other.dtype))
    return part.like(func(part.local, *args[1:], **kwargs))


_DIM_SECOND = (
    "sum", "mean", "amax", "amin", "max", "min", "softmax", "log_softmax", "softmin", "logsumexp", "cumsum",
    "cumprod", "argmax", "argmin", "var", "std", "prod", "any", "all", "sort", "argsort",
)  # fmt: skip


@handles(*_DIM_SECOND, "norm", "normalize", "topk")
def _along(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    """Along dims that are not shared, each rank works on its piece."""
    part, name = args[0], getattr(func, "__name__", "")
    place = 1 if name in _DIM_SECOND else 2
    default = {"normalize": 1, "topk": -1, "sort": -1, "argsort": -1}.get(name)
    given = kwargs.get("dim", args[place] if len(args) > place else default)
    if isinstance(given, (Part, Tensor)):  # torch.max(a, b)
        return _pointwise(func, args, kwargs)
    if not isinstance(part, Part) or given is None or isinstance(given, (bool, str, torch.dtype)):
        return NotImplemented
    dims = {dim % part.dim() for dim in (given if isinstance(given, (tuple, list)) else (given,))}
    if not dims or part.axis in dims:
        return NotImplemented
    result = func(part.local, *args[1:], **kwargs)

    def placed(tensor: Tensor) -> Part:
        gone = sum(dim < part.axis for dim in dims) if tensor.dim() < part.dim() else 0
        return part.like(tensor, part.axis - gone)

    if isinstance(result, Tensor):
        return placed(result)
    return type(result)([placed(item) for item in result])  # torch's named pairs take one sequence


@handles("layer_norm", "rms_norm")
def _normalised(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    part, shape = args[0], kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
    if not isinstance(part, Part) or -part.tail <= len(shape):
        return NotImplemented
    rest = [enter(arg, part.ranks) if isinstance(arg, Tensor) else arg for arg in args[1:]]
    named = {key: enter(arg, part.ranks) if isinstance(arg, Tensor) else arg for key, arg in kwargs.items()}
    return part.like(func(part.local, *rest, **named))


@handles("linear")
def _linear(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    part = args[0]
    if not isinstance(part, Part) or part.tail == -1 or kwargs or parts_in(args[1:]):
        return NotImplemented
    return part.like(
        func(part.local, *(enter(arg, part.ranks) if isinstance(arg, Tensor) else arg for arg in args[1:]))
    )


@handles("matmul", "bmm", "mm")
def _matmul(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    """Batches (heads) or rows are shared: no rank needs another's. The summed dim is shared: the products are summed."""
    left, right = args
    guide = left if isinstance(left, Part) else right
    if guide.dim() < 2 or left.dim() < 2 or right.dim() < 2:
        return NotImplemented
    if isinstance(left, Part) and isinstance(right, Part) and (left.tail, right.tail) == (-1, -2):
        return leave(func(left.local, right.local), guide.ranks) if left.segments == right.segments else NotImplemented
    if guide.tail <= -3:
        try:
            local = func(beside(left, guide), beside(right, guide))
        except ValueError:
            return NotImplemented
    elif guide is left and guide.tail == -2 and not isinstance(right, Part):
        local = func(left.local, enter(right, guide.ranks))
    elif guide is right and guide.tail == -1 and not isinstance(left, Part):
        local = func(enter(left, guide.ranks), right.local)
    else:
        return NotImplemented
    return guide.like(local, local.dim() + guide.tail)


@handles("rmatmul")
def _rmatmul(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    return _matmul(torch.matmul, (args[1], args[0]), kwargs)


@handles("einsum")
def _einsum(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    """One letter is shared: kept in the result, a piece; summed over, the ranks' sums are summed."""
    equation, *operands = args
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return NotImplemented
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    ins, out = equation.replace(" ", "").split("->")
    terms: Sequence[str] = ins.split(",")
    guide, term = next((item, term) for item, term in zip(operands, terms, strict=True) if isinstance(item, Part))
    letter = term[guide.axis]
    if any(term.count(letter) > 1 for term in terms):
        return NotImplemented
    locals_ = [
        beside(item, guide, term.index(letter) - len(term))
        if letter in term
        else enter(item.full_tensor() if isinstance(item, Part) else item, guide.ranks)
        for item, term in zip(operands, terms, strict=True)
    ]
    local = torch.einsum(equation, *locals_)
    return guide.like(local, out.index(letter)) if letter in out else leave(local, guide.ranks)


@handles("tril", "triu")
def _triangle(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    part = args[0]
    return part.like(func(part.local, *args[1:], **kwargs)) if part.tail <= -3 else NotImplemented


@handles("dropout")
def _dropout(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    """Every rank draws the whole mask and takes its piece: one process's mask, and equal generator states afterwards."""
    part = args[0]
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    inplace = kwargs.get("inplace", args[3] if len(args) > 3 else False)
    if not training or p == 0:
        return part
    order = sorted(range(part.dim()), key=part.local.stride, reverse=True)  # numbers are drawn in the order of memory
    ones = part.local.new_ones([part.shape[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(part.dim())]
    )
    mask = my_share(F.dropout(ones, p), part.axis, part.segments, part.ranks)
    if inplace:
        part.local.mul_(mask)
        return part
    return part.like(part.local * mask)


@handles("scaled_dot_product_attention")
def _attention(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value]) -> Value:
    """Heads (or batches) are shared: each rank attends with its own."""
    given = {
        **dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)),
        **kwargs,
    }
    query, key, value, mask = given.pop("query"), given.pop("key"), given.pop("value"), given.pop("attn_mask", None)
    if not isinstance(query, Part) or query.tail > -3 or not _belongs(key, query) or not _belongs(value, query):
        return NotImplemented
    if given.get("dropout_p", 0.0) > 0:
        return _attention_with_dropout(query, key, value, mask, **given)
    try:
        key, value = (item.local if isinstance(item, Part) else enter(item, query.ranks) for item in (key, value))
        mask = None if mask is None else beside(mask, query)
    except ValueError:
        return NotImplemented
    return query.like(func(query.local, key, value, attn_mask=mask, **given))


def _belongs(other: Value, query: Part) -> bool:
    """Whether each rank has the keys or values that its queries look at: the same heads, or equal shares of fewer."""
    if not isinstance(other, Part):
        return other.dim() >= -query.tail and other.shape[query.tail] == 1
    pairs = zip(query.segments, other.segments, strict=False)
    return (
        other.tail == query.tail
        and len(other.segments) == len(query.segments)
        and len({a / b for a, b in pairs}) == 1
        and all(a % b == 0 for a, b in zip(query.segments, other.segments, strict=True))
    )


def _attention_with_dropout(
    query: Part,
    key: Value,
    value: Value,
    mask: Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """The formula itself, in the order in which torch's own draws its mask."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    root = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    scores: Value = torch.matmul(torch.mul(query, root), key.transpose(-2, -1) * root)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1)
    if mask is not None:  # a query that may look at nothing gets 0, as torch gives
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    return torch.matmul(F.dropout(weights, dropout_p), value)
