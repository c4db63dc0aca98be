"""What the loaders need of the world: seams only, so that `data/` runs under any launcher or a test's double."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from gradwire.core.group import Group
from gradwire.core.microbatch import MicrobatchSource


class Clock(Protocol):
    """The step account, as a loader sees it."""

    def waiting_for_data(self) -> AbstractContextManager[object]:
        """Time spent inside counts as waiting for data."""
        ...


class World(Protocol):
    """This process among its peers, as a loader sees it.

    reading: the loader that yielded last; every loader writes itself here.
    """

    reading: MicrobatchSource | None

    @property
    def rank(self) -> int: ...

    @property
    def reader_rank(self) -> int:
        """This rank's place among those that read samples of their own."""
        ...

    @property
    def num_readers(self) -> int: ...

    @property
    def clock(self) -> Clock: ...

    def turn_ended(self) -> None:
        """The loop is done with what was yielded."""
        ...

    def group(self, *axes: str, channel: str = ...) -> Group:
        """The ranks along ``axes``; ``channel`` gives the caller's thread collectives of its own."""
        ...


def here(world: World | None) -> World:
    """``world``, or the one that ``gw.init()`` opened.

    Raises UsageError if there is neither.
    """
    if world is not None:
        return world
    from gradwire.comm.world import current  # late: splits and orders are of use without any network

    return current()


def loader_group(world: World) -> Group:
    """The loaders' own channel: their collectives never mix with those of the gradients."""
    return world.group("data", "shard", channel="loader")
