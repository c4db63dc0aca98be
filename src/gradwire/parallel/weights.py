"""Layers whose ``.weight`` some forward of the user's reads by itself: such a layer must stay whole."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping

from torch import nn


def read_elsewhere(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Layers whose ``.weight`` some forward of the user's reads by itself, such as ``x @ self.embed.weight.T``; names."""
    read: dict[type, set[str]] = {}
    for outer, module in modules.items():
        kind = type(module)
        if kind.__module__.startswith("torch."):
            continue
        if kind not in read:
            read[kind] = set(_reads(kind))
        yield from (f"{outer}.{path}".lstrip(".") for path in read[kind] if f"{outer}.{path}".lstrip(".") in modules)


def _reads(kind: type) -> Iterator[str]:
    for cls in kind.__mro__:
        if cls.__module__.startswith("torch.") or cls is object:
            continue
        for name, function in vars(cls).items():
            if not inspect.isfunction(function) or name.strip("_").startswith(("init", "reset")):
                continue
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            except (OSError, TypeError, SyntaxError):
                continue
            for node in ast.walk(tree):
                text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
                if text.startswith("self.") and text.endswith((".weight", ".bias")):
                    yield text.removeprefix("self.").rpartition(".")[0]
