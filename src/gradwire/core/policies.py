"""The policies: agree every step, every k-th, one step late, or on parameters after some local steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradwire.core.arguments import require_reducers, require_whole
from gradwire.core.outer import Nesterov, Outer
from gradwire.core.policy import SyncPolicy, Turn
from gradwire.errors import UsageError

if TYPE_CHECKING:  # the launcher reads plans too, and must start without torch
    from gradwire.core.microbatch import Microbatch
    from gradwire.core.reducer import Reducer

WARM_UP_STEPS = 20


def _ends_window(micro: Microbatch | None) -> bool:
    return micro is None or micro.last


def _steps(count: int, kind: str = "") -> str:
    return f"{count} {kind}step{'' if count == 1 else 's'}"


def _check_how(owner: str, reducer: object) -> None:
    if reducer is not None:
        require_reducers(owner, reducer=reducer)


class _GradientsOnly:
    """What policies that agree gradients have in common."""

    delay = 0
    spans_batches = False
    num_fragments = 1
    late = 0
    outer: Outer | None = None

    def at_step(self, step: int) -> tuple[int, ...]:
        return ()

    def alone(self) -> SyncPolicy:
        return EveryStep()


@dataclass(frozen=True, kw_only=True)
class EveryStep(_GradientsOnly):
    """Agree on the gradient once a window, on its last micro-batch. Exact if its reducer is.

    >>> EveryStep().at_backward(None, step=7), EveryStep().at_step(7)
    ('agree', ())
    """

    reducer: Reducer | None = None

    def __post_init__(self) -> None:
        _check_how("EveryStep", self.reducer)

    def at_backward(self, micro: Microbatch | None, step: int) -> Turn:
        return "agree" if _ends_window(micro) else "keep"

    def words(self) -> str:
        return "gradients are agreed every step"

    def syncs_per_step(self) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Accumulate(_GradientsOnly):
    """Agree, and step, once every ``every`` global batches: one batch that is so many times larger.

    Until then ``.grad`` is None, so ``optimizer.step()`` does nothing. Exact for the larger batch. What is left of a window
    when an epoch ends goes on into the next one; what is left when training ends is not used.

    >>> [Accumulate(every=2).at_backward(None, step=step) for step in range(4)]
    ['keep', 'agree', 'keep', 'agree']
    """

    every: int
    reducer: Reducer | None = None
    spans_batches = True

    def __post_init__(self) -> None:
        require_whole("Accumulate", "every", self.every, 1)
        _check_how("Accumulate", self.reducer)

    def alone(self) -> SyncPolicy:
        return Accumulate(every=self.every)

    def at_backward(self, micro: Microbatch | None, step: int) -> Turn:
        return "agree" if _ends_window(micro) and step % self.every == self.every - 1 else "keep"

    def words(self) -> str:
        batches = "batch, which is" if self.every == 1 else f"{self.every} batches, which are"
        return f"gradients are agreed every {batches} one step"

    def syncs_per_step(self) -> float:
        return 1.0 / self.every


@dataclass(frozen=True, kw_only=True)
class Delayed(_GradientsOnly):
    """Step with the gradient agreed for the batch before: the exchange travels during the next forward and backward.

    Stale by one step, stated: after the first backward ``.grad`` is None, and the last batch's gradient is never used.
    """

    reducer: Reducer | None = None
    delay = 1

    def __post_init__(self) -> None:
        _check_how("Delayed", self.reducer)

    def at_backward(self, micro: Microbatch | None, step: int) -> Turn:
        return "agree" if _ends_window(micro) else "keep"

    def words(self) -> str:
        return "gradients are agreed during the next step and used one step late"

    def syncs_per_step(self) -> float:
        return 1.0


def usual_momentum(every: int) -> float:
    """Of the outer step after so many local ones.

    >>> [usual_momentum(every) for every in (8, 32, 500)]
    [0.3, 0.6, 0.9]
    """
    return 0.3 if every <= 16 else 0.6 if every < 64 else 0.9


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """Each rank steps by its own gradient; every ``every`` steps the ranks agree on their parameters.

    What travels is the difference (global - local) since the last time, through ``reducer``; ``outer`` makes the new parameters
    from it (DiLoCo, arXiv 2311.08105; local SGD, arXiv 1805.09767). The first ``exact_steps`` steps agree gradients exactly
    (post-local SGD, arXiv 1808.07217). With ``fragments`` the parameters are agreed in so many parts at different steps
    (Streaming DiLoCo, arXiv 2501.18512), so that no step carries the whole exchange. With ``late`` an exchange is hidden
    behind as many local steps: what was agreed is taken that much later, and the steps made meanwhile are kept on top of it.

    outer: default Nesterov with lr 0.7 and momentum 0.3 up to ``every=16``, so that a steady difference is followed 1 : 1, 0.6
    below 64, and DiLoCo's 0.9 from there on.

    >>> policy = LocalSteps(every=4, exact_steps=2)
    >>> [policy.at_backward(None, step=step) for step in range(3)]
    ['agree', 'agree', 'own']
    >>> [step for step in range(12) if policy.at_step(step)]
    [5, 9]
    """

    every: int
    reducer: Reducer | None = None
    outer: Outer | None = None
    exact_steps: int = WARM_UP_STEPS
    fragments: int = 1
    late: int = 0
    delay = 0
    spans_batches = False

    def __post_init__(self) -> None:
        require_whole("LocalSteps", "every", self.every, 1)
        require_whole("LocalSteps", "exact_steps", self.exact_steps, 0)
        require_whole("LocalSteps", "fragments", self.fragments, 1)
        require_whole("LocalSteps", "late", self.late, 0)
        if self.late >= self.every:
            raise UsageError(
                f"LocalSteps(late={self.late}) must be below every={self.every}: a fragment is taken before it is sent again"
            )
        if self.fragments > self.every:
            raise UsageError(
                f"LocalSteps(fragments={self.fragments}) must not be above every={self.every}: at most one a step"
            )
        _check_how("LocalSteps", self.reducer)
        if self.outer is not None and (isinstance(self.outer, type) or not hasattr(self.outer, "step")):
            raise UsageError(
                f"LocalSteps(outer={self.outer!r}) must be an outer step such as Nesterov(lr=0.7, momentum=0.3)"
            )
        if self.outer is None:
            object.__setattr__(self, "outer", Nesterov(momentum=usual_momentum(self.every)))

    @property
    def num_fragments(self) -> int:
        return self.fragments

    def alone(self) -> SyncPolicy:
        return EveryStep()

    def at_backward(self, micro: Microbatch | None, step: int) -> Turn:
        if not _ends_window(micro):
            return "keep"
        return "agree" if step < self.exact_steps else "own"

    def at_step(self, step: int) -> tuple[int, ...]:
        place = (step - self.exact_steps) % self.every
        if step < self.exact_steps:
            return ()
        return tuple(f for f in range(self.fragments) if place == (f + 1) * self.every // self.fragments - 1)

    def words(self) -> str:
        outer = self.outer.words() if self.outer else ""
        parts = f", {self.fragments} fragments in turn" if self.fragments > 1 else ""
        parts += f", taken {_steps(self.late)} late" if self.late else ""
        warm_up = f" after {_steps(self.exact_steps, 'exact ')}" if self.exact_steps else ""
        every = "local step" if self.every == 1 else _steps(self.every, "local ")
        return f"parameters are agreed every {every}{parts}{warm_up} ({outer})"

    def syncs_per_step(self) -> float:
        return 1.0 / self.every
