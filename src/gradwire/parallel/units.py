"""Which modules of a model are sharded together: gathered before they run, freed after it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

UNIT_BYTES = 4 << 20
_LEAVES = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
)  # always run through their forward, unless somebody subclassed them


def choose_units(model: nn.Module, unit_bytes: int = UNIT_BYTES) -> list[tuple[nn.Module, ...]]:
    """Groups of modules, each with ``unit_bytes`` of parameters or more; what is in none belongs to the model itself.

    The blocks of every ``ModuleList`` and ``Sequential`` are taken in order, small neighbours together; of what is in no list,
    the big linear and convolution layers. A module whose parameters are also reached from elsewhere (tied ones) is in none.

    >>> net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> choose_units(net, 300)
    [(Linear(in_features=8, out_features=8, bias=True), Linear(in_features=8, out_features=8, bias=True))]
    """
    owners = _owners(model)
    units: list[tuple[nn.Module, ...]] = []
    for run in _runs(model, unit_bytes) if type(model) not in _LEAVES else ():
        unit: list[nn.Module] = []
        for block in run:
            if _stands_alone(block, owners):
                unit.append(block)
            if sum(bytes_of(each) for each in unit) >= unit_bytes:
                units.append(tuple(unit))
                unit = []
    return units


def bytes_of(module: nn.Module) -> int:
    """Of all its parameters."""
    return sum(param.nbytes for param in module.parameters())


def owned(
    modules: Sequence[nn.Module], taken: frozenset[int] = frozenset()
) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(module, attribute, parameter) of every parameter in these modules, once, without the modules ``taken`` (by id)."""
    found: dict[int, tuple[nn.Module, str, nn.Parameter]] = {}
    for module in modules:
        for each in _outside(module, taken):
            for name, param in each.named_parameters(recurse=False):
                found.setdefault(id(param), (each, name, param))
    return list(found.values())


def _outside(module: nn.Module, taken: frozenset[int]) -> Iterator[nn.Module]:
    if id(module) in taken:
        return
    yield module
    for child in module.children():
        yield from _outside(child, taken)


def _runs(module: nn.Module, unit_bytes: int) -> Iterator[list[nn.Module]]:
    """Blocks that may be grouped with their neighbours."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        run: list[nn.Module] = []
        for child in module.children():
            long = isinstance(child, nn.Sequential) and bytes_of(child) >= 2 * unit_bytes
            if long or isinstance(child, nn.ModuleList | nn.ModuleDict):
                yield run
                run = []
                yield from _runs(child, unit_bytes)
            elif bytes_of(child):
                run.append(child)
        yield run
    elif type(module) in _LEAVES:
        yield [module]
    else:
        for child in module.children():
            yield from _runs(child, unit_bytes)


def _owners(model: nn.Module) -> dict[int, set[int]]:
    """The modules that hold each parameter, by ids."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for _, param in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(param), set()).add(id(module))
    return owners


def _stands_alone(block: nn.Module, owners: dict[int, set[int]]) -> bool:
    if type(block).forward is nn.Module.forward:
        return False  # nobody runs it: its parts are used one by one
    inside = {id(module) for module in block.modules()}
    return all(owners[id(param)] <= inside for param in block.parameters())
