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
    from gradwire.checkpoint.api import load, save
    from gradwire.comm.world import World, current, init
    from gradwire.compress.cast import Cast
    from gradwire.compress.choice import After, ByName, ByShape
    from gradwire.compress.exact import AllReduce
    from gradwire.compress.feedback import Compressed, ErrorFeedback
    from gradwire.compress.lowrank import LowRank
    from gradwire.compress.quantize import Quantize
    from gradwire.compress.sampled import Sampled
    from gradwire.compress.topk import TopK
    from gradwire.core.outer import Nesterov
    from gradwire.core.pipeline import Pipeline
    from gradwire.core.plan import Plan
    from gradwire.core.policies import Accumulate, Delayed, EveryStep, LocalSteps
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
        CheckpointError,
        DataError,
        GradwireError,
        LaunchError,
        MismatchError,
        NonFiniteError,
        PeerError,
        PlanError,
        UsageError,
    )
    from gradwire.parallel.cross_entropy import cross_entropy
    from gradwire.parallel.norm import clip_grad_norm_
    from gradwire.parallel.split import forward_backward
    from gradwire.parallel.whole import whole_state_dict
    from gradwire.training import distribute, no_sync, weight
    from gradwire.verbs import sum

__version__ = "0.1.0"

__all__ = [
    "Accumulate",
    "After",
    "AllReduce",
    "ByClass",
    "ByName",
    "ByShape",
    "Cast",
    "CheckpointError",
    "Compressed",
    "DataError",
    "DataLoader",
    "Delayed",
    "ErrorFeedback",
    "EveryStep",
    "GradwireError",
    "LaunchError",
    "Local",
    "LocalSteps",
    "LowRank",
    "MismatchError",
    "Nesterov",
    "NonFiniteError",
    "PeerError",
    "Pipeline",
    "Plan",
    "PlanError",
    "Proportional",
    "Quantize",
    "Random",
    "Sample",
    "Sampled",
    "ShardedSampler",
    "Stratified",
    "TopK",
    "Uniform",
    "UsageError",
    "World",
    "clip_grad_norm_",
    "cross_entropy",
    "current",
    "distribute",
    "forward_backward",
    "init",
    "load",
    "no_sync",
    "save",
    "shard",
    "sum",
    "weight",
    "whole_state_dict",
]

_HOMES = {
    "gradwire.checkpoint.api": ("load", "save"),
    "gradwire.comm.world": ("World", "current", "init"),
    "gradwire.core.pipeline": ("Pipeline",),
    "gradwire.core.plan": ("Plan",),
    "gradwire.core.outer": ("Nesterov",),
    "gradwire.core.policies": ("Accumulate", "Delayed", "EveryStep", "LocalSteps"),
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
    "gradwire.compress.cast": ("Cast",),
    "gradwire.compress.choice": ("After", "ByName", "ByShape"),
    "gradwire.compress.exact": ("AllReduce",),
    "gradwire.compress.feedback": ("Compressed", "ErrorFeedback"),
    "gradwire.compress.lowrank": ("LowRank",),
    "gradwire.compress.quantize": ("Quantize",),
    "gradwire.compress.sampled": ("Sampled",),
    "gradwire.compress.topk": ("TopK",),
    "gradwire.parallel.norm": ("clip_grad_norm_",),
    "gradwire.training": ("distribute", "no_sync", "weight"),
    "gradwire.parallel.cross_entropy": ("cross_entropy",),
    "gradwire.parallel.split": ("forward_backward",),
    "gradwire.parallel.whole": ("whole_state_dict",),
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
