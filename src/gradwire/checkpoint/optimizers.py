"""An optimizer's state under the parameters' names, so that it fits whatever part of them a rank steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.checkpoint.manifest import Manifest
from gradwire.checkpoint.parts import Held, Source, few, require_section
from gradwire.checkpoint.trees import Json, from_json, to_json
from gradwire.core.names import plain_name
from gradwire.errors import MismatchError, UsageError

_NOT_SETTINGS = ("params", "param_names")


class Settings(TypedDict):
    """A parameter group: what it is set to, and the names of its parameters."""

    settings: dict[str, Json]
    names: list[str]


class About(TypedDict):
    """An optimizer beside its tensors. state: by parameter. rest: what else its ``state_dict`` holds."""

    kind: str
    groups: list[Settings]
    state: dict[str, Json]
    rest: Json


def names_of(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """id of each parameter -> its name; those of the module called ``""`` without a prefix. A tied one has its first name."""
    found: dict[int, str] = {}
    for prefix, module in modules.items():
        for name, param in module.named_parameters():
            found.setdefault(id(param), plain_name(f"{prefix}.{name}" if prefix else name))
    return found


def merge_optimizers(abouts: Sequence[Json]) -> Json:
    """What the optimizers of all ranks say, together: every parameter once, in one group, with one state.

    Raises MismatchError naming the parameter if ranks step it with different settings.
    """
    parts = [cast("About", about) for about in abouts]
    merged = About(kind=parts[0]["kind"], groups=[], state={}, rest=parts[0]["rest"])
    groups: dict[tuple[int, str], Settings] = {}
    where: dict[str, tuple[int, str]] = {}
    for rank, part in enumerate(parts):
        if (part["kind"], part["rest"]) != (merged["kind"], merged["rest"]):
            raise MismatchError(
                f"rank 0's optimizer is a {merged['kind']}, rank {rank}'s another one; use the same on all"
            )
        for number, group in enumerate(part["groups"]):
            key = (number, json.dumps(group["settings"], sort_keys=True))
            into = groups.setdefault(key, Settings(settings=group["settings"], names=[]))
            for name in group["names"]:
                if where.setdefault(name, key) != key:
                    other = groups[where[name]]["settings"]
                    raise MismatchError(f"rank {rank} steps {name} {_difference(group['settings'], other)}")
            into["names"] += [name for name in group["names"] if name not in set(into["names"])]
        for name, state in part["state"].items():
            if merged["state"].setdefault(name, state) != state:
                raise MismatchError(
                    f"the optimizer's numbers for {name} differ between rank {rank} and another one; step them alike"
                )
    merged["groups"] = [group for _, group in sorted(groups.items(), key=lambda item: item[0][0])]
    return cast("Json", merged)


def _difference(mine: Mapping[str, Json], other: Mapping[str, Json]) -> str:
    for key in sorted({*mine, *other}):
        if mine.get(key) != other.get(key):
            return f"with {key}={mine.get(key)}, another rank with {other.get(key)}; give all ranks the same settings"
    return "in another group than another rank does; make the same groups on all ranks"


@dataclass(frozen=True)
class OptimizerPart:
    """An optimizer. names: id of a parameter -> its name (`names_of`); a group's own ``param_names`` do for others."""

    section: str
    optimizer: Optimizer
    names: Mapping[int, str]
    kind: ClassVar[str] = "optimizer"

    def hold(self) -> Held:
        tensors: dict[str, Tensor] = {}
        packed = cast("dict[str, object]", self.optimizer.state_dict())
        named = self._named()
        order = [name for names in named for name in names]
        state: dict[str, Json] = {}
        loose: dict[object, object] = {}
        for index, values in cast("dict[object, object]", packed.pop("state")).items():
            if isinstance(index, int) and not isinstance(index, bool):
                state[order[index]] = to_json(values, f"{self.section}/{order[index]}", tensors)
            else:  # an optimizer may keep things under names of its own
                loose[index] = values
        settings = cast("list[dict[str, object]]", packed.pop("param_groups"))
        groups = [
            Settings(settings=self._settings(group, number, tensors), names=names)
            for number, (group, names) in enumerate(zip(settings, named, strict=True))
        ]
        rest = to_json({"loose": loose, "more": packed}, f"{self.section}/rest", tensors)
        about = About(kind=type(self.optimizer).__name__, groups=groups, state=state, rest=rest)
        return Held(about=cast("Json", about), tensors=tensors)

    def _settings(self, group: Mapping[str, object], number: int, tensors: dict[str, Tensor]) -> dict[str, Json]:
        plain = {key: value for key, value in group.items() if key not in _NOT_SETTINGS}
        return cast("dict[str, Json]", to_json(plain, f"{self.section}/group {number}", tensors))

    def _named(self) -> list[list[str]]:
        """The names of each group's parameters."""
        named: list[list[str]] = []
        for number, group in enumerate(self._groups()):
            params = cast("list[Tensor]", group["params"])
            own = cast("list[str]", group.get("param_names", [""] * len(params)))
            names = [self.names.get(id(param), plain_name(name)) for param, name in zip(params, own, strict=True)]
            if "" in names:
                raise UsageError(
                    f"{type(self.optimizer).__name__} (param group {number}) steps a parameter of shape "
                    f"{tuple(params[names.index('')].shape)} that has no name; give the model that holds it too"
                )
            named.append(names)
        return named

    def _groups(self) -> list[dict[str, object]]:
        return self.optimizer.param_groups

    def check(self, manifest: Manifest) -> list[str]:
        require_section(manifest, self.section, self.kind)
        about = self._about(manifest)
        if about["kind"] != type(self.optimizer).__name__:
            raise UsageError(
                f"{self.section} was saved as {about['kind']}, and is {type(self.optimizer).__name__} here; make that one"
            )
        named, used = self._named(), dict[int, int]()
        group_of = {name: number for number, group in enumerate(about["groups"]) for name in group["names"]}
        for number, names in enumerate(named):
            if missing := [name for name in names if name not in group_of]:
                raise UsageError(
                    f"{self.section} of the checkpoint does not step {few(missing)}, this one does; give it the same parameters"
                )
            for name in names:
                if used.setdefault(group_of[name], number) != number or group_of[name] != group_of[names[0]]:
                    raise UsageError(
                        f"{self.section} had {name} in param group {group_of[name]}, together with others than in group "
                        f"{number} here; make the groups that were saved"
                    )
        return [name for names in named for name in names]

    def offered(self, manifest: Manifest) -> set[str]:
        return {name for group in self._about(manifest)["groups"] for name in group["names"]}

    def _about(self, manifest: Manifest) -> About:
        return cast("About", manifest.sections[self.section].about)

    def give(self, source: Source) -> None:
        about, named = self._about(source.manifest), self._named()
        settings = {name: group["settings"] for group in about["groups"] for name in group["names"]}
        state: dict[object, object] = {}
        groups: list[dict[str, object]] = []
        stored: list[tuple[Tensor, Mapping[object, object]]] = []
        index = 0
        for group, names in zip(self._groups(), named, strict=True):
            own = {key: value for key, value in group.items() if key not in _NOT_SETTINGS}
            saved = from_json(settings[names[0]], source.whole) if names else own
            groups.append({**cast("dict[str, object]", saved), "params": list(range(index, index + len(names)))})
            for name, param in zip(names, cast("list[Tensor]", group["params"]), strict=True):
                if name in about["state"]:
                    state[index] = self._state(name, param, about["state"][name], source)
                    stored.append((param, cast("Mapping[object, object]", state[index])))
                index += 1
        rest = cast("dict[str, dict[object, object]]", from_json(about["rest"], source.whole))
        packed = {**rest["more"], "state": {**state, **rest["loose"]}, "param_groups": groups}
        self.optimizer.load_state_dict(cast("dict[str, Any]", packed))
        for param, values in stored:
            self._keep_dtypes(param, values)

    def _state(self, name: str, param: Tensor, tree: Json, source: Source) -> object:
        """A parameter's state, each tensor of it laid out as the present one, or else as the parameter, if the shapes agree."""
        present = cast("Mapping[str, object]", self.optimizer.state.get(param, {}))

        def fetch(stored: str) -> Tensor:
            shape = source.manifest.stored(stored).shape
            now = present.get(stored.removeprefix(f"{self.section}/{name}."))
            for like in (now, param):
                if isinstance(like, Tensor) and tuple(like.shape) == shape:
                    return source.read(stored, like)
            return source.whole(stored)

        return from_json(tree, fetch)

    def _keep_dtypes(self, param: Tensor, values: Mapping[object, object]) -> None:
        """torch's ``load_state_dict`` gives moments their parameter's dtype; what was saved as float32 stays so."""
        for key, value in values.items():
            now = self.optimizer.state[param].get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                self.optimizer.state[param][key] = value.to(now.device)
