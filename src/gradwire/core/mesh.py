"""`Mesh`: the ranks as a grid with named axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from gradwire.errors import PlanError

AXES = ("pipeline", "data", "shard", "tensor")  # the last varies fastest: tensor parallel ranks are neighbours
BATCH_AXES = ("data", "shard")  # along these every rank reads samples of its own


@dataclass(frozen=True)
class Mesh:
    """Rank r stands where r's digits point, axis by axis, in the order of `AXES`; the last axis varies fastest.

    sizes: one for each of `AXES`.

    >>> mesh = Mesh.of({"data": 2, "pipeline": 2}, world_size=4)
    >>> mesh.words(), mesh.ranks_along(("data",), rank=3), mesh.ranks_along(("pipeline",), rank=3)
    ('pipeline=2 x data=2', (2, 3), (1, 3))
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int], world_size: int) -> Mesh:
        """The mesh of these axes; without any, all ranks along ``data``. Raises PlanError if it does not fill the world."""
        given = dict(sizes) or {"data": world_size}
        mesh = cls(tuple(given.get(axis, 1) for axis in AXES))
        if mesh.size != world_size:
            raise PlanError(_does_not_fit(given, mesh, world_size))
        return mesh

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return math.prod(self.sizes)

    def length(self, axes: Sequence[str]) -> int:
        """How many ranks stand along these axes together."""
        return math.prod(self.sizes[AXES.index(axis)] for axis in axes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands on each axis."""
        digits: list[int] = []
        for size in reversed(self.sizes):
            rank, digit = divmod(rank, size)
            digits.append(digit)
        return dict(zip(AXES, reversed(digits), strict=True))

    def ranks_along(self, axes: Sequence[str], rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` at most along ``axes``, itself included, in order."""
        here = self.coordinate(rank)
        free = [range(size) if axis in axes else (here[axis],) for axis, size in zip(AXES, self.sizes, strict=True)]
        return tuple(self._rank(digits) for digits in product(*free))

    def words(self) -> str:
        """``data=2 x shard=2``: the axes that are longer than one."""
        long = [f"{axis}={size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        return " x ".join(long) or "data=1"

    def _rank(self, digits: Sequence[int]) -> int:
        rank = 0
        for size, digit in zip(self.sizes, digits, strict=True):
            rank = rank * size + digit
        return rank


def _does_not_fit(given: Mapping[str, int], mesh: Mesh, world_size: int) -> str:
    spelled = " x ".join(f"{axis}={size}" for axis, size in given.items())
    rest = mesh.size // given.get("data", 1)
    fitting = world_size // rest if world_size % rest == 0 else None
    use = "" if fitting is None else f"use data={fitting} or "
    return f"mesh {spelled} needs {mesh.size} ranks, the launcher started {world_size}; {use}start {mesh.size}"
