"""gradwire: train a PyTorch model over several processes and machines, with the answer that one machine gives.

>>> import gradwire as gw
>>> with gw.init() as world:
...     world.size
1
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.comm.world import World, current, init
    from gradwire.compress.exact import AllReduce
    from gradwire.core.plan import Plan
    from gradwire.core.policies import EveryStep
    from gradwire.data import (
        ByClass,
        DataLoader,
        Local,
        Proportional,
        Random,
        Sample,
        ShardedSampler,
        Stratified,
        Uniform,
        shard,
    )
    from gradwire.errors import (
        DataError,
        GradwireError,
        LaunchError,
        MismatchError,
        NonFiniteError,
        PeerError,
        PlanError,
        UsageError,
    )
    from gradwire.sync.distribute import distribute, no_sync, weight
    from gradwire.verbs import sum

__version__ = "0.1.0"

__all__ = [
    "AllReduce",
    "ByClass",
    "DataError",
    "DataLoader",
    "EveryStep",
    "GradwireError",
    "LaunchError",
    "Local",
    "MismatchError",
    "NonFiniteError",
    "PeerError",
    "Plan",
    "PlanError",
    "Proportional",
    "Random",
    "Sample",
    "ShardedSampler",
    "Stratified",
    "Uniform",
    "UsageError",
    "World",
    "current",
    "distribute",
    "init",
    "no_sync",
    "shard",
    "sum",
    "weight",
]

_HOMES = {
    "gradwire.comm.world": ("World", "current", "init"),
    "gradwire.core.plan": ("Plan",),
    "gradwire.core.policies": ("EveryStep",),
    "gradwire.data": (
        "ByClass",
        "DataLoader",
        "Local",
        "Proportional",
        "Random",
        "Sample",
        "ShardedSampler",
        "Stratified",
        "Uniform",
        "shard",
    ),
    "gradwire.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "gradwire.compress.exact": ("AllReduce",),
    "gradwire.sync.distribute": ("distribute", "no_sync", "weight"),
    "gradwire.verbs": ("sum",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Import on first use, so that the launcher, which needs no torch, starts at once."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'gradwire' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
