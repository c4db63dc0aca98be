"""`gradwire split`: where the cuts of a model fall and why, before a process is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch import nn

from gradwire.core.balance import Unit, stage_bytes
from gradwire.core.pipeline import Pipeline
from gradwire.core.schedule import grid, live_microbatches, simulate
from gradwire.errors import PlanError, UsageError
from gradwire.parallel.batch import num_samples
from gradwire.parallel.pipeline import Cuts, order_of, predict
from gradwire.parallel.profile import measure
from gradwire.parallel.split import blocks_of, choose_cuts, example_part

_MOST_GRID_MICROBATCHES = 8


def split_report(build: Callable[[], object], num_ranks: int, pipeline: Pipeline | None = None) -> str:
    """Measure ``build()``'s model here and say how ``num_ranks`` workers would share it.

    build: gives a model and an example input: ``return model, x``. pipeline: the settings; None: the defaults.
    Returns a table of the stages (blocks, seconds, memory, bytes sent on, each for one micro-batch), why the cuts fall there,
    and the schedule as a grid with its predicted bubble. Raises what `split` would.

    >>> import torch
    >>> report = split_report(lambda: (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.ones(8, 4)), 2)
    >>> "stage 1  rank 1  1" in report
    True
    """
    pipeline = pipeline or Pipeline()
    if problems := pipeline.misfits(num_ranks):
        raise PlanError("; ".join(problems))
    model, x = _built(build)
    num_stages = num_ranks * pipeline.stages_per_rank
    blocks = blocks_of(model, num_stages)
    part = example_part(x, pipeline, num_stages)
    cuts = choose_cuts(blocks, measure(model, blocks, part), pipeline, num_ranks)
    num_microbatches = pipeline.microbatches or 2 * num_stages
    head = f"{len(cuts.units)} blocks in {num_stages} stages; a micro-batch is {num_samples(part)} of {num_samples(x)} samples"
    return "\n".join(
        [
            head,
            "",
            *_table(cuts, pipeline, num_ranks, num_microbatches),
            "",
            _why(cuts, pipeline, num_ranks),
            "",
            *_picture(cuts, pipeline, num_microbatches),
        ]
    )


def _built(build: Callable[[], object]) -> tuple[nn.Module, object]:
    made = build()
    pair = cast("Sequence[object]", made) if isinstance(made, tuple | list) else ()
    if len(pair) != 2 or not isinstance(pair[0], nn.Module):
        raise UsageError(
            f"gradwire split: {getattr(build, '__name__', 'build')}() gave {type(made).__name__}; it must give the model and an "
            "example input, a batch as one rank has it: return model, x"
        )
    return pair[0], pair[1]


def _table(cuts: Cuts, pipeline: Pipeline, num_ranks: int, num_microbatches: int) -> list[str]:
    order = order_of(pipeline, num_ranks, num_microbatches)
    rows = [("", "", "blocks", "forward ms", "backward ms", "parameters", "memory", "sends on")]
    for stage, units in enumerate(cuts.stages):
        rank = stage % num_ranks
        live = live_microbatches([action for action in order[rank] if action.stage == stage])
        last = stage + 1 == len(cuts.stages)
        speed = float(pipeline.speeds[rank]) if pipeline.speeds and pipeline.speeds != "measured" else 1.0
        rows.append(
            (
                f"stage {stage}",
                f"rank {rank}",
                units[0].name if len(units) == 1 else f"{units[0].name} ... {units[-1].name}",
                f"{sum(u.forward_s for u in units) / speed * 1e3:.2f}",
                f"{sum(u.backward_s for u in units) / speed * 1e3:.2f}",
                _size(sum(u.parameter_bytes for u in units)),
                f"{_size(stage_bytes(units, live))} ({live} live)",
                "-" if last else _size(units[-1].sent_bytes),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, "memory: parameters, gradients, Adam's two moments, and the activations of the live micro-batches"]


def _why(cuts: Cuts, pipeline: Pipeline, num_ranks: int) -> str:
    if pipeline.cuts:
        return f"The cuts are those that pipeline.cuts names: {', '.join(pipeline.cuts)}."
    speeds = pipeline.speeds if pipeline.speeds and pipeline.speeds != "measured" else (1.0,) * num_ranks
    times = [sum(u.seconds for u in units) / speeds[s % num_ranks] for s, units in enumerate(cuts.stages)]
    slowest = max(range(len(times)), key=times.__getitem__)
    even = sum(unit.seconds for unit in cuts.units) / sum(speeds) / pipeline.stages_per_rank
    biggest = max(cuts.units, key=lambda unit: unit.seconds)
    limit = " within the memory given" if pipeline.memory_bytes else ""
    return (
        f"The cuts make the slowest stage as fast as possible{limit}: stage {slowest}, {times[slowest] * 1e3:.2f} ms a "
        f"micro-batch, {times[slowest] / even:.2f} times a perfectly even share. No cut goes through a block; the largest, "
        f"{biggest.name}, takes {_share(biggest, cuts):.0%} of the time. Among cuts at most 3 % slower it is the one that sends "
        "least."
    )


def _picture(cuts: Cuts, pipeline: Pipeline, num_microbatches: int) -> list[str]:
    timeline = predict(cuts, pipeline, num_microbatches)
    drawn = min(num_microbatches, _MOST_GRID_MICROBATCHES)
    order = order_of(pipeline, len(cuts.stages) // pipeline.stages_per_rank, drawn)
    return [
        f"schedule {pipeline.schedule}, {num_microbatches} micro-batches: {timeline.bubble:.0%} of the time is bubble, "
        f"a batch takes {timeline.total_s * 1e3:.1f} ms without the network",
        f"(drawn as if all stages took the same, a backward two forwards, with {drawn} micro-batches)",
        grid(simulate(order, 1, 2)),
    ]


def _share(unit: Unit, cuts: Cuts) -> float:
    total = sum(each.seconds for each in cuts.units)
    return unit.seconds / total if total else 0.0


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KB", "MB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"
