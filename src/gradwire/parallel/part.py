"""`Part`: this rank's piece of an activation, that behaves as the whole.

A layer that is shared by columns gives a `Part`; the user's own code goes on with it as if it were the whole tensor: shapes,
dims and numbers of heads are the whole's. What can be done on the piece alone is done on the piece; whatever cannot,
or is not known here, gathers the whole first. So sharing a layer may be slow, but never wrong.

Why not torch's `DTensor`: on CPU it draws dropout masks per rank, has no rule for attention, refuses plain masks beside it, and
cannot say that a rank holds *its heads of q, of k and of v* of a fused projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from gradwire.errors import UsageError
from gradwire.parallel.moves import Ranks, Segments, enter, gather, take

Value: TypeAlias = Any  # what torch functions take and give: tensors, numbers, lists of them
Handler = Callable[[Callable[..., Value], tuple[Value, ...], dict[str, Value]], Value]

HANDLERS: dict[str, Handler] = {}
# tied to one tensor object in autograd or in storage, which a piece of an activation is not
NOT_OF_PARTS = {
    "register_hook", "retain_grad", "grad", "grad_fn", "requires_grad_", "share_memory_", "set_", "resize_", "data",
    "register_post_accumulate_grad_hook", "data_ptr", "untyped_storage", "stride", "storage_offset", "is_leaf",
}  # fmt: skip


class Part:
    """A rank's piece of a whole tensor: of dim ``dim``, its 1/n of every one of ``segments``.

    local: this rank's piece. segments: lengths along ``dim`` of the whole, each divisible by n; several where a fused
    projection holds q, k and v.

    >>> part.shape, part.local.shape  # doctest: +SKIP
    (torch.Size([2, 5, 8]), torch.Size([2, 5, 4]))
    """

    def __init__(self, local: Tensor, dim: int, segments: Segments, ranks: Ranks) -> None:
        self.local = local
        self.axis = dim
        self.segments = segments
        self.ranks = ranks

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Value], types: object, args: tuple[Value, ...] = (), kwargs: Mapping[str, Value] = {}
    ) -> Value:
        return apply(func, args, dict(kwargs))

    @property
    def tail(self) -> int:
        """The shared dim counted from the end: -1 is the last."""
        return self.axis - self.local.dim()

    @property
    def shape(self) -> torch.Size:
        """The whole's shape."""
        sizes = list(self.local.shape)
        sizes[self.axis] = sum(self.segments)
        return torch.Size(sizes)

    def full_tensor(self) -> Tensor:
        """The whole, on every rank; one all-gather."""
        return gather(self.local, self.axis, self.segments, self.ranks)

    def like(self, local: Tensor, dim: int | None = None, segments: Segments | None = None) -> Part:
        """Another tensor's piece with the same ranks."""
        return Part(local, self.axis if dim is None else dim, segments or self.segments, self.ranks)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """As `torch.Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As `torch.Tensor.dim`."""
        return self.local.dim()

    def numel(self) -> int:
        """As `torch.Tensor.numel`: of the whole."""
        return self.shape.numel()

    ndim = property(dim)
    dtype = property(lambda self: self.local.dtype)
    device = property(lambda self: self.local.device)
    requires_grad = property(lambda self: self.local.requires_grad)
    is_nested = property(lambda _: False)
    is_sparse = property(lambda _: False)
    layout = property(lambda self: self.local.layout)
    is_cuda = property(lambda self: self.local.is_cuda)

    def __getattr__(self, name: str) -> Value:
        if name.startswith("__") or name in NOT_OF_PARTS or not hasattr(torch.Tensor, name):
            raise AttributeError(
                f"{name!r} is not known of an activation that tensor parallel ranks share; use .full_tensor() first, or "
                f"give its layer the tensor rule 'replicate'"
            )
        found = getattr(torch.Tensor, name)
        if callable(found):
            return lambda *args, **kwargs: apply(found, (self, *args), kwargs)
        return apply(lambda tensor: getattr(tensor, name), (self,), {}, name)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Value]:
        return iter(apply(torch.unbind, (self,), {}))

    def __repr__(self) -> str:
        place = f"rank {self.ranks.rank} of {self.ranks.size}"
        return f"Part({tuple(self.local.shape)} of {tuple(self.shape)}, dim {self.axis}, {place})"


_OPERATORS = (
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv",
    "floordiv", "rfloordiv", "mod", "pow", "rpow", "matmul", "rmatmul", "neg", "pos", "abs", "lt", "le", "gt", "ge",
    "eq", "ne", "and", "or", "xor", "invert", "getitem", "setitem", "bool", "float", "int",
)  # fmt: skip


def _operator(name: str) -> Callable[..., Value]:
    found = getattr(torch.Tensor, name)
    return lambda self, *args: apply(found, (self, *args), {})


for _name in _OPERATORS:
    setattr(Part, f"__{_name}__", _operator(f"__{_name}__"))
Part.__hash__ = object.__hash__  # pyright: ignore[reportAttributeAccessIssue]


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register what torch functions of these names do with parts."""

    def register(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return register


def apply(func: Callable[..., Value], args: tuple[Value, ...], kwargs: dict[str, Value], name: str = "") -> Value:
    """``func`` with the meaning it has on whole tensors."""
    spelled = name or getattr(func, "__name__", "")
    if kwargs.get("out") is not None:
        raise UsageError(f"torch.{spelled}(out=...) on an activation that tensor parallel ranks share; leave out= away")
    bare = spelled.strip("_")
    changes = changes_its_input(spelled) or bool(kwargs.get("inplace"))
    handler = HANDLERS.get(bare[1:] if spelled.startswith("__i") and bare[1:] in HANDLERS else bare)
    result = NotImplemented if handler is None else handler(func, args, kwargs)
    if result is NotImplemented:
        if changes and args and isinstance(args[0], Part):
            raise UsageError(
                f"{spelled} would change an activation that tensor parallel ranks share in place, and is not known of one; use "
                f"the form without the underscore, or give its layer the tensor rule 'replicate'"
            )
        return func(*to_whole(args), **to_whole(kwargs))
    return args[0] if changes_its_input(spelled) and args and isinstance(args[0], Part) else result


def changes_its_input(name: str) -> bool:
    """Whether a torch function of this name works in place: ``add_``, ``__iadd__``, ``__setitem__``."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__invert__"))
    return name.endswith("_")


def to_whole(value: Value) -> Value:
    """``value`` with every `Part` in it gathered."""
    return map_parts(value, lambda part: part.full_tensor())


def map_parts(value: Value, change: Callable[[Part], Value]) -> Value:
    """``value`` with every `Part` in its tuples, lists and dicts changed."""
    if isinstance(value, Part):
        return change(value)
    if isinstance(value, tuple):
        items = [map_parts(item, change) for item in cast("tuple[Value, ...]", value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [map_parts(item, change) for item in cast("list[Value]", value)]
    if type(value) is dict:
        return {key: map_parts(item, change) for key, item in cast("dict[Value, Value]", value).items()}
    return value


def parts_in(values: Sequence[Value]) -> list[Part]:
    """The parts among ``values``, not looking into lists."""
    return [value for value in values if isinstance(value, Part)]


def beside(value: Value, guide: Part, tail: int | None = None, segments: Segments | None = None) -> Value:
    """``value`` as an operand beside ``guide`` in work on pieces: what of it belongs to this rank's piece, by broadcasting.

    A tensor that is whole along the guide's dim gives its piece; one that is broadcast there enters as it is. Raises
    ValueError where the sizes do not fit.
    """
    tail = guide.tail if tail is None else tail
    segments = segments or guide.segments
    if isinstance(value, Part):
        if value.tail == tail and value.segments == segments:
            return value.local
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        return value
    if value.dim() < -tail or value.shape[tail] == 1:
        return enter(value, guide.ranks)
    if value.shape[tail] != sum(segments):
        raise ValueError(f"{tuple(value.shape)} beside {tuple(guide.shape)}")
    return take(value, value.dim() + tail, segments, guide.ranks)
