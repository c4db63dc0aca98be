"""`split`: cut a model into stages and leave on this rank its own; `forward_backward`: one batch, under any plan."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from types import MethodType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gradwire.comm.text import all_gather_text
from gradwire.comm.world import World
from gradwire.core.balance import Unit, balance
from gradwire.core.mesh import AXES
from gradwire.core.pipeline import Pipeline
from gradwire.core.schedule import live_microbatches, make
from gradwire.errors import GradwireError, MismatchError, PlanError, UsageError
from gradwire.parallel.batch import cut
from gradwire.parallel.blocks import Blocks
from gradwire.parallel.holding import find_holding, let_go
from gradwire.parallel.pipeline import Count, Cuts, LossFunction, PipelineModel, line_of
from gradwire.parallel.profile import measure, probe_speeds
from gradwire.parallel.stage import Stage

_SLACK = 0.03  # measured times vary by as much, so a cut that sends less may win
_PIPELINES: WeakKeyDictionary[nn.Module, PipelineModel] = WeakKeyDictionary()


Decision = tuple[Pipeline, Cuts]


def decide(model: nn.Module, world: World, pipeline: Pipeline, example: object = None) -> Decision:
    """Where the stages of a model that is still whole begin, for `split`, when layers are shared between the two."""
    num_stages = world.mesh.length(["pipeline"]) * pipeline.stages_per_rank
    return _agreed_cuts(model, world, blocks_of(model, num_stages), pipeline, example)


def split(
    model: nn.Module,
    world: World,
    pipeline: Pipeline,
    example: object = None,
    *,
    decision: Decision | None = None,
) -> PipelineModel:
    """Cut ``model`` into stages and leave on this rank, in place, the blocks of its own; all ranks must call it.

    example: an input such as the loop gives, for rank 0 to measure with; not needed where ``pipeline.cuts`` says where to cut.
    The ranks' weights must be equal before. Afterwards `forward_backward` trains it, and calling the model is refused.

    Raises PlanError if the model has too few blocks or nothing fits, UsageError if it cannot be traced.
    """
    num_ranks = world.mesh.length(["pipeline"])
    if problems := pipeline.misfits(num_ranks):
        raise PlanError("; ".join(problems))
    num_stages = num_ranks * pipeline.stages_per_rank
    _check_parameters(model, pipeline)
    modes = {training: blocks_of(model, num_stages, training=training) for training in (True, False)}
    blocks = modes[True]
    if modes[False].names != blocks.names:
        raise UsageError(
            f"{type(model).__name__} cannot be cut into stages: it runs other blocks in eval mode than in training"
        )
    pipeline, cuts = decision or _agreed_cuts(model, world, blocks, pipeline, example)
    bounds = [0, *cuts.starts, len(blocks.names)]
    spans = list(pairwise(bounds))
    holding = find_holding(model, blocks, [blocks.program(*span) for span in spans], num_ranks)
    rank = world.mesh.coordinate(world.rank)["pipeline"]
    stages = {
        training: {
            stage: Stage(each, each.program(*span)) for stage, span in enumerate(spans) if stage % num_ranks == rank
        }
        for training, each in modes.items()
    }
    _warn_of_batch_norm(model, world, pipeline)
    let_go(model, holding, rank)
    made = PipelineModel(model, world, pipeline, cuts=cuts, stages=stages, holding=holding)
    _PIPELINES[model] = made
    model.forward = MethodType(_forward, model)
    return made


def pipeline_of(model: nn.Module) -> PipelineModel | None:
    """What `split` made of it; None for a model that is whole."""
    return _PIPELINES.get(model)


def is_second_copy(param: Tensor) -> bool:
    """Whether ``param`` is of a pipeline's stage, and an earlier stage has it too."""
    return any(made.is_second_copy(param) for made in _PIPELINES.values())


def forward_backward(
    model: nn.Module, loss_fn: LossFunction, x: object, y: object = None, *, count: Count | None = None
) -> Tensor:
    """``loss = loss_fn(model(x), y); loss.backward()`` under any plan, a pipeline included; returns the loss, detached.

    loss_fn(output, target): the mean over the samples it is given, one number. x, y: tensors, or tuples, lists and dicts of them,
    with samples along the first dimension; the same on all ranks of a pipeline, which all get the loss. Under
    ``torch.no_grad()`` there is no backward, and any mean will do, an accuracy say.
    count(target): what the mean is over, if not samples (tokens that are not padding); then micro-batches count by it.
    Without a pipeline it is those two lines, so ``count`` changes nothing there.

    Raises UsageError for batches that cannot be cut, PeerError when another rank is gone.

    >>> layer = torch.nn.Linear(2, 1)
    >>> loss = forward_backward(layer, torch.nn.functional.mse_loss, torch.ones(4, 2), torch.ones(4, 1))
    >>> loss.requires_grad, layer.weight.grad is None
    (False, False)
    """
    if getattr(loss_fn, "reduction", "mean") != "mean":
        raise UsageError("gw.forward_backward: loss_fn must be a mean over its samples; use reduction='mean'")
    made = _PIPELINES.get(model)
    if made is not None:
        return made.forward_backward(loss_fn, x, y, count)
    loss = loss_fn(model(x), y)
    if torch.is_grad_enabled():
        loss.backward()
    return loss.detach()


def blocks_of(model: nn.Module, num_stages: int, *, training: bool = True) -> Blocks:
    """The model's blocks; looked into, if there are fewer than stages."""
    with _in_mode(model, training):
        blocks = Blocks(model)
        return blocks if len(blocks.names) >= num_stages else Blocks(model, deep=True)


def choose_cuts(blocks: Blocks, units: Sequence[Unit], pipeline: Pipeline, num_ranks: int) -> Cuts:
    """Where ``pipeline.cuts`` says, or where the units' costs balance."""
    num_stages = num_ranks * pipeline.stages_per_rank
    if pipeline.cuts:
        starts = tuple(blocks.place_of(name) for name in pipeline.cuts)
        if any(a >= b for a, b in zip((0, *starts), starts, strict=False)):
            raise PlanError(
                f"pipeline.cuts={list(pipeline.cuts)} leaves a stage without a block: name blocks in the model's order, after "
                f"the first; they are {', '.join(blocks.names)}"
            )
        return Cuts(tuple(units), starts)
    order = make(
        pipeline.schedule,
        num_ranks=num_ranks,
        stages_per_rank=pipeline.stages_per_rank,
        num_microbatches=pipeline.microbatches or 2 * num_stages,
    )
    live = [live_microbatches([a for a in order[s % num_ranks] if a.stage == s]) for s in range(num_stages)]
    starts = balance(
        units,
        num_ranks=num_ranks,
        stages_per_rank=pipeline.stages_per_rank,
        speeds=() if pipeline.speeds == "measured" else pipeline.speeds,
        memory_bytes=pipeline.memory_bytes,
        live=live,
        slack=_SLACK,
    )
    return Cuts(tuple(units), starts)


def example_part(example: object, pipeline: Pipeline, num_stages: int) -> object:
    """A micro-batch of it."""
    return cut(example, pipeline.microbatches or 2 * num_stages)[0]


def _agreed_cuts(
    model: nn.Module, world: World, blocks: Blocks, pipeline: Pipeline, example: object
) -> tuple[Pipeline, Cuts]:
    """Rank 0's, on all ranks of the mesh."""
    everybody = world.group(*AXES, channel="split")
    line = line_of(world)
    speeds = probe_speeds(line, world.device) if pipeline.speeds == "measured" else pipeline.speeds
    pipeline = replace(pipeline, speeds=speeds)
    names = json.dumps({"names": blocks.names})
    everybody.barrier()  # ranks may be threads, and torch.fx patches modules for all of them while it traces
    told = _decide(model, blocks, pipeline, line.size, example) if everybody.rank == 0 else names
    decision, *others = (json.loads(text) for text in all_gather_text(everybody, told, world.device))
    if "error" in decision:
        raise PlanError(decision["error"])
    for rank, other in enumerate(others, start=1):
        if other["names"] != decision["names"]:
            raise MismatchError(
                f"the ranks' models differ: rank 0's blocks are {', '.join(decision['names'])}, rank {rank}'s "
                f"{', '.join(other['names'])}"
            )
    pipeline = replace(pipeline, speeds=tuple(decision["speeds"]))
    return pipeline, Cuts(tuple(Unit(**unit) for unit in decision["units"]), tuple(decision["starts"]))


def _decide(model: nn.Module, blocks: Blocks, pipeline: Pipeline, num_ranks: int, example: object) -> str:
    num_stages = num_ranks * pipeline.stages_per_rank
    try:
        if example is None and not pipeline.cuts:
            raise UsageError(
                "a pipeline needs an example input to measure the blocks with; give gw.distribute the loader, or say where to "
                f"cut: pipeline.cuts with {num_stages - 1} of {', '.join(blocks.names)}"
            )
        if example is None:
            units = [Unit(name=name) for name in blocks.names]
        else:
            with _in_mode(model, training=True):
                units = measure(model, blocks, example_part(example, pipeline, num_stages))
        cuts = choose_cuts(blocks, units, pipeline, num_ranks)
    except GradwireError as error:
        return json.dumps({"error": str(error)})
    found = {
        "names": blocks.names,
        "units": [asdict(u) for u in units],
        "starts": cuts.starts,
        "speeds": pipeline.speeds,
    }
    return json.dumps(found)


def _forward(model: nn.Module, *args: object) -> object:
    """The forward of a model that was split, and of its copies, which are parts too but in no pipeline."""
    made = _PIPELINES.get(model)
    if made is None:
        raise UsageError(
            f"this {type(model).__name__} is a copy of one rank's part of a pipeline, and cannot run by itself"
        )
    return made.forward(*args)


def _check_parameters(model: nn.Module, pipeline: Pipeline) -> None:
    hooked = [name for name, param in model.named_parameters() if getattr(param, "_backward_hooks", None)]
    if hooked and pipeline.schedule == "zero-bubble":
        raise UsageError(
            f"{hooked[0]} has a hook (register_hook), which zero-bubble would call more than once for one gradient; use "
            'schedule="1f1b"'
        )


def _warn_of_batch_norm(model: nn.Module, world: World, pipeline: Pipeline) -> None:
    found = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]  # pyright: ignore[reportPrivateUsage]
    if found and pipeline.microbatches != 1:
        world.log(
            f"gradwire: {', '.join(found[:3])}{' and others' if len(found) > 3 else ''}: in a pipeline BatchNorm normalises each "
            "micro-batch by itself, so the answer is not one machine's; use GroupNorm or LayerNorm, or pipeline.microbatches=1"
        )


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Generator[None]:
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, was in before.items():
            module.training = was
