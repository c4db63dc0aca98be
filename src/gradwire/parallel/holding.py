"""Which rank has which parameter: blocks of other ranks leave the model, names stay, shared parameters are found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.parallel.blocks import Blocks, Program, path_of, tensors_of
from gradwire.parallel.stage import Elsewhere


@dataclass(frozen=True)
class Tie:
    """A parameter that several ranks along ``pipeline`` have. names: the user's; ranks: their places there, in order."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Holding:
    """ranks_of: by the user's name of each parameter and buffer, the places along ``pipeline`` that have it, in order.

    ties: parameters with several. blocks: by place, the names of the modules it calls.
    """

    ranks_of: Mapping[str, tuple[int, ...]]
    ties: tuple[Tie, ...]
    blocks: tuple[frozenset[str], ...]

    def needs(self, rank: int, path: str, tensors: Iterable[str]) -> bool:
        """Whether ``rank`` has one of the module's tensors, or calls it or a block inside of it, which may have none."""
        inside = any(block == path or block.startswith(f"{path}.") for block in self.blocks[rank])
        return inside or any(rank in self.ranks_of[name] for name in tensors)


def find_holding(model: nn.Module, blocks: Blocks, programs: Sequence[Program], num_ranks: int) -> Holding:
    """Of a whole model. What no stage uses is on rank 0."""
    ranks: dict[int, set[int]] = {}
    for stage, program in enumerate(programs):
        for tensor in tensors_of(model, program, blocks):
            ranks.setdefault(id(tensor), set()).add(stage % num_ranks)
    named = _named(model)
    found = {name: tuple(sorted(ranks.get(id(tensor), {0}))) for name, tensor in named.items()}
    names: dict[int, list[str]] = {}
    for name, tensor in named.items():
        if isinstance(tensor, nn.Parameter) and len(found[name]) > 1:
            names.setdefault(id(tensor), []).append(name)
    called = [
        frozenset(path_of(n) for program in programs[rank::num_ranks] for n in program.nodes if n.op == "call_module")
        for rank in range(num_ranks)
    ]
    return Holding(found, tuple(Tie(tuple(group), found[group[0]]) for group in names.values()), tuple(called))


def let_go(model: nn.Module, holding: Holding, rank: int) -> None:
    """Remove from ``model``, in place, what ``rank`` does not have: whole modules become `Elsewhere`, others lose tensors."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        own = [f"{path}.{name}" if path else name for name in _named(module)]
        if path and own and not holding.needs(rank, path, own) and not _inside_elsewhere(model, path):
            parent = model.get_submodule(path.rpartition(".")[0])
            setattr(parent, path.rpartition(".")[2], Elsewhere(path, holding.ranks_of[own[0]][0]))
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name in list(dict(module.named_parameters(recurse=False))):
            if rank not in holding.ranks_of[prefix + name]:
                module.register_parameter(name, None)
        for name in list(dict(module.named_buffers(recurse=False))):
            if rank not in holding.ranks_of[prefix + name]:
                module.register_buffer(name, None)


def keep(optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]) -> None:
    """Make the optimizers step ``parameters`` alone: others and their state are forgotten, groups and settings stay.

    A group may become empty, so that groups are the same on all ranks.

    >>> import torch
    >>> layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    >>> keep([optimizer], layers[1].parameters())
    >>> optimizer.param_groups[0]["params"] == list(layers[1].parameters())
    True
    """
    kept = {id(param) for param in parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if id(param) in kept]
        for param in [param for param in optimizer.state if id(param) not in kept]:
            del optimizer.state[param]


def _named(module: nn.Module) -> dict[str, Tensor]:
    tensors: list[tuple[str, Tensor]] = list(module.named_parameters(remove_duplicate=False))
    return dict([*tensors, *module.named_buffers(remove_duplicate=False)])


def _inside_elsewhere(model: nn.Module, path: str) -> bool:
    module: nn.Module = model
    for word in path.split("."):
        if isinstance(module, Elsewhere):
            return True
        module = getattr(module, word)
    return isinstance(module, Elsewhere)
