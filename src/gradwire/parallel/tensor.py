"""`share`: layers become shared ones in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from gradwire.errors import UsageError
from gradwire.parallel import cross_entropy
from gradwire.parallel.attention import SharedAttention
from gradwire.parallel.flow import segments_of, trace
from gradwire.parallel.kinds import Choice
from gradwire.parallel.layers import ColumnLinear, RowLinear, Shared, VocabularyEmbedding, over_sequence
from gradwire.parallel.moved import Replaced
from gradwire.parallel.moves import Ranks, Segments
from gradwire.parallel.part import map_parts
from gradwire.parallel.rules import describe

KNOWN_OPERATIONS = (cross_entropy,)  # what F.cross_entropy does with shared logits
Cuts: TypeAlias = "dict[int, Shard]"


def share(model: nn.Module, mesh: DeviceMesh, rules: Mapping[str, str] | None = None) -> Replaced:
    """Share ``model``'s layers among the ranks of ``mesh``, in place; all ranks call it with the same model.

    mesh: ``world.torch_mesh()["tensor"]``. rules: name pattern -> rule, over what `describe` finds. Afterwards ``model(x)`` with
    the same x on all ranks gives what one process gives, on all ranks, and backward gives each rank its part of each
    gradient. What is shared is a ``DTensor`` with ``Shard(0)`` or ``Shard(1)``; names are unchanged, values rank 0's, and the
    ranks' CPU generators stand where rank 0's does, so that dropout masks agree. A head that ``rules`` call
    ``"vocabulary"`` gives logits that are a `Part`: `cross_entropy` takes them as they are, and anything else sees the whole.
    Returns the new parameters by the old ones' ids, for `moved.exchange`. Raises PlanError as `describe`.
    """
    if mesh.ndim != 1:
        raise UsageError(f"a mesh of {mesh.ndim} dimensions; use one of them, such as world.torch_mesh()['tensor']")
    replaced = Replaced()
    if mesh.size() == 1:
        return replaced
    ranks = Ranks.of(mesh)
    choices = describe(model, ranks.size, rules)
    modules = dict(model.named_modules())
    segments = _segments(modules, choices, ranks.size)
    cuts: Cuts = {}
    for choice in choices:
        cuts |= _cuts(modules[choice.name], choice.rule)
    kept = _exchange_parameters(model, cuts, mesh, replaced)
    for choice in choices:
        _become_shared(modules[choice.name], choice, segments.get(choice.name), ranks)
    del kept  # ids stood for parameters until here
    _without_fast_path(model)
    open_heads = {
        module.out_features
        for choice in choices
        if choice.rule == "vocabulary" and choice.by_user and isinstance(module := modules[choice.name], nn.Linear)
    }
    model.register_forward_hook(lambda module, args, out: _outside(out, open_heads))
    same_random_numbers(mesh)
    return replaced


def same_random_numbers(mesh: DeviceMesh) -> None:
    """Set this rank's CPU generator where that of the mesh's first rank stands: dropout then draws the same masks."""
    state = torch.get_rng_state()
    dist.broadcast(state, group=mesh.get_group(), group_src=0)
    torch.set_rng_state(state)


def _cuts(module: nn.Module, rule: str) -> Cuts:
    """How a layer's parameters are cut."""
    named = dict(module.named_parameters(recurse=False))
    if rule in ("column", "vocabulary"):
        return {id(param): Shard(0) for param in named.values()}
    if rule == "row":
        return {id(module.weight): Shard(1)}
    if rule == "heads":
        cuts = {id(param): Shard(0) for name, param in named.items() if name.endswith("proj_weight")}
        return cuts | {id(cast("nn.MultiheadAttention", module).out_proj.weight): Shard(1)}
    return {}


def _segments(modules: Mapping[str, nn.Module], choices: Iterable[Choice], n: int) -> dict[str, Segments]:
    """How each Linear that is cut by columns is cut up by the forward around it."""
    found: dict[str, Segments] = {}
    for choice in choices:
        module = modules[choice.name]
        if choice.rule not in ("column", "vocabulary") or not isinstance(module, nn.Linear):
            continue
        found[choice.name] = (module.out_features,)
        block, _, name = choice.name.rpartition(".")
        graph = trace(modules[block]) if block in modules and choice.rule == "column" else None
        if graph is None or not any(node.op == "call_module" and node.target == name for node in graph.nodes):
            continue
        segments = segments_of(graph, name, module)
        if not any(length % n for length in segments):
            found[choice.name] = segments
    return found


def _exchange_parameters(model: nn.Module, cuts: Cuts, mesh: DeviceMesh, replaced: Replaced) -> list[nn.Parameter]:
    """Put shared parameters where whole ones were, tied ones into all their places; returns the old ones."""
    old: list[nn.Parameter] = []
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(param) not in cuts:
                continue
            if replaced.of(param) is None:
                local = distribute_tensor(param.detach(), mesh, [cuts[id(param)]])
                replaced.note(param, nn.Parameter(local, requires_grad=param.requires_grad))
                old.append(param)
            module.register_parameter(name, replaced[id(param)])
    return old


def _become_shared(module: nn.Module, choice: Choice, segments: Segments | None, ranks: Ranks) -> None:
    if choice.rule == "replicate":
        return
    if choice.rule == "sequence":
        module.__class__ = over_sequence(type(module))
    elif choice.rule == "heads":
        module.__class__ = SharedAttention
    elif isinstance(module, nn.Embedding):
        module.__class__ = VocabularyEmbedding
    elif choice.rule == "row":
        module.__class__ = RowLinear
    else:
        module.__class__ = ColumnLinear
        linear = cast("ColumnLinear", module)
        linear.segments = segments or (linear.out_features,)
        linear.gathers = choice.rule == "vocabulary" and not choice.by_user
    cast("Shared", module).ranks = ranks


def _without_fast_path(model: nn.Module) -> None:
    """torch's fused layers for inference read whole weights; these two attributes do nothing but choose them."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _outside(output: object, open_heads: set[int]) -> object:
    """What the model gives is whole, but for logits that the user's rules leave shared."""
    return map_parts(
        output, lambda part: part if part.tail == -1 and sum(part.segments) in open_heads else part.full_tensor()
    )
