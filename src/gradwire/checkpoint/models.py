"""A module's weights and buffers, under the user's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import Tensor, nn

from gradwire.checkpoint.files import require_storable, spelled
from gradwire.checkpoint.layout import memory_of
from gradwire.checkpoint.manifest import Manifest
from gradwire.checkpoint.parts import Held, Source, few, require_section
from gradwire.checkpoint.trees import Json, from_json, to_json
from gradwire.core.names import plain_name
from gradwire.errors import MismatchError, UsageError


def merge_models(abouts: Sequence[Json]) -> Json:
    """What modules keep beside tensors (``get_extra_state``), of all ranks together."""
    merged: dict[str, Json] = {}
    for rank, about in enumerate(abouts):
        for name, tree in cast("dict[str, Json]", about).items():
            if merged.setdefault(name, tree) != tree:
                raise MismatchError(
                    f"{name} of rank {rank} differs from another rank's; make them the same before saving"
                )
    return merged


@dataclass(frozen=True)
class ModelPart:
    """A module. Names that share a tensor (tied weights) are stored once."""

    section: str
    module: nn.Module
    kind: ClassVar[str] = "model"

    def hold(self) -> Held:
        tensors: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        about: dict[str, Json] = {}
        first: dict[tuple[object, ...], str] = {}
        for key, value in self._state().items():
            name = self._name(key)
            if not isinstance(value, Tensor):
                about[plain_name(key)] = to_json(value, f"{self.section}.extra/{plain_name(key)}", tensors)
                continue
            require_storable(name, value)
            original = first.setdefault(memory_of(value), name) if value.numel() else name
            if original == name:
                tensors[name] = value
            else:
                aliases[name] = original
        return Held(about=about, tensors=tensors, aliases=aliases)

    def check(self, manifest: Manifest) -> list[str]:
        require_section(manifest, self.section, self.kind)
        wanted, offered = self._state(), self.offered(manifest)
        problems: list[str] = []
        tensors = manifest.names(self.section)
        missing = [
            plain_name(key)
            for key, value in wanted.items()
            if plain_name(key) not in (tensors if isinstance(value, Tensor) else offered)
        ]
        if missing:
            problems.append(f"the checkpoint has no {few(missing)}; give the model that was saved")
        for key, value in wanted.items():
            if isinstance(value, Tensor) and plain_name(key) not in missing:
                stored = manifest.stored(self._name(key))
                if tuple(value.shape) != stored.shape:
                    problems.append(
                        f"{plain_name(key)} is {stored.shape} in the checkpoint and {tuple(value.shape)} in the model; "
                        "make the model with the sizes it was saved with"
                    )
                elif spelled(value.dtype) != stored.dtype:
                    problems.append(
                        f"{plain_name(key)} is {stored.dtype} in the checkpoint and {spelled(value.dtype)} in the model; "
                        f"load into a model of {stored.dtype} and convert it afterwards"
                    )
        if problems:
            raise UsageError("; ".join([few(problems, 3), *self._unexpected(manifest)]))
        return [plain_name(key) for key in wanted]

    def _unexpected(self, manifest: Manifest) -> list[str]:
        left = sorted(self.offered(manifest) - {plain_name(key) for key in self._state()})
        return [f"the checkpoint also has {few(left)}"] if left else []

    def offered(self, manifest: Manifest) -> set[str]:
        about = cast("dict[str, Json]", manifest.sections[self.section].about)
        return manifest.names(self.section) | about.keys()

    def give(self, source: Source) -> None:
        about = cast("dict[str, Json]", source.manifest.sections[self.section].about)
        values: dict[str, object] = {}
        for key, value in self._state().items():
            if isinstance(value, Tensor):
                values[key] = source.read(self._name(key), value)
            else:
                values[key] = from_json(about[plain_name(key)], source.whole)
        self.module.load_state_dict(values)

    def _state(self) -> dict[str, object]:
        return self.module.state_dict()

    def _name(self, key: str) -> str:
        return f"{self.section}/{plain_name(key)}"
