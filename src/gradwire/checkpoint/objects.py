"""Everything else: objects with ``state_dict``, plain values, and what every rank has of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from gradwire.checkpoint import chance
from gradwire.checkpoint.manifest import Manifest
from gradwire.checkpoint.parts import Held, Source, require_section
from gradwire.checkpoint.trees import from_json, to_json
from gradwire.errors import UsageError


@runtime_checkable
class Stateful(Protocol):
    """A loader, a scheduler, a scaler, a meter."""

    def state_dict(self) -> Mapping[str, object]:
        """Plain values and tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, object], /) -> object:
        """Go on from there."""
        ...


@runtime_checkable
class StatefulByRank(Protocol):
    """What ``gw.distribute`` returns: every rank has a state of its own."""

    def state_dict(self) -> Mapping[str, object]:
        """This rank's."""
        ...

    def load_state_dict(self, *states: Mapping[str, object]) -> object:
        """This rank's own, or those of all ranks of another world."""
        ...


def _held(value: object, name: str) -> Held:
    tensors: dict[str, Tensor] = {}
    return Held(about=to_json(value, name, tensors), tensors=tensors)


@dataclass(frozen=True)
class StatePart:
    """An object with ``state_dict`` and ``load_state_dict``, usually with the same state on all ranks."""

    section: str
    object: Stateful
    world_size: int
    kind: ClassVar[str] = "state"

    def hold(self) -> Held:
        return _held(self.object.state_dict(), f"{self.section}/state")

    def check(self, manifest: Manifest) -> list[str]:
        require_section(manifest, self.section, self.kind)
        if manifest.sections[self.section].ranks is not None and self.world_size != manifest.world_size:
            raise UsageError(
                f"{self.section} differed between the {manifest.world_size} ranks that saved it; go on with as many, or leave "
                "it out"
            )
        return []

    def offered(self, manifest: Manifest) -> set[str]:
        return set()

    def give(self, source: Source) -> None:
        section = source.manifest.sections[self.section]
        about = section.about if section.ranks is None else section.ranks[source.rank]
        self.object.load_state_dict(_mapping(from_json(about, source.whole)))


@dataclass(frozen=True)
class ValuePart:
    """A plain value, the same on all ranks. It is returned, not put into anything."""

    section: str
    value: object
    kind: ClassVar[str] = "value"

    def hold(self) -> Held:
        return _held(self.value, f"{self.section}/value")

    def check(self, manifest: Manifest) -> list[str]:
        return []

    def offered(self, manifest: Manifest) -> set[str]:
        return set()

    def give(self, source: Source) -> None:
        """Nothing takes it."""


@dataclass(frozen=True)
class TrainingPart:
    """What ``gw.distribute`` returned: a state per rank, shared out when the world has another size."""

    section: str
    training: StatefulByRank
    rank: int
    kind: ClassVar[str] = "rank"

    def hold(self) -> Held:
        return _held(self.training.state_dict(), f"{self.section}/{self.rank}")

    def check(self, manifest: Manifest) -> list[str]:
        require_section(manifest, self.section, self.kind)
        return []

    def offered(self, manifest: Manifest) -> set[str]:
        return set()

    def give(self, source: Source) -> None:
        abouts = source.manifest.sections[self.section].ranks or ()
        mine = abouts[self.rank : self.rank + 1] if source.world_size == len(abouts) else abouts
        self.training.load_state_dict(*(_mapping(from_json(about, source.whole)) for about in mine))


@dataclass(frozen=True)
class ChancePart:
    """The random generators of each rank; given back to a world of the same size."""

    section: str
    rank: int
    kind: ClassVar[str] = "rank"

    def hold(self) -> Held:
        return _held(chance.note(), f"{self.section}/{self.rank}")

    def check(self, manifest: Manifest) -> list[str]:
        return []

    def offered(self, manifest: Manifest) -> set[str]:
        return set()

    def give(self, source: Source) -> None:
        section = source.manifest.sections.get(self.section)
        if section is not None and section.ranks is not None and len(section.ranks) == source.world_size:
            chance.set_back(_mapping(from_json(section.ranks[self.rank], source.whole)))


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise UsageError(f"a state_dict() was saved that is a {type(value).__name__}; return a dict of plain values")
    return value


def require_stateful(name: str, value: object) -> Stateful:
    """``value``, if a checkpoint can go into it."""
    if not isinstance(value, Stateful):
        raise UsageError(
            f"{name} must have state_dict and load_state_dict, and is a {type(value).__name__}; plain values are returned: "
            "leave it out and read it from the result"
        )
    return value
