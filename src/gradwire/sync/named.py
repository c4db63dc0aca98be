"""From what a plan says (a text, a reducer or a policy) to the policy."""

from __future__ import annotations

import math
from typing import cast

import torch

from gradwire.compress.cast import Cast
from gradwire.compress.choice import After
from gradwire.compress.exact import AllReduce
from gradwire.compress.feedback import ErrorFeedback
from gradwire.compress.lowrank import USUAL_SIDE, LowRank
from gradwire.compress.quantize import Quantize
from gradwire.compress.sampled import Sampled
from gradwire.compress.topk import TopK
from gradwire.core.outer import Nesterov
from gradwire.core.plan import Sync
from gradwire.core.policies import Accumulate, Delayed, EveryStep, LocalSteps
from gradwire.core.policy import SyncPolicy
from gradwire.core.reducer import Reducer
from gradwire.core.spelling import Spelled, parse

DEFAULT_RANK = 4


def policy_of(sync: Sync) -> SyncPolicy:
    """The policy that ``Plan(sync=...)``, which has refused anything else, means.

    >>> policy_of("local:every=8").words()
    'parameters are agreed every 8 local steps after 20 exact steps (outer Nesterov lr 0.7 momentum 0.3)'
    """
    if isinstance(sync, str):
        return _policy(parse(sync))
    if hasattr(sync, "at_backward"):
        return cast("SyncPolicy", sync)
    return EveryStep(reducer=cast("Reducer", sync))


def explain(sync: Sync, num_ranks: int) -> str:
    """When, how, and what it sends, in words.

    >>> print(explain("accumulate:every=4", 2))
    gradients are agreed every 4 batches, which are one step; exact all-reduce
    with 2 workers each sends 1.00 bytes per parameter and step (exact every step: 4.00)
    """
    policy = policy_of(sync)
    reducer, exact = policy.reducer or AllReduce(), AllReduce()
    many = 1 << 20
    workers = "1 worker it" if num_ranks == 1 else f"{num_ranks} workers each"
    sent = policy.syncs_per_step() * reducer.sent_bytes(many, num_ranks) / many
    exact_sent = exact.sent_bytes(many, num_ranks) / many
    is_exact = policy in (EveryStep(), EveryStep(reducer=exact))
    hint = "" if is_exact else _beside_exact(sent, exact_sent)
    return (
        f"{policy.words()}; {reducer.words()}\n"
        f"with {workers} sends {_three_digits(sent)} bytes per parameter and step{_assumed(reducer)} "
        f"(exact every step: {_three_digits(exact_sent)}){hint}"
    )


def _three_digits(value: float) -> str:
    """Three significant digits, more before the point, and never an exponent.

    >>> [_three_digits(value) for value in (0, 0.00048828, 4, 15.9844, 7992)]
    ['0', '0.000488', '4.00', '16.0', '7992']
    """
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value else "0"


def _beside_exact(sent: float, exact_sent: float) -> str:
    """A hint for another plan than exact that saves nothing; one worker sends nothing anyway."""
    if not exact_sent or sent < exact_sent:
        return ""
    return ": more than exact" if sent > exact_sent else ": as much as exact"


def _assumed(reducer: Reducer) -> str:
    """What shapes the number of bytes is for, where it depends on them."""
    last = reducer.reducer if isinstance(reducer, After) else reducer
    if not isinstance(last, LowRank):
        return ""
    return f" (for matrices of {USUAL_SIDE} x {USUAL_SIDE}; it depends on the shapes)"


def _policy(spelled: Spelled) -> SyncPolicy:
    options = dict(spelled.options)
    reducer = _reducer(spelled.codec) if spelled.codec else None
    match spelled.name:
        case "accumulate":
            return Accumulate(every=int(options["every"]), reducer=reducer)
        case "delayed":
            return Delayed(reducer=reducer)
        case "local":
            return _local(options, reducer)
        case _:
            return EveryStep(reducer=_reducer(spelled))


def _local(options: dict[str, int | float | str], reducer: Reducer | None) -> LocalSteps:
    usual = LocalSteps(every=int(options["every"]))
    given = cast("Nesterov", usual.outer)
    return LocalSteps(
        every=usual.every,
        reducer=reducer,
        outer=Nesterov(lr=float(options.get("lr", given.lr)), momentum=float(options.get("momentum", given.momentum))),
        exact_steps=int(options.get("exact_steps", usual.exact_steps)),
        fragments=int(options.get("fragments", 1)),
        late=int(options.get("late", 0)),
    )


def _reducer(spelled: Spelled) -> Reducer:
    options = spelled.options
    ratio = float(options.get("ratio", 1.0))
    made: dict[str, Reducer] = {
        "exact": AllReduce(),
        "bf16": ErrorFeedback(Cast(torch.bfloat16)),
        "q8": ErrorFeedback(Quantize(bits=8)),
        "q4": ErrorFeedback(Quantize(bits=4)),
        "lowrank": LowRank(rank=int(options.get("rank", DEFAULT_RANK))),
        "topk": ErrorFeedback(TopK(ratio=ratio)),
        "sampled": ErrorFeedback(Sampled(ratio=ratio)),
    }
    exact_steps = int(options.get("exact_steps", 0))
    reducer = made[spelled.name]
    return After(steps=exact_steps, reducer=reducer) if exact_steps else reducer
