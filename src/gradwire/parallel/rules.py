"""Which layer tensor parallel ranks share, and how: found in the model, changed by the user's rules. Pure, no process group."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn

from gradwire.errors import PlanError
from gradwire.parallel.finding import find
from gradwire.parallel.kinds import Choice, kind_of, misfit


def describe(model: nn.Module, num_ranks: int, rules: Mapping[str, str] | None = None) -> list[Choice]:
    """Which layers ``num_ranks`` tensor parallel ranks share, and which they each keep whole, and why.

    Layers are in the model's order. ``rules`` (name pattern -> rule) override what is found; the last pattern that
    matches counts. Raises PlanError for a pattern that matches nothing, a rule that its layer cannot take, sizes that
    ``num_ranks`` does not divide, and a model of which nothing can be shared.

    >>> mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> for choice in describe(mlp, 2): print(*choice, sep="; ")
    0; column; feeds 2
    2; row; fed by 0
    """
    modules = dict(model.named_modules())
    found = find(model, num_ranks)
    problems: list[str] = []
    for pattern, rule in (rules or {}).items():
        _override(found, modules, pattern, rule, num_ranks, problems)
    problems += _tied_apart(found, modules)
    if problems:
        raise PlanError("; ".join(problems))
    choices = [found[name] for name in modules if name in found]
    if not any(choice.rule != "replicate" for choice in choices):
        told = "; ".join(f"{choice.name}: {choice.reason}" for choice in choices[:5])
        raise PlanError(
            f"mesh tensor={num_ranks}: no layer of {type(model).__name__} can be shared"
            f" ({told or 'it has no Linear, Embedding or attention'}); name layers in tensor_rules, or use another axis"
        )
    return choices


def _override(
    found: dict[str, Choice], modules: Mapping[str, nn.Module], pattern: str, rule: str, n: int, problems: list[str]
) -> None:
    matched = [name for name in modules if name and fnmatch.fnmatchcase(name, pattern)]
    if not matched:
        near = ", ".join(name for name, module in modules.items() if isinstance(module, (nn.Linear, nn.Embedding)))
        problems.append(
            f"tensor_rules: {pattern!r} matches no module; its Linear and Embedding layers: {near[:300] or 'none'}"
        )
        return
    takers = [name for name in matched if kind_of(name, modules)]
    if rule == "replicate":
        for name in list(found):
            if any(name == outer or name.startswith(f"{outer}.") for outer in matched):
                found[name] = Choice(name, "replicate", f"rule {pattern!r}")
        for name in takers:
            found[name] = Choice(name, "replicate", f"rule {pattern!r}")
        return
    if not takers:
        kind = type(modules[matched[0]]).__name__
        problems.append(
            f"tensor_rules: {pattern!r} = {rule!r} matches {matched[0]}, a {kind}, which no rule is for; name a Linear, an "
            "Embedding, a norm, a Dropout or a MultiheadAttention"
        )
    for name in takers:
        if problem := misfit(name, modules, rule, n):
            problems.append(f"tensor_rules: {pattern!r} = {rule!r}: {problem}")
        else:
            attention = isinstance(modules[name], nn.MultiheadAttention)
            found[name] = Choice(name, "heads" if attention else rule, f"rule {pattern!r}")


def _tied_apart(found: dict[str, Choice], modules: Mapping[str, nn.Module]) -> list[str]:
    """Layers of one weight must agree on how it is cut; where we choose, both stay whole."""
    cuts = {"column": "rows", "vocabulary": "rows", "row": "columns"}
    users: dict[int, list[str]] = {}
    for name, module in modules.items():
        weight: object = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter):
            users.setdefault(id(weight), []).append(name)
    problems: list[str] = []
    for names in users.values():
        kinds = {cuts.get(found[name].rule, "whole") if name in found else "whole" for name in names}
        if len(kinds) < 2:
            continue
        if any(found[name].by_user for name in names if name in found and found[name].rule != "replicate"):
            told = ", ".join(f"{name} ({found[name].rule if name in found else 'replicate'})" for name in names)
            problems.append(f"tensor_rules: {told} are one tied weight and must be cut alike; give them the same rule")
        for name in names:
            found[name] = Choice(
                name, "replicate", f"tied to {', '.join(x for x in names if x != name)}, which is not cut alike"
            )
    return problems
