"""Every error a user can meet. Each message says what, who, the numbers, and the cure."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "DataError",
    "GradwireError",
    "LaunchError",
    "MismatchError",
    "NonFiniteError",
    "PeerError",
    "PlanError",
    "UsageError",
]


class GradwireError(Exception):
    """The root of gradwire's errors."""


class UsageError(GradwireError, ValueError):
    """A call was given something it cannot take."""


class PlanError(UsageError):
    """A plan is illegal; the message lists every illegal setting and its cure."""


class DataError(UsageError):
    """A data set, loader or split cannot be read as asked."""


class CheckpointError(GradwireError):
    """A checkpoint cannot be written, or the one on disk is damaged, incomplete or not there."""


class LaunchError(GradwireError):
    """The processes of a job could not be started or could not find each other."""


class MismatchError(GradwireError):
    """Ranks disagree about the model, the plan, the data or the versions."""


class NonFiniteError(GradwireError):
    """A gradient is NaN or infinite and the plan says to stop."""


class PeerError(GradwireError):
    """Another rank failed, left or went silent; this rank is only a victim."""
