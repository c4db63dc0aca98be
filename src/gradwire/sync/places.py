"""`Place`: where a parameter's gradient lies in its bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from gradwire.comm.dtensor import rows_of
from gradwire.sync.buckets import BucketSpec, Slot


@dataclass(frozen=True)
class Place:
    """In one piece, in the gradient's shape; or, where ranks own rows, in one flat piece for each of them.

    own: what is this rank's once the bucket is agreed, in its shape.
    """

    pieces: tuple[Tensor, ...]
    own: Tensor

    def beside(self, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each piece with the part of ``grad`` that belongs there."""
        if len(self.pieces) == 1:
            yield self.pieces[0], grad
        else:
            yield from zip(self.pieces, grad.reshape(-1).split([piece.numel() for piece in self.pieces]), strict=True)

    def holds(self, grad: Tensor) -> bool:
        """Whether ``grad`` lies in here."""
        return grad.data_ptr() == self.own.data_ptr()


def places_of(layout: Sequence[BucketSpec], flats: Sequence[Tensor], *, rank: int = 0) -> dict[int, Place]:
    """Each parameter's place, by parameter index; rank: this rank's among those that own rows."""
    return {
        slot.param.index: _place(spec, slot, flat, rank)
        for spec, flat in zip(layout, flats, strict=True)
        for slot in spec.slots
    }


def _place(spec: BucketSpec, slot: Slot, flat: Tensor, rank: int) -> Place:
    if spec.num_parts == 1:
        view = flat[slot.offset : slot.offset + slot.param.numel].view(slot.param.shape)
        return Place((view,), view)
    num_rows, *rest = slot.param.whole_shape
    width = slot.param.numel // slot.param.shape[0] if slot.param.shape[0] else 0
    pieces: list[Tensor] = []
    for part in range(spec.num_parts):
        rows = rows_of(num_rows, spec.num_parts, part)
        begin = part * spec.numel + slot.offset
        pieces.append(flat[begin : begin + (rows.stop - rows.start) * width])
    own = pieces[rank]
    return Place(tuple(pieces), own.view(own.numel() // width if width else 0, *rest))
