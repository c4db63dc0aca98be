"""Before the first step: the ranks' models, plans, data and versions are the same, or the difference is named."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import torch
from torch import nn

from gradwire.comm.text import all_gather_text
from gradwire.core.group import Group
from gradwire.core.microbatch import MicrobatchSource
from gradwire.core.names import plain_name
from gradwire.core.plan import Plan
from gradwire.errors import MismatchError

Facts = list[tuple[str, str]]


def facts_of(model: nn.Module, plan: Plan, source: MicrobatchSource | None, optimizers: list[str]) -> Facts:
    """What must be equal on all ranks, in order: label and value."""
    facts = [("the torch version", torch.__version__), ("the plan", plan.words())]
    facts += [(f"optimizer {index}", name) for index, name in enumerate(optimizers)]
    facts += [
        (f"the loader's {key}", str(value)) for key, value in (source.describe() if source is not None else {}).items()
    ]
    facts += list(_tensor_facts(model))
    return facts


def _tensor_facts(model: nn.Module) -> Iterator[tuple[str, str]]:
    first_name: dict[int, str] = {}
    for index, (name, param) in enumerate(model.named_parameters(remove_duplicate=False)):
        tied = first_name.setdefault(id(param), name)
        shape = f"{plain_name(name)} {tuple(param.shape)} {str(param.dtype).removeprefix('torch.')}"
        kind = "trained" if param.requires_grad else "frozen"
        yield f"parameter {index}", f"{shape} {kind}" + ("" if tied == name else f", tied to {plain_name(tied)}")
    for index, (name, buffer) in enumerate(model.named_buffers()):
        yield f"buffer {index}", f"{plain_name(name)} {tuple(buffer.shape)} {str(buffer.dtype).removeprefix('torch.')}"


def compare(facts: Facts, group: Group, device: torch.device) -> None:
    """Raise MismatchError on every rank if any rank's facts differ, naming the first difference and both ranks."""
    text = json.dumps(facts)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if len(set(all_gather_text(group, digest, device))) == 1:
        return
    ours: Facts
    texts = all_gather_text(group, text, device)
    ours = json.loads(texts[0])
    rank = next(index for index, other in enumerate(texts) if other != texts[0])
    raise MismatchError(_difference(ours, json.loads(texts[rank]), rank))


def _difference(ours: Facts, theirs: Facts, rank: int) -> str:
    cure = "run the same script with the same arguments and versions on all ranks"
    for mine, other in zip(ours, theirs, strict=False):
        if mine[0] != other[0]:
            return f"ranks disagree: rank 0 has {mine[0]} ({mine[1]}) where rank {rank} has {other[0]} ({other[1]}); {cure}"
        if mine[1] != other[1]:
            return f"ranks disagree on {mine[0]}: rank 0 has {mine[1]}, rank {rank} has {other[1]}; {cure}"
    longer, extra = (0, ours[len(theirs) :]) if len(ours) > len(theirs) else (rank, theirs[len(ours) :])
    return f"ranks disagree: only rank {longer} has {extra[0][0]} ({extra[0][1]}); {cure}"
