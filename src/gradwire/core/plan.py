"""`Plan`: everything that was decided about a run, in one frozen value that is printed, compared and saved."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from gradwire.core.arguments import cure_for
from gradwire.core.mesh import AXES, Mesh
from gradwire.core.pipeline import Pipeline
from gradwire.core.spelling import parse
from gradwire.errors import PlanError

if TYPE_CHECKING:  # the launcher checks plans too, and must start without torch
    from gradwire.core.policy import SyncPolicy
    from gradwire.core.reducer import Reducer

Sync: TypeAlias = "str | Reducer | SyncPolicy"
BatchNormRule = Literal["local", "sync"]
NonFiniteRule = Literal["skip", "stop"]

ShardedParts = Literal["optimizer", "gradients", "parameters"]
TensorRule = Literal["column", "row", "vocabulary", "sequence", "replicate"]

BATCH_NORM_RULES = ("local", "sync")
NONFINITE_RULES = ("skip", "stop")
SHARDED_PARTS = ("optimizer", "gradients", "parameters")
TENSOR_RULES = ("column", "row", "vocabulary", "sequence", "replicate")
TOML_KEYS = (
    "mesh", "sync", "accumulate", "bucket_bytes", "batch_norm", "on_nonfinite", "sharding", "pipeline", "tensor_rules"
)  # fmt: skip


def _no_mesh() -> Mapping[str, int]:
    return {}


def _no_rules() -> Mapping[str, TensorRule]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one script runs on many ranks.

    mesh: axis name -> size, e.g. ``{"data": 2, "pipeline": 2}``; axes: ``pipeline``, ``data``, ``shard``, ``tensor``; empty:
    all ranks along ``data``.
    sync: how and when the ranks agree: a text such as ``"q4"`` or ``"local:every=16,codec=q4"``, a reducer, or a policy.
    accumulate: micro-batches each global batch is cut into (less memory, the same answer).
    bucket_bytes: size of a gradient bucket; None: from the measured latency and backward time.
    batch_norm: ``"local"`` normalises each rank's part by itself and averages the running statistics;
    ``"sync"`` normalises over all ranks, as one machine would.
    on_nonfinite: what all ranks do when any rank's gradient is NaN or infinite: ``"skip"`` the step or ``"stop"``.
    sharding: what the ranks along ``shard`` hold a part of instead of a copy: the ``"optimizer"``'s state, also the
    ``"gradients"``, or also the ``"parameters"``.
    pipeline: how the ranks along ``pipeline`` share the model's blocks.
    tensor_rules: for layers that the ranks along ``tensor`` do not share by themselves: name pattern -> ``"column"``, ``"row"``,
    ``"vocabulary"``, ``"sequence"`` or ``"replicate"``, e.g. ``{"blocks.*.up": "column"}``.

    >>> Plan(accumulate=4).words()
    'mesh data=all; sync exact; accumulate 4; batch_norm local; on_nonfinite skip'
    """

    mesh: Mapping[str, int] = field(default_factory=_no_mesh)
    sync: Sync = "exact"
    accumulate: int = 1
    bucket_bytes: int | None = None
    batch_norm: BatchNormRule = "local"
    on_nonfinite: NonFiniteRule = "skip"
    sharding: ShardedParts = "parameters"
    pipeline: Pipeline = field(default_factory=Pipeline)
    tensor_rules: Mapping[str, TensorRule] = field(default_factory=_no_rules)

    def __post_init__(self) -> None:
        if isinstance(self.sync, str):  # ranks compare texts
            object.__setattr__(self, "sync", "".join(self.sync.split()))
        object.__setattr__(self, "pipeline", Pipeline.of(self.pipeline))
        if problems := [*_mesh_problems(self.mesh), *_setting_problems(self), *_rule_problems(self.tensor_rules)]:
            raise PlanError("; ".join(problems))

    def check(self, world_size: int) -> None:
        """Raise ``PlanError`` listing every setting that cannot run on ``world_size`` ranks, with its cure.

        >>> Plan(mesh={"data": 3}).check(4)
        Traceback (most recent call last):
        gradwire.errors.PlanError: mesh data=3 needs 3 ranks, the launcher started 4; use data=4 or start 3
        """
        mesh = Mesh.of(self.mesh, world_size)
        if problems := [
            *self.pipeline.misfits(mesh.length(["pipeline"])),
            *self._without_axis(mesh),
            *self._with_shards(mesh),
        ]:
            raise PlanError("; ".join(problems))

    def _without_axis(self, mesh: Mesh) -> list[str]:
        """Settings of an axis that the mesh does not have."""
        problems: list[str] = []
        if self.tensor_rules and mesh.length(["tensor"]) == 1:
            problems.append(
                "tensor_rules are given, but the mesh has no tensor axis; use mesh tensor=2 or leave them out"
            )
        if self.sharding != "parameters" and mesh.length(["shard"]) == 1:
            problems.append(
                f"sharding={self.sharding}, but the mesh has no shard axis; use mesh shard=2 or leave it out"
            )
        return problems

    def _with_shards(self, mesh: Mesh) -> list[str]:
        """What ranks that own parts cannot do."""
        problems: list[str] = []
        if mesh.length(["shard"]) == 1:
            return problems
        if _puts_off(self.sync):
            problems.append(
                f"sync={self.sync} puts exchanges off, but ranks along shard need each other's gradients at every step; use a "
                "sync that agrees every step (exact, bf16, q8, q4, ...), or mesh data in place of shard"
            )
        if mesh.length(["pipeline"]) > 1 and self.sharding != "optimizer":
            problems.append(
                f"sharding={self.sharding} in a pipeline would gather every stage's parameters for every micro-batch; use "
                'sharding="optimizer", which a pipeline can have'
            )
        return problems

    def words(self) -> str:
        """One line for people; equal plans say equal words."""
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "data=all"
        parts = [f"mesh {mesh}", f"sync {self.sync}"]
        parts += [f"accumulate {self.accumulate}", f"batch_norm {self.batch_norm}", f"on_nonfinite {self.on_nonfinite}"]
        parts += [f"buckets of {self.bucket_bytes} bytes"] if self.bucket_bytes else []
        parts += [f"sharding {self.sharding}"] if self.mesh.get("shard", 1) > 1 else []
        parts += [f"pipeline {self.pipeline.words()}"] if self.mesh.get("pipeline", 1) > 1 else []
        parts += (
            [f"tensor rules {', '.join(f'{k}={v}' for k, v in self.tensor_rules.items())}"] if self.tensor_rules else []
        )
        return "; ".join(parts)

    def to_toml(self) -> str:
        """The plan as TOML; ``Plan.from_toml(plan.to_toml()) == plan``."""
        if not isinstance(self.sync, str):
            raise PlanError(f"sync={self.sync!r} cannot be written to TOML; spell it as a text, or pass it as plan=")
        lines = [f'sync = "{self.sync}"', f"accumulate = {self.accumulate}"]
        lines += [f"bucket_bytes = {self.bucket_bytes}"] if self.bucket_bytes else []
        lines += [f'batch_norm = "{self.batch_norm}"', f'on_nonfinite = "{self.on_nonfinite}"']
        lines += [f'sharding = "{self.sharding}"'] if self.sharding != "parameters" else []
        for name, table in (
            ("mesh", self.mesh),
            ("pipeline", self.pipeline.given()),
            ("tensor_rules", self.tensor_rules),
        ):
            lines += ["", f"[{name}]", *(f"{toml_key(k)} = {json.dumps(v)}" for k, v in table.items())] if table else []
        return "\n".join(lines) + "\n"

    @classmethod
    def from_toml(cls, text: str, *, where: str = "the plan") -> Plan:
        """Read a plan file.

        where: the file's name, for errors. Raises PlanError naming the key and the allowed ones.

        >>> Plan.from_toml("accumulate = 2").accumulate
        2
        """
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise PlanError(f"{where} is not valid TOML: {error}") from error
        unknown = [key for key in table if key not in TOML_KEYS]
        if unknown:
            raise PlanError(f"{where} has unknown key {unknown[0]!r}; allowed: {', '.join(TOML_KEYS)}")
        try:
            return replace(cls(), **table)
        except PlanError as error:
            raise PlanError(f"{where}: {error}") from None


def toml_key(key: str) -> str:
    """``key`` as a TOML key, quoted if it must be."""
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def _mesh_problems(mesh: object) -> list[str]:
    if not isinstance(mesh, Mapping):
        return [f"mesh={mesh!r} must map axis names to sizes, e.g. {{'data': 4}}"]
    problems: list[str] = []
    for axis, size in cast("Mapping[object, object]", mesh).items():
        if axis not in AXES:
            problems.append(f"unknown mesh axis {axis!r}; allowed: {', '.join(AXES)}")
        elif not isinstance(size, int) or isinstance(size, bool) or size < 1:
            problems.append(f"mesh {axis}={size!r} must be a whole number of ranks, at least 1")
    return problems


def _puts_off(sync: Sync) -> bool:
    """Whether a step may pass without an exchange, or use an earlier one's gradients."""
    if isinstance(sync, str):
        return parse(sync).name in ("local", "delayed")
    return bool(getattr(sync, "delay", 0)) or getattr(sync, "outer", None) is not None


def _rule_problems(rules: object) -> list[str]:
    if not isinstance(rules, Mapping):
        return [f"tensor_rules={rules!r} must map name patterns to rules, e.g. {{'blocks.*.up': 'column'}}"]
    return [
        f"tensor_rules: {pattern!r} = {rule!r}; allowed: {', '.join(TENSOR_RULES)}"
        for pattern, rule in cast("Mapping[object, object]", rules).items()
        if rule not in TENSOR_RULES or not isinstance(pattern, str)
    ]


def _sync_problems(sync: object) -> list[str]:
    if isinstance(sync, str):
        try:
            parse(sync)
        except PlanError as error:
            return [str(error)]
        return []
    if not isinstance(sync, type) and (hasattr(sync, "at_backward") or hasattr(sync, "reduce")):
        return []
    wanted = "it must be a text such as 'q4' or 'local:every=8,codec=q4', a reducer or a policy"
    cure = cure_for(sync) if isinstance(sync, type) or hasattr(sync, "encode") else wanted
    return [f"sync={sync!r} says neither when nor how to agree; {cure}"]


def _setting_problems(plan: Plan) -> list[str]:
    problems: list[str] = []
    problems += _sync_problems(plan.sync)
    for name, value in (("accumulate", plan.accumulate), ("bucket_bytes", plan.bucket_bytes)):
        given: object = value
        if given is None and name == "bucket_bytes":
            continue
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            problems.append(f"{name}={given!r} must be a whole number, at least 1")
    for name, value, allowed in (
        ("batch_norm", plan.batch_norm, BATCH_NORM_RULES),
        ("on_nonfinite", plan.on_nonfinite, NONFINITE_RULES),
        ("sharding", plan.sharding, SHARDED_PARTS),
    ):
        if value not in allowed:
            problems.append(f"{name}={value!r}; allowed: {', '.join(allowed)}")
    return problems
