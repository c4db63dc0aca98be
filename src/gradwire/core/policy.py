"""`SyncPolicy`: when gradients or parameters are agreed. Pure functions of where the loop is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # the launcher reads plans too, and must start without torch
    from gradwire.core.microbatch import Microbatch
    from gradwire.core.outer import Outer
    from gradwire.core.reducer import Reducer

Turn = Literal["agree", "keep", "own"]


class SyncPolicy(Protocol):
    """A frozen dataclass that names its reducer: printable, costed, tested without ranks."""

    @property
    def reducer(self) -> Reducer | None:
        """How a bucket of gradients, or of parameter deltas, is agreed; None: the exact all-reduce."""
        ...

    @property
    def delay(self) -> int:
        """How many exchanges later the agreed gradient is used: 0 at once, 1 hides the exchange behind a step."""
        ...

    @property
    def spans_batches(self) -> bool:
        """Whether one window holds several global batches, so that its sample count is only known when it ends."""
        ...

    @property
    def num_fragments(self) -> int:
        """Into how many parts the parameters are cut that are agreed at different steps."""
        ...

    @property
    def late(self) -> int:
        """How many steps after a fragment was sent its agreed values are taken: 0 waits, more hides the exchange behind steps."""
        ...

    @property
    def outer(self) -> Outer | None:
        """What turns agreed parameter deltas into new parameters; None if no parameters are agreed."""
        ...

    def at_backward(self, micro: Microbatch | None, step: int) -> Turn:
        """``agree``: the window ends, exchange gradients. ``keep``: it goes on, ``.grad`` stays None.

        ``own``: the window ends and ``.grad`` is this rank's own mean. micro: None without a loader. step: windows ended before.
        """
        ...

    def at_step(self, step: int) -> tuple[int, ...]:
        """Which fragments of the parameters are agreed after optimizer step ``step`` (from 0)."""
        ...

    def alone(self) -> SyncPolicy:
        """What a world of one does: the same batches a step, exactly, and nothing else."""
        ...

    def words(self) -> str:
        """One line for people."""
        ...

    def syncs_per_step(self) -> float:
        """How many times a step the whole model is sent, in the long run."""
        ...
