"""A loader's state as plain values: written, checked and read back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

from gradwire.data.sources import Described
from gradwire.data.turns import Position, Seat
from gradwire.errors import DataError

T = TypeVar("T")

FORMAT = 1


def pack(source: Described, at: Position, seat: Seat) -> dict[str, object]:
    """Position, what it is a position in, and whatever else the source needs."""
    return {
        "format": FORMAT,
        "epoch": at.epoch,
        "step": at.step,
        "micro": at.micro,
        "of": at.of,
        "ranks": seat.size,
        "split_kind": source.split_kind,
        "data": dict(source.describe()),
        "source": dict(source.state(at)),
    }


def unpack(state: Mapping[str, object], source: Described, seat: Seat) -> Position:
    """The position in ``state``. Raises DataError, naming the difference, if it belongs to other data."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DataError("this is not a gradwire loader's state (format 1); pass what its state_dict() returned")
    data = cast("Mapping[str, object]", _of(state, "data", dict))
    same_ranks = _of(state, "ranks", int) == seat.size
    if source.local and not same_ranks:
        raise DataError(
            f"the state is of {state['ranks']} ranks with a data set each, here are {seat.size}; "
            "under Local() go on with the same number of ranks"
        )
    mine = dict(source.describe())
    if not same_ranks:  # per-rank numbers of a split may change with the world; what it is may not
        mine["split"], data = source.split_kind, {**data, "split": state.get("split_kind")}
    for name in sorted(mine.keys() | data.keys()):
        if mine.get(name) != data.get(name):
            raise DataError(
                f"the state is of another loader: {name} was {data.get(name)!r}, is {mine.get(name)!r}; "
                f"build the loader with the same {name}, or start without the state"
            )
    position = Position(**{name: _count(state, name) for name in ("epoch", "step", "micro", "of")})
    source.restore(cast("Mapping[str, object]", _of(state, "source", dict)))
    return position


def _of(state: Mapping[str, object], name: str, kind: type[T]) -> T:
    value = state.get(name)
    if not isinstance(value, kind):
        raise DataError(f"the state's {name!r} is {value!r}, not a {kind.__name__}; it was changed since state_dict()")
    return value


def _count(state: Mapping[str, object], name: str) -> int:
    value = _of(state, name, int)
    if isinstance(value, bool) or value < 0:
        raise DataError(f"the state's {name!r} is {value!r}, not a count; it was changed since state_dict()")
    return value
