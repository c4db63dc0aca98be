"""What the roster is told and what it asks for: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

from gradwire.launch.hang import Waiting
from gradwire.launch.verdict import MAX_FRAMES, Frame, Verdict
from gradwire.launch.wire import Message, WireError, as_message, get_float, get_int, get_list, get_text

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

    @classmethod
    def parse(cls, message: Message, now: float) -> Beat:
        """From a `beat` message that came at `now`; WireError if it is none."""
        groups = [as_message(entry) for entry in get_list(message, "groups")]
        waiting = [
            Waiting(
                group=get_text(group, "group"),
                op=get_text(group, "op"),
                seq=get_int(group, "seq"),
                since=now - get_float(group, "waited_s"),
                ranks=_parse_ranks(group.get("ranks")),
            )
            for group in groups
            if group.get("waited_s") is not None
        ]
        return cls(
            step=get_int(message, "step"),
            step_s=get_float(message, "step_s"),
            arrived={get_text(group, "group"): get_int(group, "seq") for group in groups},
            waiting=waiting,
            stack=[_parse_frame(entry) for entry in get_list(message, "stack")[:MAX_FRAMES]],
        )


def _parse_ranks(entry: object) -> frozenset[int] | None:
    match entry:
        case None:
            return None
        case [*ranks] if all(isinstance(rank, int) for rank in ranks):
            return frozenset(cast("list[int]", ranks))
        case _:
            raise WireError("the ranks of a group are not whole numbers")


def _parse_frame(entry: object) -> Frame:
    match entry:
        case [str() as file, int() as line, str() as function]:
            return file, line, function
        case _:
            raise WireError("a stack frame is not (file, line, function)")
