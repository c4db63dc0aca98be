"""`Microbatch`: what the loop holds right now. The loader writes it, the synchroniser reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One turn of the user's loop.

    epoch, step: epoch and global batch within it, from 0. index of total: place in the accumulation window.
    samples: how many samples of it are this rank's (0: the loop holds a stand-in).
    global_samples: over all ranks, or None if only an exchange can tell.
    window_samples: over all ranks and the window's micro-batches, or None.

    >>> Microbatch(epoch=0, step=3, index=1, total=2, samples=8, global_samples=16, window_samples=32).last
    True
    """

    epoch: int
    step: int
    index: int
    total: int
    samples: int
    global_samples: int | None
    window_samples: int | None

    @property
    def last(self) -> bool:
        """Whether the window ends here: gradients are agreed and the optimizer steps."""
        return self.index == self.total - 1


class MicrobatchSource(Protocol):
    """A loader, as the synchroniser sees it."""

    @property
    def current(self) -> Microbatch | None:
        """The micro-batch most recently yielded; None before the first."""
        ...

    def attach(self, accumulate: int) -> None:
        """From now on step in lockstep with the other ranks: windows of ``accumulate``, stand-ins for empty parts."""
        ...

    def example(self) -> object:
        """A batch such as the loop will see, of the first samples; nothing is consumed by it."""
        ...

    def describe(self) -> dict[str, str | int]:
        """What must be equal on all ranks: length, batch size, split, seed."""
        ...
