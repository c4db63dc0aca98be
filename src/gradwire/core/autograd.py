"""The one private door to autograd: what is to happen when a backward has ended."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradwire.errors import GradwireError


def can_call_at_end_of_backward() -> bool:
    """Whether this torch has the engine's callback queue, which its own DDP and FSDP2 use."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    return hasattr(engine, "queue_callback")


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that runs on this thread has ended, in the order of these calls.

    Only valid inside a backward.
    """
    if not can_call_at_end_of_backward():
        raise GradwireError(
            f"torch {torch.__version__} has no end-of-backward callback; gradwire needs torch 2.13 or a release that kept it"
        )
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore  # untyped in torch
