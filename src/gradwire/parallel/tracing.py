"""A model's own forward as a graph whose smallest parts are its blocks."""

from __future__ import annotations

import dis
import inspect
import traceback
from collections.abc import Callable
from types import FrameType

from torch import nn
from torch.fx import Graph, Node, Proxy, Tracer

from gradwire.errors import UsageError
from gradwire.parallel.factories import RANDOM, factories_are_nodes
from gradwire.parallel.layers import Shared

INNER = "model"  # the user's model inside `_Call`
_FILLS = ("cauchy", "exponential", "geometric", "log_normal", "random", "rrelu", "uniform")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)


def trace(model: nn.Module, *, deep: bool = False) -> tuple[Graph, nn.Module]:
    """``model``'s forward of one argument, in the mode (training or not) it is in; and the module its names start from.

    Calls of blocks are ``call_module`` nodes, their names begin with `INNER`. A block is an element of a ``Sequential``,
    ``ModuleList`` or ``ModuleDict``, one of torch's layers, a module without others inside, or whatever cannot be looked into.
    deep: look into elements of containers too. Factory functions (``torch.arange(x.shape[1])``) are nodes; asserts are left out.

    Raises UsageError with the line that cannot be traced, and the cure.
    """
    _check_signature(model)
    call, opaque = _Call(model), set[nn.Module]()
    while True:
        tracer = _BlockTracer(deep, opaque)
        try:
            with factories_are_nodes(tracer, always=True):
                graph = tracer.trace(call)
        except _Opaque as found:
            opaque.add(found.module)
        except Exception as error:  # whatever a forward does with a value that is not there
            raise UsageError(_cannot_trace(model, error)) from error
        else:
            graph.eliminate_dead_code(lambda node: node.op in ("call_module", "placeholder", "output") or mutates(node))
            return graph, call


def is_random(node: Node) -> bool:
    """Whether it may give another value for the same arguments."""
    name = _function_name(node).rstrip("_")
    return "dropout" in name or name in RANDOM or name in _FILLS or (name.endswith("_like") and name.startswith("rand"))


def mutates(node: Node) -> bool:
    """Whether it changes its first argument, or the one called ``out``."""
    name = _function_name(node)
    if getattr(node.target, "__module__", "") == "_operator":  # and_, or_ change nothing
        return name in (
            "setitem",
            "iadd",
            "isub",
            "imul",
            "itruediv",
            "ifloordiv",
            "imod",
            "ipow",
            "imatmul",
            "iand",
            "ior",
            "ixor",
        )
    changes = name.endswith("_") and not name.endswith("__")
    return changes or node.kwargs.get("inplace") is True or "out" in node.kwargs


def _function_name(node: Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def _check_signature(model: nn.Module) -> None:
    parameters = list(inspect.signature(model.forward).parameters.values())
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1 or not parameters:
        raise UsageError(
            f"{type(model).__name__}.forward takes {', '.join(required) or 'nothing'}; a pipeline calls it with one argument, x: "
            "a tensor, or a tuple or dict of them"
        )


def _cannot_trace(model: nn.Module, error: Exception) -> str:
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename and f.filename != __file__
    ]
    at = f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return (
        f"{type(model).__name__} cannot be cut into stages: its forward could not be traced ({type(error).__name__}: "
        f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}{at}). Between its blocks it must not decide or loop "
        "by values it computes; move that line into one of the blocks, or use nn.Sequential"
    )


class _Call(nn.Module):
    """``model(x)``: its other arguments are at their defaults."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.add_module(INNER, model)

    def forward(self, x: object) -> object:
        return self.get_submodule(INNER)(x)


class _Opaque(BaseException):  # so that no forward catches it
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class _BlockTracer(Tracer):
    proxy_buffer_attributes = True

    def __init__(self, deep: bool, opaque: set[nn.Module]) -> None:
        super().__init__()
        self._deep = deep
        self._opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name == INNER or isinstance(m, _Call):
            return False
        if m in self._opaque or isinstance(m, Shared) or next(m.children(), None) is None:
            return True
        if isinstance(m, (*_CONTAINERS, *_STACKS)):
            return False
        if type(m).__module__.startswith("torch.nn."):
            return True
        parent = module_qualified_name.rpartition(".")[0]
        return not self._deep and isinstance(self.root.get_submodule(parent), _CONTAINERS)

    def call_module(
        self, m: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        name = self.path_of_module(m)
        if isinstance(m, _STACKS) and m not in self._opaque:
            forward = _stack_forward(m)
        if self.is_leaf_module(m, name) or isinstance(m, _Call) or name == INNER:
            return super().call_module(m, forward, args, kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:  # what cannot be looked into is a block: once more, without looking
            raise _Opaque(m) from error

    def to_bool(self, obj: Proxy) -> bool:
        frame = inspect.currentframe()
        caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
        if caller is not None and _asserts(caller):
            return True
        raise TypeError("a decision by a value that the forward computes")


def _asserts(frame: FrameType) -> bool:
    """Whether the truth that ``frame`` asks for is an assert's."""
    following = [
        i.opname for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti and i.opname != "CACHE"
    ]
    return (len(following) > 1 and following[1] == "LOAD_ASSERTION_ERROR") or following[:1] == ["LOAD_ASSERTION_ERROR"]


def _stack_forward(stack: nn.TransformerEncoder | nn.TransformerDecoder) -> Callable[..., object]:
    """The layers one after another: torch's own also looks at values, for fast paths and to find causal masks."""
    layers: list[nn.Module] = list(stack.layers)

    def encode(
        src: object, mask: object = None, src_key_padding_mask: object = None, is_causal: object = None
    ) -> object:
        for layer in layers:
            src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal))
        return src if stack.norm is None else stack.norm(src)

    def decode(tgt: object, memory: object, tgt_is_causal: object = None, **masks: object) -> object:
        for layer in layers:
            tgt = layer(tgt, memory, tgt_is_causal=bool(tgt_is_causal), **masks)
        return tgt if stack.norm is None else stack.norm(tgt)

    return encode if isinstance(stack, nn.TransformerEncoder) else decode
