"""`SyncPolicy`: when gradients or parameters are agreed. Pure functions of where the loop is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gradwire.core.microbatch import Microbatch


class SyncPolicy(Protocol):
    """Printable, costed, tested without ranks."""

    def at_backward(self, micro: Microbatch | None) -> bool:
        """Are gradients exchanged on this backward? micro: None if no loader is attached."""
        ...

    def at_step(self, step: int) -> bool:
        """Are parameters agreed after optimizer step ``step`` (from 0)?"""
        ...

    def words(self) -> str:
        """One line for people."""
        ...


@dataclass(frozen=True, kw_only=True)
class EveryStep:
    """Agree on the gradient once a window, on its last micro-batch. Exact.

    >>> EveryStep().at_backward(None), EveryStep().at_step(7)
    (True, False)
    """

    def at_backward(self, micro: Microbatch | None) -> bool:
        return micro is None or micro.last

    def at_step(self, step: int) -> bool:
        return False

    def words(self) -> str:
        return "gradients are agreed every step (exact)"
