"""How a synchronisation is spelled in a plan file and on the command line: ``q4``, ``local:every=16,codec=q4``. Pure.

This file only knows the grammar and what is allowed, so that the launcher can refuse a wrong word without torch;
`sync/named.py` makes the objects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from gradwire.errors import PlanError

Value = int | float | str


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a name: how to read it, and what is allowed, for people."""

    read: Callable[[str], Value]
    allowed: str


@dataclass(frozen=True, kw_only=True)
class Spelled:
    """A name and its options; codec: what stands for ``codec=``, None if nothing does."""

    name: str
    options: Mapping[str, Value]
    codec: Spelled | None = None


MOST = 999_999_999  # of anything counted


def _whole(least: int) -> Option:
    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= MOST:
            raise ValueError
        return int(text)

    return Option(read=read, allowed=f"a whole number, at least {least} and at most {MOST:,}")


def _number(low: float, high: float, words: str) -> Option:
    def read(text: str) -> float:
        value = float(text)
        if not low < value <= high and not (value == low == 0.0 and "or 0" in words):
            raise ValueError
        return value

    return Option(read=read, allowed=words)


_EXACT_STEPS = {"exact_steps": _whole(0)}
_RATIO = _number(0.0, 1.0, "a share above 0 and at most 1")
CODECS: Mapping[str, Mapping[str, Option]] = {
    "exact": {},
    "bf16": {},
    "q8": _EXACT_STEPS,
    "q4": _EXACT_STEPS,
    "lowrank": {"rank": _whole(1), **_EXACT_STEPS},
    "topk": {"ratio": _RATIO, **_EXACT_STEPS},
    "sampled": {"ratio": _RATIO, **_EXACT_STEPS},
}
POLICIES: Mapping[str, Mapping[str, Option]] = {
    "accumulate": {"every": _whole(1)},
    "delayed": {},
    "local": {
        "every": _whole(1),
        "exact_steps": _whole(0),
        "fragments": _whole(1),
        "late": _whole(0),
        "lr": _number(0.0, 10.0, "a number above 0 and at most 10"),
        "momentum": _number(0.0, 0.999, "a number above 0, or 0, and at most 0.999"),
    },
}
NEEDED: Mapping[str, tuple[str, ...]] = {
    "accumulate": ("every",),
    "local": ("every",),
    "lowrank": (),
    "topk": ("ratio",),
    "sampled": ("ratio",),
}


def parse(text: str) -> Spelled:
    """Read ``NAME``, ``NAME:KEY=VALUE,...``; a codec with options stands in brackets: ``local:every=8,codec=topk(ratio=0.01)``.

    Raises PlanError naming the word and what is allowed.

    >>> parse("local:every=16,codec=q4").codec.name
    'q4'
    >>> parse("q4:bits=3")
    Traceback (most recent call last):
    gradwire.errors.PlanError: sync 'q4:bits=3': q4 has no option 'bits'; allowed: exact_steps
    """
    if (opened := text.count("(")) != (closed := text.count(")")):
        wrong = "a bracket is not closed" if opened > closed else "a bracket too many is closed"
        cure = _cure(text) or "options of a codec: local:every=8,codec=topk(ratio=0.01)"
        raise PlanError(f"sync {text!r}: {wrong}; {cure}")
    name, colon, rest = text.strip().partition(":")
    if name not in CODECS and name not in POLICIES:
        raise PlanError(
            f"sync {text!r}: unknown name {name!r}; {_meant(name, text)}allowed: {', '.join([*CODECS, *POLICIES])}"
        )
    if colon and not rest.strip():
        raise PlanError(f"sync {text!r}: nothing follows the colon; write {name}:KEY=VALUE or just {name}")
    return _spelled(name, _pairs(rest, text), text)


def _meant(name: str, whole: str) -> str:
    """A guess at what an unknown name was to be, for people."""
    if cure := _cure(whole):
        return f"{cure}; "
    close = get_close_matches(re.split(r"[(,]", name.lower())[0].strip(), [*CODECS, *POLICIES], n=1)
    return f"perhaps {close[0]}; " if close else ""


def _cure(text: str) -> str:
    """What to write where an option follows a known name without a colon; empty where that is not what is wrong.

    >>> _cure("local(every=8,codec=topk(ratio=0.1))"), _cure("localevery=8"), _cure("lokal:every=8")
    ('write local:every=8,codec=topk(ratio=0.1)', 'write local:every=8', '')
    """
    text = "".join(text.lower().split())
    for name in (*CODECS, *POLICIES):
        rest = text.removeprefix(name).lstrip("(,;")
        if text.startswith(name) and rest.startswith(tuple(f"{key}=" for key in _keys(name))):
            while rest.endswith(")") and rest.count(")") > rest.count("("):
                rest = rest.removesuffix(")")
            return f"write {name}:{rest if _right(f'{name}:{rest}') else 'KEY=VALUE'}"
    return ""


def _right(text: str) -> bool:
    try:
        parse(text)
    except PlanError:
        return False
    return True


def _keys(name: str) -> list[str]:
    return [*CODECS[name]] if name in CODECS else [*POLICIES[name], "codec"]


def _pairs(text: str, whole: str) -> dict[str, str]:
    """``a=1,codec=topk(ratio=0.1,exact_steps=3)`` -> pairs; commas inside brackets do not part."""
    pairs: dict[str, str] = {}
    if not text.strip():
        return pairs
    for part in re.split(r",(?![^(]*\))", text):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise PlanError(f"sync {whole!r}: {part.strip()!r} is not KEY=VALUE")
        if key.strip() in pairs:
            raise PlanError(f"sync {whole!r}: {key.strip()} is given twice")
        pairs[key.strip()] = value.strip()
    return pairs


def _spelled(name: str, pairs: dict[str, str], whole: str) -> Spelled:
    known = CODECS.get(name) or POLICIES.get(name) or {}
    codec = _codec(pairs.pop("codec"), whole) if name in POLICIES and "codec" in pairs else None
    options: dict[str, Value] = {}
    for key, value in pairs.items():
        if key not in known:
            allowed = ", ".join(_keys(name)) or "none"
            raise PlanError(f"sync {whole!r}: {name} has no option {key!r}; allowed: {allowed}")
        try:
            options[key] = known[key].read(value)
        except ValueError:
            raise PlanError(f"sync {whole!r}: {key}={value} must be {known[key].allowed}") from None
    if missing := [key for key in NEEDED.get(name, ()) if key not in options]:
        raise PlanError(f"sync {whole!r}: {name} needs {missing[0]}=...: {known[missing[0]].allowed}")
    if options.get("fragments", 1) > options.get("every", 1):  # pyright: ignore[reportOperatorIssue]  # both whole
        raise PlanError(f"sync {whole!r}: fragments must not be above every: at most one a step")
    if options.get("late", 0) >= options.get("every", 1):  # pyright: ignore[reportOperatorIssue]
        raise PlanError(f"sync {whole!r}: late must be below every: what was sent is taken before it is sent again")
    return Spelled(name=name, options=options, codec=codec)


def _codec(text: str, whole: str) -> Spelled:
    name, bracket, rest = text.partition("(")
    if name not in CODECS or (bracket and not rest.endswith(")")):
        raise PlanError(f"sync {whole!r}: codec={text} must be one of {', '.join(CODECS)}, options in brackets")
    return _spelled(name, _pairs(rest.removesuffix(")"), whole), whole)
