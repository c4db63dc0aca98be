"""`Contribution`: what this rank has put into the window that is open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.compress import kernels
from gradwire.sync.buckets import is_finite
from gradwire.sync.kept import WindowState
from gradwire.sync.places import Place
from gradwire.sync.weighting import Window


class Contribution:
    """Weighted gradients: dense ones in their places in the buckets, sparse ones as rows.

    It lives from a window's first backward to its exchange, or to its local step.
    """

    def __init__(self, names: Sequence[str], sparse: frozenset[int]) -> None:
        self._names = names
        self._sparse = sparse
        self._filled: set[int] = set()
        self._rows: dict[int, Tensor] = {}
        self._finite: list[tuple[str, Tensor | bool]] = []
        self._checked: dict[int, bool] = {}
        self._failure: str | None = None
        self.places: dict[int, Place] = {}

    @property
    def empty(self) -> bool:
        """Nothing yet."""
        return not self._filled and not self._rows and self._failure is None

    def add(self, index: int, grad: Tensor, scale: float) -> None:
        """Add ``scale`` x ``grad``; a weight of 0 adds nothing, not even a NaN."""
        if not scale:
            return
        if index in self._sparse:
            rows = grad * scale if grad.is_sparse else (grad * scale).to_sparse(1)
            self._rows[index] = self._rows[index] + rows if index in self._rows else rows
            return
        dense = grad.to_dense() if grad.is_sparse else grad
        fresh = index not in self._filled
        self._filled.add(index)
        fine: list[bool] = []
        for piece, part in self.places[index].beside(dense):
            if not fresh:
                piece.add_(part, alpha=scale)
            elif (checked := kernels.scale(part, piece, scale)) is None:
                torch.mul(part, scale, out=piece)
            else:
                fine.append(checked)
        self._checked.pop(index, None)
        if len(fine) == len(self.places[index].pieces):
            self._checked[index] = all(fine)

    def complete(self, index: int) -> None:
        """Nothing more comes for this parameter in this window."""
        if index in self._sparse:
            if index in self._rows:
                self._finite.append((self._names[index], is_finite(self._rows[index].coalesce().values())))
        elif index in self._filled:
            fine = self._checked.get(index)
            for found in [fine] if fine is not None else map(is_finite, self.places[index].pieces):
                self._finite.append((self._names[index], found))
        else:
            for piece in self.places[index].pieces:
                piece.zero_()

    def present(self) -> list[bool]:
        """Which parameters have a gradient on this rank."""
        return [index in self._filled or index in self._rows for index in range(len(self._names))]

    def fail(self, why: str) -> None:
        """It will never be whole: all ranks are to skip the window."""
        self._failure = why

    def bad(self) -> list[str]:
        """Why it must not be used: which completed ones are NaN or infinite, or what made it fail. Usually nothing."""
        if self._failure is not None:
            return [self._failure]
        return list(dict.fromkeys(name for name, fine in self._finite if not fine))

    def rows(self, index: int) -> Tensor | None:
        """The sparse gradient of parameter ``index``, if there is one."""
        return self._rows.get(index)

    def own_mean(self, share: float) -> dict[int, Tensor]:
        """This rank's own mean by parameter; share makes it one of the sum."""
        dense = {index: self.places[index].own.mul_(share) for index in self._filled}
        return dense | {index: rows * share for index, rows in self._rows.items()}

    def clear(self) -> None:
        """The window has ended."""
        self._filled.clear()
        self._rows.clear()
        self._finite.clear()
        self._checked.clear()
        self._failure = None

    def take_out(self) -> dict[int, Tensor]:
        """Copies of what is in the buckets, which are about to go."""
        kept = self._copies()
        self.places = {}
        return kept

    def put_back(self, kept: Mapping[int, Tensor]) -> None:
        """The same into the new ones."""
        for index, value in kept.items():
            for piece, part in self.places[index].beside(value):
                piece.copy_(part)

    def _copies(self) -> dict[int, Tensor]:
        """Of the dense ones; flat where they lie in several pieces."""
        whole: dict[int, Tensor] = {}
        for index in sorted(self._filled):
            pieces = self.places[index].pieces
            whole[index] = pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces)
        return whole

    # --- kept --------------------------------------------------------------------------------------------------------

    def state_dict(self, window: Window) -> WindowState:
        """What an open window holds so far."""
        return WindowState(
            count=window.count,
            unit=window.unit,
            relative=window.relative,
            closed=window.closed,
            dense=self._copies(),
            rows=dict(self._rows),
        )

    def join(self, other: WindowState, window: Window) -> None:
        """Go on in the window that a rank of an earlier world had open; of several, one after another."""
        if other["closed"] or not other["count"]:
            return
        if not window.count:
            window.unit, window.relative, window.closed = other["unit"], other["relative"], False
        window.count += other["count"]
        self._take(other["dense"], other["unit"] / window.unit)
        self._take(other["rows"], other["unit"] / window.unit)

    def _take(self, gradients: Mapping[int, Tensor], scale: float) -> None:
        for index, grad in gradients.items():
            self.add(index, grad, scale)
