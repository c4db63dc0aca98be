"""`Lending`: gradients that the user holds while their memory, the buckets, is needed again."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ReferenceType, ref

from torch import Tensor, nn

from gradwire.comm.dtensor import local_of


class Lending:
    """Knows every gradient that was put into a ``.grad``, as long as somebody holds it."""

    def __init__(self) -> None:
        self._lent: list[ReferenceType[Tensor]] = []

    def lend(self, grad: Tensor) -> Tensor:
        """``grad`` (a place in a bucket, or a `DTensor` whose part lies there) as a tensor of its own, for the user."""
        lent = grad.view_as(grad)
        self._lent.append(ref(local_of(lent)))
        return lent

    def call_in(self, params: Sequence[nn.Parameter]) -> None:
        """Before the buckets fill again: what the user kept, other than in ``.grad``, gets memory of its own."""
        lent, self._lent = self._lent, []
        current = {id(local_of(param.grad)) for param in params if param.grad is not None}
        for reference in lent:
            kept = reference()
            if kept is not None and id(kept) not in current:
                kept.data = kept.data.clone()
