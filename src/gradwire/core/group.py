"""`Group`: the ranks along one mesh axis that can talk; the only door to the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Op = Literal["sum", "max", "min"]


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The two levels of a group whose ranks share hosts.

    inside: the ranks of this host. between: one rank of every host, in the hosts' order; None on the ranks for whom their
    host's rank 0 of ``inside`` sends.
    """

    inside: Group
    between: Group | None


class Group(Protocol):
    """Blocking collectives over the ranks of one mesh axis.

    One thread issues a group's collectives, all ranks in the same order. A thread that needs collectives beside
    another one takes its own channel: ``world.group("data", channel="loader")``.

    Every method raises ``PeerError`` naming the rank, host, group, operation and step when a peer is gone.
    Tensors are contiguous, of one dtype and (except ``all_to_all``) of one shape on all ranks.
    """

    @property
    def name(self) -> str:
        """Axis and channel, for people: ``data/gradients``."""
        ...

    @property
    def rank(self) -> int:
        """This process's place in the group, 0 <= rank < size."""
        ...

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        ...

    @property
    def levels(self) -> Levels | None:
        """Hosts and the ranks on them, where some host has several; None: all on one host, or one on each."""
        ...

    @property
    def sums_in_rank_order(self) -> bool:
        """Whether ``all_reduce`` adds in rank order whatever the tensor's size, so that its bits don't depend on it."""
        ...

    def new_zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(numel,) zeros, where this group reduces them fastest: in memory the ranks share, say. All ranks call it alike."""
        ...

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        """Reduce ``tensor`` (any shape) over the ranks, in place; all ranks get the same bits. Returns it."""
        ...

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start ``all_reduce(tensor)`` and return at once; calling the result waits for it.

        What was begun first is waited for first. It saves the two thread switches a blocking call costs beside backward.
        """
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """``tensor`` (*shape) of every rank -> (size, *shape), in rank order."""
        ...

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` (size, *shape) over the ranks *in rank order*; rank r gets row r (*shape)."""
        ...

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` with rank ``src``'s, in place. Returns it."""
        ...

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """``tensor`` (size, *shape): row q goes to rank q. Returns (size, *shape): row q came from rank q."""
        ...

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send ``tensor`` to group rank ``dst``."""
        ...

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        """Overwrite ``tensor`` with what group rank ``src`` sends. Returns it."""
        ...

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        ...
