"""What is compared on a slow network: PyTorch's ways, gradwire's plans, and no network at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from benchmarks.cells import Cell, Variant

EVERY = 8  # steps between exchanges where a plan has local steps
GUESSED_STEP_S = 0.3  # of computing; only chooses how many steps are measured
GUESSED_BYTES = 0.3  # a parameter, where no formula holds for all shapes
WINDOW_S = 2.5  # that a measurement should last at least, ...
MOST_STEPS = 8  # ... unless so many steps are enough
SETTLED = 4  # warm-up steps: gradwire chooses its bucket size after three exchanges
EXACT_SHARE = 0.02
LEAST_EXACT = 20
NO_EXACT_STEPS = "exact_steps=0"
SLOW_STEP_S = 2.5  # when one step takes so long, bytes decide and one warm-up step is enough


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train, and what is known of it beforehand.

    how: its spelling for people. window: steps after which its exchanges repeat; only whole windows are measured.
    least_warm_up: steps until it works as it will go on. bytes_per_parameter: what a rank should send in a step, a
    parameter, times 2(n-1)/n; None: it depends on the shapes. exact_steps: steps of quality runs before compression begins.
    """

    name: str
    how: str
    variant: Variant
    window: int = 1
    least_warm_up: int = 1
    bytes_per_parameter: float | None = None
    exact_steps: int = 0

    def fitted(self, cell: Cell, parameters: int) -> Cell:
        """The cell with steps and warm-up for this contender: whole windows, long enough, not longer."""
        if cell.rate_mbit is None:
            guess_s = GUESSED_STEP_S
        else:
            sent = GUESSED_BYTES if self.bytes_per_parameter is None else self.bytes_per_parameter
            guess_s = GUESSED_STEP_S + sent * parameters * 8 / (cell.rate_mbit * 1e6)
        warm_up = max(self.least_warm_up, 1 if guess_s > SLOW_STEP_S else SETTLED)
        steps = min(MOST_STEPS, max(2, round(WINDOW_S / guess_s)))
        return replace(cell, steps=self._whole(steps), warm_up=self._whole(warm_up))

    def _whole(self, steps: int) -> int:
        return math.ceil(steps / self.window) * self.window


def _ddp(name: str, hook: str, sent: float | None, *, window: int = 1, least_warm_up: int = 1) -> Contender:
    variant = Variant(name=name, script="train_ddp.py", words=("--hook", hook))
    return Contender(
        name=name,
        how=f"DDP, {hook}" if hook != "none" else "DDP",
        variant=variant,
        window=window,
        least_warm_up=least_warm_up,
        bytes_per_parameter=sent,
    )


def _gradwire(name: str, sync: str, sent: float | None, *, window: int = 1, least_warm_up: int = 1) -> Contender:
    variant = Variant(name=name, script="train_gradwire.py", words=("--sync", sync))
    return Contender(
        name=name,
        how=f'Plan(sync="{sync}")',
        variant=variant,
        window=window,
        least_warm_up=least_warm_up,
        bytes_per_parameter=sent,
    )


def _local(name: str, options: str, sent: float) -> Contender:
    """Local steps. What the first window sends may be taken in the second, and what the first touches is new memory."""
    sync = f"local:every={EVERY}{options},{NO_EXACT_STEPS}"
    return _gradwire(name, sync, sent / EVERY, window=EVERY, least_warm_up=2 * EVERY)


def _no_network(name: str, num_processes: int, how: str) -> Contender:
    variant = Variant(name=name, script="train_plain.py", num_processes=num_processes)
    return Contender(name=name, how=how, variant=variant, bytes_per_parameter=0.0)


FP32, HALF, EIGHT_BITS, FOUR_BITS = 4.0, 2.0, 1.02, 0.51  # bytes; blocks of 256 with a scale each
CONTENDERS = {
    each.name: each
    for each in (
        _ddp("ddp", "none", FP32),
        _ddp("ddp-fp16", "fp16", HALF),
        _ddp("ddp-powersgd-r4-one-bucket", "powersgd:4", None, least_warm_up=3),
        _ddp(f"ddp-accumulate-{EVERY}", f"accumulate:{EVERY}", FP32 / EVERY, window=EVERY),
        _ddp(f"ddp-post-local-{EVERY}", f"post-local:{EVERY}", FP32 / EVERY, window=EVERY),
        _gradwire("exact", "exact", FP32),
        _gradwire("bf16", "bf16", HALF),
        _gradwire("q8", "q8", EIGHT_BITS),
        _gradwire("q4", "q4", FOUR_BITS),
        _gradwire("lowrank-r16", "lowrank:rank=16", None, window=2),
        _local(f"q4-h{EVERY}", ",codec=q4", FOUR_BITS),
        _local(f"q4-h{EVERY}-late", f",codec=q4,late={EVERY - 2}", FOUR_BITS),
        _local(f"exact-h{EVERY}", "", FP32),
        _gradwire("delayed-q4", "delayed:codec=q4", FOUR_BITS),
        _no_network("alone", 1, "one process, nobody beside it"),
        _no_network("apart", 2, "two processes that do not talk"),
    )
}


def for_quality(contender: Contender, steps: int) -> Contender:
    """The same for a quality run of so many steps: plans with local steps begin with exact ones (post-local SGD).

    They are EXACT_SHARE of the steps, at least LEAST_EXACT, and then agree at every EVERY-th step of the run.

    >>> for_quality(CONTENDERS["q4-h8"], 1000).how
    'Plan(sync="local:every=8,codec=q4,exact_steps=24")'
    """
    exact_steps = math.ceil(max(LEAST_EXACT, steps * EXACT_SHARE) / EVERY) * EVERY
    if NO_EXACT_STEPS not in contender.how:
        return contender
    spelled = f"exact_steps={exact_steps}"
    words = tuple(word.replace(NO_EXACT_STEPS, spelled) for word in contender.variant.words)
    variant = replace(contender.variant, words=words)
    how = contender.how.replace(NO_EXACT_STEPS, spelled)
    return replace(contender, how=how, variant=variant, exact_steps=exact_steps)
