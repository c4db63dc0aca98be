"""`Outer`: the step that local steps' agreed difference takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gradwire.core.arguments import require_number

if TYPE_CHECKING:
    from torch import Tensor


class Outer(Protocol):
    """A frozen dataclass."""

    def step(self, values: Tensor, delta: Tensor, velocity: Tensor) -> None:
        """Move the agreed ``values`` and the momentum ``velocity``, in place, each (numel,) float.

        delta: the agreed (global - local); may be overwritten.
        """
        ...

    def words(self) -> str:
        """A few words for people."""
        ...


@dataclass(frozen=True, kw_only=True)
class Nesterov:
    """SGD with Nesterov momentum on parameter deltas (DiLoCo, arXiv 2311.08105).

    ``v <- momentum v + delta``; global moves by ``-lr (delta + momentum v)``. lr 1 and momentum 0 is plain averaging.

    >>> import torch
    >>> values = torch.tensor([10.0])
    >>> Nesterov(lr=0.7, momentum=0.9).step(values, torch.tensor([10.0 - 7.0]), torch.zeros(1))
    >>> round(float(values), 2)
    6.01
    """

    lr: float = 0.7
    momentum: float = 0.3

    def __post_init__(self) -> None:
        words = "above 0 and at most 10; 0.7 is usual, 1 is plain averaging"
        require_number("Nesterov", "lr", self.lr, low=math.ulp(0.0), high=10.0, words=words)
        words = "at least 0 and below 1; 0.3 to 0.9 is usual"
        require_number("Nesterov", "momentum", self.momentum, low=0.0, high=1 - math.ulp(0.5), words=words)

    def step(self, values: Tensor, delta: Tensor, velocity: Tensor) -> None:
        velocity.mul_(self.momentum).add_(delta)
        values.sub_(delta.add_(velocity, alpha=self.momentum), alpha=self.lr)

    def words(self) -> str:
        return f"outer Nesterov lr {self.lr:g} momentum {self.momentum:g}"
