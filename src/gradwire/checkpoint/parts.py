"""`Part`: one of the user's objects, as the checkpoint sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from gradwire.checkpoint.manifest import Manifest
from gradwire.checkpoint.trees import Json
from gradwire.errors import UsageError


def _no_aliases() -> dict[str, str]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Held:
    """What this rank holds of an object. tensors: by ``section/name``. aliases: further names of those. about: the rest."""

    about: Json
    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str] = field(default_factory=_no_aliases)


class Source(Protocol):
    """A checkpoint that was verified and can be read."""

    @property
    def manifest(self) -> Manifest:
        """What is in it."""
        ...

    @property
    def rank(self) -> int:
        """Who reads."""
        ...

    @property
    def world_size(self) -> int:
        """How many read."""
        ...

    def read(self, name: str, like: Tensor) -> Tensor:
        """This rank's part of a stored tensor, laid out as ``like`` is: on its device, or a DTensor on its mesh."""
        ...

    def whole(self, name: str) -> Tensor:
        """All of a stored tensor, on the CPU."""
        ...


class Part(Protocol):
    """One object of the user's. section: where it is stored. kind: see `Section`."""

    kind: ClassVar[str]

    @property
    def section(self) -> str:
        """Its name in the manifest."""
        ...

    def hold(self) -> Held:
        """What this rank holds. Raises UsageError for what cannot be stored."""
        ...

    def check(self, manifest: Manifest) -> list[str]:
        """The names this rank needs. Raises UsageError, naming it, for what does not fit. Changes nothing."""
        ...

    def offered(self, manifest: Manifest) -> set[str]:
        """The names that some rank has to need."""
        ...

    def give(self, source: Source) -> None:
        """Put the stored values into the object, in place."""
        ...


def few(names: list[str], limit: int = 5) -> str:
    """``a, b and 3 more``."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def require_section(manifest: Manifest, section: str, kind: str) -> None:
    """Raise UsageError if the checkpoint has no such section, or another kind of thing is stored there."""
    found = manifest.sections.get(section)
    if found is None:
        raise UsageError(
            f"the checkpoint has no {section}; it has {', '.join(sorted(manifest.sections))}: leave it out"
        )
    if found.kind != kind:
        raise UsageError(f"{section} was saved as a {found.kind}, and is a {kind} here; give what was saved")
