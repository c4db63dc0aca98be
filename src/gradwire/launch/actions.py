"""What the roster is told and what it asks for: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from gradwire.launch.hang import Waiting
from gradwire.launch.verdict import Frame, Verdict

__all__ = ["Action", "AskStack", "Beat", "Done", "Refuse", "Release", "Stop", "Warn"]


@dataclass(frozen=True, kw_only=True)
class Stop:
    """End the job: tell everybody the verdict."""

    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Warn:
    """Show a text; the job goes on."""

    text: str


@dataclass(frozen=True, kw_only=True)
class AskStack:
    """Ask a rank where its threads are."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class Refuse:
    """Turn away whoever just said hello."""

    reason: str


@dataclass(frozen=True)
class Release:
    """Every rank has left: let them end."""


@dataclass(frozen=True)
class Done:
    """Every process has ended with code 0."""


Action: TypeAlias = Stop | Warn | AskStack | Refuse | Release | Done


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank says every 0.5 s. `waiting` is already on the roster's clock; `stack` is innermost first."""

    step: int
    step_s: float = 0.0
    arrived: dict[str, int] = field(default_factory=dict[str, int])
    waiting: Sequence[Waiting] = ()
    stack: Sequence[Frame] = ()
