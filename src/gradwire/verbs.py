"""Verbs of the open world, for scripts that keep every gradwire call on a line of its own."""

from __future__ import annotations

from gradwire.comm.world import Number, current


def sum(value: Number) -> Number:
    """``value`` summed over the ranks, the same on all; alone, itself. A number, or a tensor of one shape and dtype.

    Ranks along ``pipeline`` and ``tensor`` have the same samples: of each line of them one counts.

    >>> import gradwire as gw
    >>> with gw.init():
    ...     gw.sum(3)
    3
    """
    return current().sum(value)
