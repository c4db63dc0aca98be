"""The table: every plan is a row, and every row must give the weights that one process gives.

A later plan (sharded, server, pipeline, ...) is one more row here, at the world sizes that it allows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import gradwire as gw


@dataclass(frozen=True)
class Row:
    """name: for people. plan: without the BatchNorm rule, which the model's case says. splits: of the data."""

    name: str
    plan: gw.Plan = field(default_factory=gw.Plan)
    world_sizes: tuple[int, ...] = (1, 2, 3, 4)
    unequal: bool = False


ROWS = (
    Row("data parallel"),
    Row("data parallel, tiny buckets", gw.Plan(bucket_bytes=64)),
    Row("data parallel, unequal parts", unequal=True),
    Row("accumulate 2", gw.Plan(accumulate=2)),
    Row("accumulate 5", gw.Plan(accumulate=5, bucket_bytes=256)),
)
