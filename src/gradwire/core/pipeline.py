"""`Pipeline`: how the stages of a model share their work; settings of a `Plan`, checked without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, cast

from gradwire.errors import PlanError

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Activations = Literal["exact", "bf16", "q8", "q4"]
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
ACTIVATIONS = ("exact", "bf16", "q8", "q4")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How a model is cut into stages and in which order they work.

    schedule: ``gpipe`` (all forwards, then all backwards), ``1f1b`` (a backward as soon as one can), ``interleaved`` (1f1b with
    several stages on each rank: a smaller bubble, more messages), ``zero-bubble`` (1f1b, with the weights' gradients put off
    into the gaps).
    microbatches: parts of each rank's batch; None: twice the number of stages. stages_per_rank: above 1 for ``interleaved`` only.
    cuts: names of the blocks that begin stages 1, 2, ...; empty: cut where the measured times balance.
    speeds: how fast the ranks along ``pipeline`` are, relative to each other; empty: alike; ``"measured"``: by a short probe
    when training starts. memory_bytes: what each of them
    has for its part; empty: no limit. activations: what travels between stages: ``exact``, ``bf16``, ``q8``, ``q4``.

    >>> Pipeline(schedule="gpipe", microbatches=8).words()
    'schedule gpipe, 8 micro-batches'
    """

    schedule: Schedule = "1f1b"
    microbatches: int | None = None
    stages_per_rank: int = 1
    cuts: tuple[str, ...] = ()
    speeds: tuple[float, ...] | Literal["measured"] = ()
    memory_bytes: tuple[int, ...] = ()
    activations: Activations = "exact"

    def __post_init__(self) -> None:
        for name in ("cuts", "speeds", "memory_bytes"):
            value: object = getattr(self, name)
            if isinstance(value, list):  # as TOML reads them
                object.__setattr__(self, name, tuple(cast("list[object]", value)))
        if problems := _problems(self):
            raise PlanError("; ".join(problems))

    @classmethod
    def of(cls, table: object) -> Pipeline:
        """From a table of the plan file, or one made already."""
        if isinstance(table, Pipeline):
            return table
        if not isinstance(table, Mapping):
            raise PlanError(f"pipeline={table!r} must be a gw.Pipeline, or in a file a table [pipeline]")
        given = cast("Mapping[str, object]", table)
        allowed = [field.name for field in fields(cls)]
        if unknown := [key for key in given if key not in allowed]:
            raise PlanError(f"pipeline has unknown key {unknown[0]!r}; allowed: {', '.join(allowed)}")
        return cls(**given)  # pyright: ignore[reportArgumentType]  # checked in __post_init__

    def given(self) -> dict[str, object]:
        """The settings that are not the default's."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def words(self) -> str:
        """For people."""
        parts = [f"schedule {self.schedule}"]
        parts += [f"{self.microbatches} micro-batches"] if self.microbatches else []
        parts += [f"{self.stages_per_rank} stages a rank"] if self.stages_per_rank > 1 else []
        parts += [f"cuts at {', '.join(self.cuts)}"] if self.cuts else []
        speeds = "measured" if self.speeds == "measured" else ":".join(f"{speed:g}" for speed in self.speeds)
        parts += [f"speeds {speeds}"] if speeds else []
        parts += [f"memory {', '.join(map(str, self.memory_bytes))} bytes"] if self.memory_bytes else []
        parts += [f"activations {self.activations}"] if self.activations != "exact" else []
        return ", ".join(parts)

    def misfits(self, num_ranks: int) -> list[str]:
        """What does not fit ``num_ranks`` ranks along ``pipeline``, with the cure."""
        problems: list[str] = []
        num_stages = num_ranks * self.stages_per_rank
        if self.cuts and len(self.cuts) != num_stages - 1:
            problems.append(
                f"pipeline.cuts names {len(self.cuts)} blocks; {num_stages} stages have {num_stages - 1} cuts"
            )
        for name, values in (("speeds", self.speeds), ("memory_bytes", self.memory_bytes)):
            if values and values != "measured" and len(values) != num_ranks:
                problems.append(f"pipeline.{name} has {len(values)} values; give one for each of the {num_ranks} ranks")
        if num_ranks == 1 and self.given():
            problems.append(
                "pipeline has settings, but the mesh no pipeline axis; use mesh pipeline=2 or leave them out"
            )
        return problems


def _problems(pipeline: Pipeline) -> list[str]:
    problems: list[str] = []
    if pipeline.schedule not in SCHEDULES:
        problems.append(f"pipeline.schedule={pipeline.schedule!r}; allowed: {', '.join(SCHEDULES)}")
    for name, value in (("microbatches", pipeline.microbatches), ("stages_per_rank", pipeline.stages_per_rank)):
        if not (name == "microbatches" and value is None) and not _whole(value):
            problems.append(f"pipeline.{name}={value!r} must be a whole number, at least 1")
    if _whole(pipeline.stages_per_rank) and (pipeline.schedule == "interleaved") is (pipeline.stages_per_rank == 1):
        problems.append(
            f"pipeline.schedule={pipeline.schedule} with stages_per_rank={pipeline.stages_per_rank}: interleaved has several "
            'stages a rank, the others one; use schedule="interleaved" with stages_per_rank=2, or 1 stage'
        )
    problems += _list_problems(pipeline)
    if pipeline.activations not in ACTIVATIONS:
        problems.append(f"pipeline.activations={pipeline.activations!r}; allowed: {', '.join(ACTIVATIONS)}")
    return problems


def _list_problems(pipeline: Pipeline) -> list[str]:
    problems: list[str] = []
    if not isinstance(pipeline.cuts, tuple) or not all(isinstance(name, str) for name in pipeline.cuts):
        problems.append(f"pipeline.cuts={pipeline.cuts!r} must be a list of block names, e.g. ['blocks.4']")
    elif len(set(pipeline.cuts)) != len(pipeline.cuts):
        problems.append(f"pipeline.cuts={list(pipeline.cuts)} names a block twice")
    for name, values in (("speeds", pipeline.speeds), ("memory_bytes", pipeline.memory_bytes)):
        if name == "speeds" and values == "measured":
            continue
        if not isinstance(values, tuple) or not all(_positive(value) for value in values):
            other = ', or "measured"' if name == "speeds" else ""
            problems.append(f"pipeline.{name}={values!r} must be a list of numbers above 0, one for each rank{other}")
    return problems


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
