"""Which `nn.Linear` feeds which, read off the user's forward by `torch.fx`; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from unittest.mock import patch

from torch import fx, nn
from torch.autograd import Function

from gradwire.parallel.factories import factories_are_nodes
from gradwire.parallel.part import HANDLERS

NORMS = (nn.LayerNorm, nn.RMSNorm)
ACTIVATIONS = (
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.Mish, nn.LeakyReLU, nn.Softplus, nn.ReLU6,
    nn.Hardswish, nn.Hardtanh, nn.Softsign, nn.LogSigmoid, nn.Dropout, nn.Identity, nn.Unflatten, nn.Flatten,
)  # fmt: skip
VIEWS = {"view", "reshape", "unflatten", "rearrange"}
SIZES = {"shape", "dtype", "device", "ndim"}


@dataclass(frozen=True)
class Feed:
    """A Linear, the Linears whose outputs reach it, and what happens on the way.

    heads: whether the numbers are regrouped on the way, as attention does.
    """

    to: str
    sources: tuple[str, ...]
    heads: bool


class _Tracer(fx.Tracer):
    """Looks into the user's modules, not into torch's; goes into the branches that are taken if conditions are true."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return True

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        return super().iter(obj)


def trace(block: nn.Module) -> fx.Graph | None:
    """The graph of ``block``'s forward; None if it cannot be read that way."""
    tracer = _Tracer()
    with factories_are_nodes(tracer, always=False), patch.object(Function, "apply", _refuse):
        try:
            return tracer.trace(block)
        except Exception:  # the user's forward may do anything with what it is given
            return None


def _refuse(*_: object, **__: object) -> None:
    raise _Hidden


class _Hidden(Exception):
    """An autograd function hides what it does."""


def feeds(graph: fx.Graph, linears: Mapping[str, nn.Module], modules: Mapping[str, nn.Module]) -> list[Feed]:
    """For each Linear fed by others through nothing but what `Part` knows: by whom. In the order of work."""
    found: list[Feed] = []
    for node in graph.nodes:
        feed = _feed(node, linears, modules) if node.op == "call_module" and node.target in linears else None
        found += [feed] if feed else []
    return found


def called_once(graph: fx.Graph) -> set[str]:
    """Modules that the forward calls exactly once."""
    calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    return {name for name in calls if calls.count(name) == 1}


def _feed(node: fx.Node, linears: Mapping[str, nn.Module], modules: Mapping[str, nn.Module]) -> Feed | None:
    sources: list[str] = []
    views = norms = False
    ahead, seen = list(node.all_input_nodes), set[fx.Node]()
    while ahead:
        one = ahead.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.op == "call_module" and one.target in linears:
            sources.append(str(one.target))
            continue
        if not _reached_from(one, linears):
            continue  # a whole tensor from elsewhere: a mask, a residual; or a size
        name = _name(one)
        views = views or name in VIEWS
        norms = norms or (one.op == "call_module" and isinstance(modules[str(one.target)], NORMS))
        if not _known(one, name, modules):
            return None
        ahead += one.all_input_nodes
    if norms and not views:  # normalised over the features that would be shared
        return None
    return Feed(str(node.target), tuple(dict.fromkeys(reversed(sources))), views) if sources else None


def _reached_from(node: fx.Node, linears: Mapping[str, nn.Module]) -> bool:
    ahead, seen = [node], set[fx.Node]()
    while ahead:
        one = ahead.pop()
        if one.op == "call_module" and one.target in linears:
            return True
        if one not in seen and not _reads_size(one):
            seen.add(one)
            ahead += one.all_input_nodes
    return False


def _reads_size(node: fx.Node) -> bool:
    """Whether a node gives a size, a dtype or a device, not numbers of the tensor."""
    return _name(node) in ("size", "dim", "numel") or (node.target is getattr and node.args[1] in SIZES)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _known(node: fx.Node, name: str, modules: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], (*ACTIVATIONS, *NORMS))
    return node.op in ("call_function", "call_method") and (name.strip("_") in HANDLERS or _is_operator(node))


def _is_operator(node: fx.Node) -> bool:
    return getattr(node.target, "__module__", "") == "_operator"


def segments_of(graph: fx.Graph, name: str, linear: nn.Linear) -> tuple[int, ...]:
    """How the forward cuts a Linear's outputs up: (q, k, v) of a fused projection, or one run.

    A wrong guess costs a gather in each forward, and no more.
    """
    total = linear.out_features
    node = next(node for node in graph.nodes if node.op == "call_module" and node.target == name)
    for user in node.users:
        kind, args = _name(user), (*user.args[1:], *user.kwargs.values())
        if kind == "chunk" and isinstance(args[0], int) and total % args[0] == 0:
            return (total // args[0],) * args[0]
        if kind in ("split", "split_with_sizes") and isinstance(args[0], int) and total % args[0] == 0:
            return (args[0],) * (total // args[0])
        if kind in ("split", "split_with_sizes") and isinstance(args[0], (list, tuple)):
            sizes = [size for size in args[0] if isinstance(size, int)]
            if len(sizes) == len(args[0]) and sum(sizes) == total:
                return tuple(sizes)
        if kind in VIEWS and total % 3 == 0 and any(arg == 3 for arg in _flat(args)):
            return (total // 3,) * 3
    return (total,)


def _flat(args: Sequence[object]) -> Iterator[object]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from _flat(arg)
        else:
            yield arg
