"""Which kinds of layers can be shared, by which rules, and what of a layer's sizes n ranks must divide. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

SEQUENCE = (nn.LayerNorm, nn.RMSNorm, nn.Dropout)
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "Linear": ("column", "row", "vocabulary"),
    "Embedding": ("vocabulary",),
    "MultiheadAttention": ("column",),
    "sequence": ("sequence",),
}


class Choice(NamedTuple):
    """What happens to a layer. rule: ``column``, ``row``, ``vocabulary``, ``sequence``, ``heads`` or ``replicate``."""

    name: str
    rule: str
    reason: str

    @property
    def by_user(self) -> bool:
        """Whether one of the user's rules says so."""
        return self.reason.startswith("rule ")


def kind_of(name: str, modules: Mapping[str, nn.Module]) -> str:
    """A key of `ALLOWED`; empty for a module that no rule is for."""
    module = modules[name]
    if isinstance(module, SEQUENCE):
        return "sequence"
    if isinstance(modules.get(name.rpartition(".")[0]), nn.MultiheadAttention):
        return ""  # out_proj goes with its attention
    kinds = (nn.Linear, nn.Embedding, nn.MultiheadAttention)
    return next((kind.__name__ for kind in kinds if isinstance(module, kind)), "")


def is_plain(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """A module whose forward is torch's, and whose weights are its own parameters."""
    if not isinstance(module, kind) or type(module).forward is not kind.forward or hasattr(module, "parametrizations"):
        return False
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    return "weight" in own or kind is nn.MultiheadAttention


def linears_below(name: str, modules: Mapping[str, nn.Module]) -> dict[str, nn.Linear]:
    """The plain Linears inside a module, by their full names."""
    prefix = f"{name}." if name else ""
    return {
        inner: module
        for inner, module in modules.items()
        if inner.startswith(prefix)
        and isinstance(module, nn.Linear)
        and is_plain(module, nn.Linear)
        and kind_of(inner, modules)
    }


def misfit(name: str, modules: Mapping[str, nn.Module], rule: str, n: int) -> str:
    """Why a layer cannot take a rule, with the cure; empty if it can."""
    module, kind = modules[name], kind_of(name, modules)
    if rule not in ALLOWED[kind]:
        return f"{name} is a {type(module).__name__}, which takes {', '.join(ALLOWED[kind])} or replicate, not {rule}"
    size, what = 0, ""
    if isinstance(module, nn.Linear):
        size, what = (module.in_features, "inputs") if rule == "row" else (module.out_features, "outputs")
    elif isinstance(module, nn.Embedding):
        size, what = module.num_embeddings, "rows"
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            return f"{name} uses max_norm, sparse or scale_grad_by_freq, which need the whole table; use replicate"
    elif isinstance(module, nn.MultiheadAttention):
        size, what = module.num_heads, "heads"
    if what and not any(is_plain(module, plain) for plain in (nn.Linear, nn.Embedding, nn.MultiheadAttention)):
        return f"{name} has a parametrized weight or a forward of its own; use replicate"
    if size % n:
        more = (size // n + 1) * n
        return f"{name} has {size} {what}, not divisible by tensor={n}; use {more} {what}, another tensor size, or replicate"
    return ""
