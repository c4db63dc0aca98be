"""`Carried`: gradients that parameters bring into a backward from earlier ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from gradwire.comm.dtensor import local_of
from gradwire.sync.places import Place


class Carried:
    """Aside while autograd makes fresh ones: *agreed* gradients of an earlier backward (held, and added back at its end), and
    *local* ones from ``no_sync`` (pending: part of what this rank brings to the next exchange).
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params
        self._local: set[int] = set()
        self._held: dict[int, Tensor] = {}
        self._pending: dict[int, Tensor] = {}

    @property
    def no_local(self) -> bool:
        """Whether ``no_sync`` has left nothing."""
        return not self._local

    def set_aside(self, index: int, place: Place | None) -> None:
        """Take what stands in ``.grad``; what lies in the bucket, at ``place``, gets memory of its own."""
        param = self._params[index]
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if index in self._local:
            self._pending[index] = grad
        else:
            in_bucket = place is not None and not grad.is_sparse and place.holds(local_of(grad))
            self._held[index] = grad.clone() if in_bucket else grad

    def keep_local(self, index: int, fresh: Tensor, scale: float) -> None:
        """Leave ``scale`` x ``fresh``, and what was local before, in ``.grad``."""
        kept = self._pending.pop(index, None)
        if scale and scale != 1.0:
            fresh.mul_(scale)
        if scale:
            kept = fresh if kept is None else kept.add_(fresh)
        if kept is not None:
            self._params[index].grad = kept
            self._local.add(index)

    def take_pending(self, index: int) -> Tensor | None:
        """The local gradient, to be sent."""
        return self._pending.pop(index, None)

    def with_held(self, index: int, grad: Tensor | None) -> Tensor | None:
        """``grad``, freshly agreed, and what was agreed before."""
        held = self._held.pop(index, None)
        if grad is None or held is None:
            return held if grad is None else grad
        return grad + held if grad.is_sparse else grad.add_(held)

    def drop(self) -> None:
        """The backward has failed."""
        self._pending.clear()
        self._held.clear()

    def delivered(self) -> None:
        """``.grad`` holds what was agreed: nothing is local any more."""
        self._local.clear()
