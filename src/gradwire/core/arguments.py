"""What settings of reducers and policies must be, in words for whoever got one wrong."""

from __future__ import annotations

from gradwire.errors import UsageError


def require_whole(owner: str, name: str, value: object, least: int) -> None:
    """Raise UsageError unless ``value`` is an int of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{owner}({name}={value!r}) must be a whole number, at least {least}")


def require_number(owner: str, name: str, value: object, *, low: float, high: float, words: str) -> None:
    """Raise UsageError unless ``low <= value <= high``; ``words`` say what is allowed and usual."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"{owner}({name}={value!r}) must be {words}")


def require_reducers(owner: str, **given: object) -> None:
    """Raise UsageError, with the cure, for whatever cannot agree on a bucket."""
    for name, value in given.items():
        if isinstance(value, type) or not hasattr(value, "reduce"):
            raise UsageError(f"{owner}: {name}={value!r} is not a reducer; {cure_for(value)}")


def cure_for(value: object) -> str:
    """What whoever gave ``value`` as a reducer may have meant.

    >>> cure_for("q4")
    'a text stands only for sync itself; here say ErrorFeedback(Quantize(bits=4)), for instance'
    """
    if isinstance(value, type):
        return f"make one: {value.__name__}(...)"
    if isinstance(value, str):
        return "a text stands only for sync itself; here say ErrorFeedback(Quantize(bits=4)), for instance"
    if hasattr(value, "at_backward"):
        return "a policy says when, not how: it is what sync itself takes"
    if hasattr(value, "encode"):
        return f"wrap it: ErrorFeedback({value})"
    return "use AllReduce(), say"
