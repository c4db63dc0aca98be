"""`StepHooks`: what happens right before and right after the optimizer's step."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.errors import NonFiniteError, UsageError
from gradwire.sync.gradients import GradientSync
from gradwire.sync.parameters import ParameterSync
from gradwire.sync.parts import Parts
from gradwire.sync.row_steps import OwnedSteps

Closure: TypeAlias = Callable[[], Tensor | float]
Remove: TypeAlias = Callable[[], None]


class StepHooks:
    """Joins an exchange that this rank would miss, skips or stops on a NaN, agrees on parameters when the policy says so."""

    def __init__(
        self, parts: Parts, gradients: GradientSync, parameters: ParameterSync | None, rows: OwnedSteps | None = None
    ) -> None:
        self._parts = parts
        self._rows = rows
        self._world = parts.world
        self._gradients = gradients
        self._parameters = parameters
        self._num_optimizers = 0
        self._have_stepped: set[int] = set()

    def attach(self, optimizers: Sequence[Optimizer]) -> list[Remove]:
        """Returns how to remove each hook."""
        removes = [remove for each in optimizers for remove in (self._attach_before(each), self._attach_after(each))]
        self._num_optimizers = len(optimizers)
        self._gradients.at_begin = self._begins_again
        return [*removes, self._world.at_turn_end(self._turn_ended)]

    def _attach_after(self, optimizer: Optimizer) -> Remove:
        """A step ends when every optimizer has stepped, or, if some don't, when the loop goes on without them."""
        key = id(optimizer)  # the hook must not hold the optimizer, which holds the hook

        def after(optimizer: Optimizer, *_: object) -> None:
            if self._rows is not None:
                self._rows.leave(optimizer)
            self._have_stepped.add(key)
            if len(self._have_stepped) == self._num_optimizers:
                self._settle()

        return optimizer.register_step_post_hook(after).remove

    def _begins_again(self) -> None:
        """The next backward begins: a step that some optimizers left out has ended, too late to move parameters."""
        if self._have_stepped and self._parameters is not None:
            raise UsageError(
                "under local steps not every optimizer stepped in the last batch; give gw.distribute the loader, which tells "
                "when a batch is done, or step them all"
            )
        self._settle()

    def _settle(self) -> None:
        if self._have_stepped:
            self._have_stepped.clear()
            self._count_step()
            self._world.stepped()

    @contextmanager
    def whole_batch(self) -> Generator[None]:
        """Around all backwards of a batch: a rank that had none (a pipeline's stage without parameters) joins at the end."""
        before = self._gradients.joined
        yield
        if self._gradients.joined == before and not self._world.local_only:
            self._gradients.take_part()

    def agree(self) -> None:
        """Before the time: the ranks' parameters and buffers become the same. All ranks, between steps."""
        if self._parameters is not None:
            self._refuse_round(self._parameters.agree_now(self._parts.weighting.microbatch))
        if self._world.size > 1:
            self._parts.buffers.agree(1.0)

    def finish(self) -> None:
        """Take what is on its way. All ranks, between steps."""
        if self._parameters is not None:
            self._refuse_round(self._parameters.finish())

    def _attach_before(self, optimizer: Optimizer) -> Remove:
        seen = self._gradients.rounds

        def before(
            optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            nonlocal seen
            _refuse_new_parameters(self._parts.frozen)
            if self._gradients.running:
                self._gradients.abandon()
            closure = next((value for value in (*args[1:], kwargs.get("closure")) if callable(value)), None)
            if closure is None and self._gradients.rounds == seen and self._world.size > 1:
                self._gradients.take_part()
            seen = self._gradients.rounds
            self._gradients.stepping()
            if self._gradients.nonfinite:
                self._refuse_nonfinite(optimizer, self._gradients.nonfinite)
            # args[0] is the optimizer. A rank must not decide by its own loss (LBFGS does): it gets the mean over ranks.
            if self._rows is not None:
                _refuse_closure(closure)
                self._rows.enter(optimizer)
            if closure is None or self._world.size == 1:
                return None
            return (args[0], self._agreed_loss(cast("Closure", closure))), {}

        return optimizer.register_step_pre_hook(before).remove

    def _agreed_loss(self, closure: Closure) -> Callable[[], Tensor]:
        """``closure``, returning the mean of the ranks' losses, weighed as their gradients are."""
        if self._parameters is not None or self._parts.policy.delay:
            what = (
                "which local steps never agree" if self._parameters else "and delayed gradients belong to another loss"
            )
            raise UsageError(
                f"an optimizer with a closure (LBFGS) decides by the loss, {what}; use another optimizer, or a sync that "
                "agrees every step"
            )
        world = self._world

        def agreed() -> Tensor:
            loss = torch.as_tensor(closure(), device=world.device).detach()
            count = self._gradients.count
            mine = [float(loss) * count if count else 0.0, count]
            total, whole = world.sum(torch.tensor(mine, dtype=torch.float64, device=world.device)).tolist()
            return torch.tensor(total / whole if whole else 0.0, dtype=loss.dtype, device=world.device)

        return agreed

    def _refuse_nonfinite(self, optimizer: Optimizer, where: tuple[str, ...]) -> None:
        named = _few(where)
        agreed = self._parameters is None or self._gradients.agreed
        what = "gradient of the batch before" if self._parts.policy.delay else "gradient"
        what += " is NaN or infinite"
        if self._parts.plan.on_nonfinite == "stop":
            unchanged = "nothing was changed on any rank" if agreed else "this rank's parameters were not changed"
            raise NonFiniteError(
                f"step {self._world.step}: {what} ({named}); {unchanged}. Lower the learning rate, clip, or find the "
                'sample; Plan(on_nonfinite="skip") skips such steps'
            )
        if agreed:
            self._world.log(f"gradwire: step {self._world.step} skipped on all ranks: {what} ({named})")
        else:  # the others do not know
            self._world.note(f"step {self._world.step} skipped on rank {self._world.rank} alone: {what} ({named})")
        for param_group in optimizer.param_groups:
            for param in param_group["params"]:
                param.grad = None

    def _turn_ended(self) -> None:
        """The loop goes on. If no step came, a scaler skipped it, or backward raised and the script goes on without the batch."""
        if self._gradients.running:
            self._gradients.abandon()
            if self._gradients.nonfinite:
                self._world.log(f"gradwire: step {self._world.step} skipped: {_few(self._gradients.nonfinite)}")
        self._settle()
        self._count_step()

    def _count_step(self) -> None:
        step = self._gradients.stepped()
        if step is not None and self._parameters is not None:
            self._agree_parameters(step, self._parameters)

    def _agree_parameters(self, step: int, parameters: ParameterSync) -> None:
        policy, count = self._parts.policy, self._gradients.count
        if policy.at_backward(None, step) == "agree":
            parameters.follow()
            return
        began_s = time.monotonic()
        late = parameters.stepped(0.0 if self._gradients.nonfinite else count)  # a skipped step moved nothing
        self._world.clock.blocked(time.monotonic() - began_s)
        self._refuse_round(late)
        for fragment in policy.at_step(step):
            began_s = time.monotonic()
            self._parts.buffers.agree(count)
            nonfinite = parameters.agree(fragment, self._parts.weighting.microbatch)
            self._world.clock.blocked(time.monotonic() - began_s)
            self._refuse_round(nonfinite)

    def _refuse_round(self, where: tuple[str, ...]) -> None:
        """where: who met a NaN in an agreement; empty: nobody did."""
        if not where:
            return
        problem = f"step {self._world.step}: parameters are NaN or infinite ({_few(where)})"
        if self._parts.plan.on_nonfinite == "stop":
            raise NonFiniteError(f"{problem}; all ranks hold those agreed last. Lower the learning rate, or clip")
        self._world.log(f"gradwire: {problem}; all ranks go back to those agreed last")


def _refuse_closure(closure: object) -> None:
    if closure is not None:
        raise UsageError(
            "optimizer.step(closure) runs backward inside the step, where this rank holds only its rows; call backward before "
            "step(), or use a mesh without shard"
        )


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _refuse_new_parameters(frozen: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Parameters unfrozen after ``distribute`` would silently go their own way on each rank."""
    for name, param in frozen:
        if param.requires_grad:
            raise UsageError(
                f"{name} was frozen when gw.distribute was called and is trained now; call gw.distribute again"
            )
