"""torch's factory functions while a forward is traced: they refuse sizes that are not known yet, so they become nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch.fx import Proxy, Tracer
from torch.fx.node import map_aggregate

FACTORIES = (
    "arange", "empty", "eye", "full", "linspace", "logspace", "ones", "tensor", "tril_indices", "triu_indices", "zeros"
)  # fmt: skip
RANDOM = ("bernoulli", "multinomial", "normal", "rand", "randint", "randn", "randperm")
_PATCHING = threading.Lock()  # torch's functions are replaced while one model is traced
_TRACING = threading.local()


@contextmanager
def factories_are_nodes(tracer: Tracer, *, always: bool) -> Generator[None]:
    """``torch.arange(x.shape[1])`` is a node of ``tracer``'s graph; always: also where every size is known, and what is drawn."""
    with _PATCHING, ExitStack() as stack:
        _TRACING.tracer = tracer
        stack.callback(lambda: setattr(_TRACING, "tracer", None))
        for name in (*FACTORIES, *RANDOM) if always else FACTORIES:
            stack.enter_context(patch.object(torch, name, _as_node(getattr(torch, name), always=always)))
        yield


def _as_node(original: Callable[..., object], *, always: bool) -> Callable[..., object]:
    def create(*args: object, **kwargs: object) -> object:
        tracer: Tracer | None = getattr(_TRACING, "tracer", None)  # other threads go on as ever
        if tracer is None or not (always or _has_proxy((args, kwargs))):
            return original(*args, **kwargs)
        return tracer.create_proxy("call_function", original, args, kwargs)  # pyright: ignore[reportArgumentType]

    return create


def _has_proxy(arguments: object) -> bool:
    found: list[Proxy] = []
    map_aggregate(arguments, lambda each: found.append(each) if isinstance(each, Proxy) else None)  # pyright: ignore
    return bool(found)
