"""`PipelineModel`: one rank's stages, and the interpreter of its part of a schedule."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from weakref import ref

import torch
from torch import Tensor, nn

from gradwire.comm.text import all_gather_text
from gradwire.comm.world import World
from gradwire.core.autograd import at_end_of_backward
from gradwire.core.balance import Unit
from gradwire.core.group import Group
from gradwire.core.pipeline import Pipeline
from gradwire.core.schedule import Action, Order, Timeline, make, simulate
from gradwire.errors import UsageError
from gradwire.parallel.backward import Kept, Later, backward_inputs
from gradwire.parallel.batch import cut, num_samples
from gradwire.parallel.holding import Holding
from gradwire.parallel.links import Links
from gradwire.parallel.message import codec_of
from gradwire.parallel.stage import Passage, Stage, awaiting, entered
from gradwire.parallel.ties import Ties, local_only

LossFunction = Callable[..., Tensor]
Count = Callable[[object], float]


@dataclass(frozen=True)
class Cuts:
    """Where a model was cut, the same on all ranks. starts: the first block of each stage after the first.

    units: what each block costs; measured, or all alike where ``pipeline.cuts`` says where to cut.
    """

    units: tuple[Unit, ...]
    starts: tuple[int, ...]

    @property
    def stages(self) -> list[tuple[Unit, ...]]:
        """The blocks of each stage."""
        bounds = [0, *self.starts, len(self.units)]
        return [self.units[a:b] for a, b in pairwise(bounds)]


class PipelineModel:
    """What `split` made of a model on this rank.

    rank, num_ranks: along ``pipeline``. stages: this rank's, by number, in train and eval mode alike cut. holding: who has which
    parameter. parameters: those of this rank, by the user's names. groups: opened for it alone, by name.
    spans: what this rank did in its last call, and when, in seconds from the call's begin.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        pipeline: Pipeline,
        *,
        cuts: Cuts,
        stages: dict[bool, dict[int, Stage]],
        holding: Holding,
    ) -> None:
        self._model = ref(model)
        self._world = world
        self.pipeline = pipeline
        self.cuts = cuts
        self.holding = holding
        self.num_stages = len(cuts.starts) + 1
        self.num_ranks = self.num_stages // pipeline.stages_per_rank
        self.rank = world.mesh.coordinate(world.rank)["pipeline"]
        self.num_microbatches = pipeline.microbatches or 2 * self.num_stages
        self.parameters = dict(model.named_parameters())
        self.spans: list[tuple[Action, float, float]] = []
        self._stages = stages
        self._trained = [param for param in self.parameters.values() if param.requires_grad]
        codec = codec_of(pipeline.activations)
        self._links = Links(world, num_ranks=self.num_ranks, num_stages=self.num_stages, codec=codec)
        self._losses = line_of(world)
        self._ties = Ties(model, world, holding.ties, self.rank)
        self.groups = [*self._links.names, *self._ties.names]
        self._running: int | None = None
        self._broken = ""

    def forward_backward(self, loss_fn: LossFunction, x: object, y: object, count: Count | None) -> Tensor:
        """See `gradwire.parallel.forward_backward`."""
        if self._broken:
            raise UsageError(
                f"an earlier gw.forward_backward of this model failed ({self._broken}); start the job again"
            )
        total = num_samples(x)
        if y is not None and num_samples(y) != total:
            raise UsageError(
                f"gw.forward_backward: x has {total} samples and y {num_samples(y)}; give one target a sample, reshape in loss_fn"
            )
        xs = cut(x, self.num_microbatches)
        ys = [None] * len(xs) if y is None else cut(y, self.num_microbatches)
        try:
            return _Call(self, loss_fn, xs, ys, count).run()
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise

    def is_second_copy(self, param: Tensor) -> bool:
        """Whether an earlier rank of the pipeline has this parameter of this rank's too."""
        return any(
            self.parameters.get(name) is param and self.rank != tie.ranks[0]
            for tie in self.holding.ties
            for name in tie.names
        )

    def order(self, num_microbatches: int) -> Order:
        """What each rank does with so many micro-batches."""
        return order_of(self.pipeline, self.num_ranks, num_microbatches)

    def predicted(self, num_microbatches: int | None = None) -> Timeline:
        """When everything will happen, by the measured times of the blocks."""
        return predict(self.cuts, self.pipeline, num_microbatches or self.num_microbatches)

    @property
    def bubble(self) -> float:
        """The share of this rank's last call in which it had nothing to do, or waited for the network."""
        busy_s = sum(end - start for _, start, end in self.spans)
        return 1 - busy_s / self.spans[-1][2] if self.spans else 0.0

    def timeline(self) -> Timeline:
        """What all ranks of the pipeline did in the last call, and when, each from its own begin. All of them must call it."""
        told = json.dumps([[a.kind, a.stage, a.microbatch, start, end] for a, start, end in self.spans])
        rows = [json.loads(text) for text in all_gather_text(self._losses, told, self._world.device)]
        return Timeline(tuple(tuple((Action(*row[:3]), row[3], row[4]) for row in each) for each in rows))

    # --- for a running call ------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """Of this rank."""
        return self._world

    @property
    def links(self) -> Links:
        """To the neighbouring stages."""
        return self._links

    @property
    def ties(self) -> Ties:
        """Parameters that other ranks have too."""
        return self._ties

    @property
    def trained(self) -> Sequence[nn.Parameter]:
        """Those of this rank's parameters that require a gradient."""
        return self._trained

    def stage(self, number: int) -> Stage:
        """As the model's mode is."""
        return self._stages[self.model.training][number]

    @property
    def model(self) -> nn.Module:
        """The user's."""
        model = self._model()
        if model is None:
            raise UsageError("the model of this pipeline is gone")
        return model

    def run_stage(self, number: int, x: object, received: Sequence[object]) -> tuple[object, ...]:
        """By calling the model itself, so that hooks on it see its work."""
        self._running = number
        try:
            return self.model(x, *received)
        finally:
            self._running = None

    def forward(self, *args: object) -> tuple[object, ...]:
        """What the model's own forward is now. Raises UsageError unless a stage is running."""
        if self._running is None or not args:
            raise UsageError(
                f"rank {self.rank} of the pipeline has only a part of {type(self.model).__name__}; call "
                "gw.forward_backward(model, loss_fn, x, y) instead of model(x), under torch.no_grad() for a loss alone"
            )
        return self.stage(self._running).run(self.model, args[0], args[1:])

    def share_loss(self, loss: Tensor | None) -> Tensor:
        """The last stage's, on all ranks."""
        told = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        if loss is not None:
            told = torch.stack([loss.to(torch.float64), told.new_tensor(float(_DTYPES.index(loss.dtype)))])
        value, dtype = self._losses.broadcast(told, src=self.num_ranks - 1).unbind()
        return value.to(_DTYPES[int(dtype)])


_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class _Call:
    """One batch: interprets this rank's actions."""

    def __init__(
        self,
        owner: PipelineModel,
        loss_fn: LossFunction,
        xs: Sequence[object],
        ys: Sequence[object],
        count: Count | None,
    ) -> None:
        self._owner = owner
        self._loss_fn = loss_fn
        self._xs, self._ys = xs, ys
        counts = [float(num_samples(x)) if count is None else float(count(y)) for x, y in zip(xs, ys, strict=True)]
        self._shares = [each / sum(counts) if sum(counts) else 0.0 for each in counts]
        self._train = torch.is_grad_enabled()
        self._open: dict[tuple[int, int], Passage] = {}
        self._later: dict[tuple[int, int], Later | None] = {}
        self._kept = Kept()
        self._loss: Tensor | None = None

    def run(self) -> Tensor:
        owner = self._owner
        order = owner.order(len(self._xs))
        if not self._train:
            order = tuple(tuple(a for a in actions if a.kind == "forward") for actions in order)
        mine = order[owner.rank]
        owner.links.expect(order)
        held = owner.ties.set_aside() if self._train else {}
        last = max((place for place, a in enumerate(mine) if a.kind == "backward"), default=-1)
        began_s, owner.spans = time.monotonic(), []
        with owner.world.whole_batch(id(owner.model)) if self._train else nullcontext():
            for place, action in enumerate(mine):
                self._do(action, last=place == last, began_s=began_s)
            if self._train:
                self._deliver()
        owner.links.finish()
        if self._train:
            owner.ties.settle(held)
        return owner.share_loss(self._loss)

    def _deliver(self) -> None:
        """What zero-bubble has put off, as one backward."""
        for param, zeros in self._owner.ties.zeros() if self._kept.grads else ():
            self._kept.add([param], [zeros])
        self._kept.deliver()

    def _do(self, action: Action, *, last: bool, began_s: float) -> None:
        """Wait for what the action needs, do it, send what it gives."""
        owner, stage, j = self._owner, action.stage, action.microbatch
        received = self._received(action)
        start_s = time.monotonic() - began_s
        if action.kind == "forward":
            gives = self._forward(stage, j, received)
            if stage + 1 < owner.num_stages:
                owner.links.post(action, gives, owner.stage(stage).names)
        elif action.kind == "backward":
            with local_only(owner.world, on=not last):
                self._backward(action, received, last=last)
        elif action.kind == "input":
            self._give_back(action, self._input(stage, j, received))
        elif (later := self._later.pop((stage, j))) is not None:
            later.run(owner.trained, self._kept)
        owner.spans.append((action, start_s, time.monotonic() - began_s))

    def _give_back(self, action: Action, grads: Sequence[object]) -> None:
        if action.stage > 0:
            self._owner.links.post(action, grads, ["a gradient"] * len(grads))

    def _received(self, action: Action) -> Sequence[object]:
        stage, links = action.stage, self._owner.links
        if action.kind == "forward":
            return links.take("forward", stage, action.microbatch) if stage else ()
        if action.returns and stage + 1 < self._owner.num_stages:
            return links.take("backward", stage, action.microbatch)
        return ()

    def _forward(self, stage: int, j: int, received: Sequence[object]) -> Sequence[object]:
        passage = Passage()
        inputs = entered(received, passage) if self._train else received
        values = self._owner.run_stage(stage, self._xs[j], inputs)
        if stage + 1 == self._owner.num_stages:
            values = (self._add_loss(self._loss_fn(values[0], self._ys[j]), self._shares[j]),)
        if self._train:
            passage.exits = awaiting(values)
            self._open[stage, j] = passage
        return values

    def _add_loss(self, loss: object, share: float) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.dtype not in _DTYPES:
            what = f"a tensor {tuple(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(
                f"gw.forward_backward: loss_fn(output, target) must give one number, the mean; it gave {what}"
            )
        scaled = loss.reshape(()) * share
        part = scaled.detach()
        self._loss = part if self._loss is None else self._loss + part
        return scaled

    def _backward(self, action: Action, received: Sequence[object], *, last: bool) -> None:
        """Gives back before the ranks agree on gradients, at the end of a batch's last backward: others wait for both."""
        passage = self._open.pop((action.stage, action.microbatch))
        pairs = self._pairs(passage, received)

        def give_back() -> None:
            self._give_back(action, [entry.grad for entry in passage.entries])

        pairs += self._owner.ties.roots() if last else []
        if not pairs:
            give_back()
            return
        asked: list[bool] = []

        def ask(_: Tensor) -> None:  # whichever root comes first, before any parameter
            if not asked:
                asked.append(True)
                at_end_of_backward(give_back)

        for root, _ in pairs:
            root.register_hook(ask)
        torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])

    def _input(self, stage: int, j: int, received: Sequence[object]) -> Sequence[object]:
        passage = self._open.pop((stage, j))
        pairs = self._pairs(passage, received)
        if not pairs:
            self._later[stage, j] = None
            return [None] * len(passage.entries)
        grads, self._later[stage, j] = backward_inputs(
            [exit_ for exit_, _ in pairs], [g for _, g in pairs], passage.entries, self._owner.trained, self._kept
        )
        return grads

    def _pairs(self, passage: Passage, received: Sequence[object]) -> list[tuple[Tensor, Tensor]]:
        """Each exit with the gradient that came for it; the loss's is 1."""
        grads = received or [torch.ones_like(each) for each in passage.exits]
        pairs = zip(passage.exits, grads, strict=True)
        return [(exit_, grad) for exit_, grad in pairs if isinstance(grad, Tensor)]


def line_of(world: World) -> Group:
    """All ranks along ``pipeline``, for what is small: one group for all models, never closed before the world."""
    length = world.mesh.length(["pipeline"])
    return world.among("pipeline", range(length), channel="line")


def predict(cuts: Cuts, pipeline: Pipeline, num_microbatches: int) -> Timeline:
    """When everything will happen, by what the blocks cost; alike where nothing was measured."""
    num_stages = len(cuts.stages)
    speeds = () if pipeline.speeds == "measured" else pipeline.speeds
    num_ranks = num_stages // pipeline.stages_per_rank
    speed = [speeds[s % num_ranks] if speeds else 1.0 for s in range(num_stages)]
    forward = [sum(u.forward_s for u in stage) / v for stage, v in zip(cuts.stages, speed, strict=True)]
    backward = [sum(u.backward_s for u in stage) / v for stage, v in zip(cuts.stages, speed, strict=True)]
    return simulate(order_of(pipeline, num_ranks, num_microbatches), forward, backward)


@cache
def order_of(pipeline: Pipeline, num_ranks: int, num_microbatches: int) -> Order:
    """What each of ``num_ranks`` does with so many micro-batches."""
    return make(
        pipeline.schedule,
        num_ranks=num_ranks,
        stages_per_rank=pipeline.stages_per_rank,
        num_microbatches=num_microbatches,
    )
