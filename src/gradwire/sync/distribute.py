"""`distribute`: the order in which data parallel training is put together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.comm.world import World, current
from gradwire.core.group import Group
from gradwire.core.microbatch import MicrobatchSource
from gradwire.core.plan import Plan
from gradwire.core.reducer import Link
from gradwire.errors import NonFiniteError, UsageError
from gradwire.sync.batchnorm import synchronise_batch_norm
from gradwire.sync.buffers import BufferExchange, broadcast_all
from gradwire.sync.exchange import Exchange
from gradwire.sync.fingerprint import compare, facts_of, plain_name
from gradwire.sync.gradients import GradientSync
from gradwire.sync.named import policy_of
from gradwire.sync.weighting import Weighting

NUM_LANES = 2
PROBE_BYTES = 1 << 20
Closure: TypeAlias = Callable[[], Tensor | float]


def distribute(
    model: nn.Module,
    optimizer: Optimizer | list[Optimizer] | tuple[Optimizer, ...],
    loader: MicrobatchSource | None = None,
    *,
    plan: Plan | None = None,
) -> None:
    """Train ``model`` together with the other ranks, from its next backward on. The loop does not change.

    model: on its device, parameters made; its weights and buffers become rank 0's. optimizer: the one, or all, that
    step it. loader: the ``gw.DataLoader`` that feeds it, so that every sample counts the same; without one, ranks count
    alike unless ``gw.weight`` says otherwise. plan: beats ``gradwire run --plan``, which beats the default.

    Afterwards ``.grad`` holds the mean over all ranks' samples when ``backward()`` returns. Calling it again on the same
    model replaces the earlier call (after unfreezing a layer, say).

    Raises UsageError for wrong arguments, PlanError for a plan this world cannot run, MismatchError if the ranks'
    models, plans, data or versions differ.

    >>> import gradwire as gw
    >>> with gw.init():
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     gw.distribute(model, optimizer)
    ...     model(torch.ones(4, 2)).mean().backward()
    ...     optimizer.step()
    """
    world = current()
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    _check_arguments(model, optimizers, loader, plan)
    plan = plan or world.plan
    plan.check(world.size)
    groups = _gradient_groups(world)
    group = groups[0]
    compare(facts_of(model, plan, loader, [type(each).__name__ for each in optimizers]), group, world.device)
    if world.size > 1:
        broadcast_all([param.data for param in model.parameters()] + list(model.buffers()), group)
    if loader is not None:
        loader.attach(plan.accumulate)
    sync = _gradient_sync(model, world, groups, Weighting(world, loader), plan)
    frozen = [(plain_name(name), param) for name, param in model.named_parameters() if not param.requires_grad]
    handles = [_before_steps(each, sync, world, plan, frozen) for each in optimizers]
    handles.append(optimizers[0].register_step_post_hook(lambda *_: world.stepped()).remove)

    def detach() -> None:
        for remove in handles:
            remove()
        sync.close()

    world.replace_attachment(id(model), detach)


def _gradient_groups(world: World) -> list[Group]:
    """A channel for each lane; NCCL needs one only, it keeps the wire busy by itself."""
    serial = world.next_serial()
    count = 1 if world.size == 1 or world.device.type == "cuda" else NUM_LANES
    return [world.group("data", channel=f"gradients{serial}.{lane}") for lane in range(count)]


def _gradient_sync(
    model: nn.Module, world: World, groups: Sequence[Group], weighting: Weighting, plan: Plan
) -> GradientSync:
    if plan.batch_norm == "sync" and world.size > 1:
        synchronise_batch_norm(model, world.group("data", channel=f"batchnorm{world.next_serial()}"), weighting)
    trained = [(plain_name(name), param) for name, param in model.named_parameters() if param.requires_grad]
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse}
    return GradientSync(
        trained,
        world=world,
        plan=plan,
        exchange=Exchange([(group, world.lane(group.name)) for group in groups], world.device),
        policy=policy_of(plan.sync),
        weighting=weighting,
        buffers=BufferExchange(model, skip_statistics=plan.batch_norm == "sync"),
        sparse=frozenset(index for index, (_, param) in enumerate(trained) if id(param) in tables),
        link=_measured_link(groups[0], world.device),
    )


def _before_steps(
    optimizer: Optimizer, sync: GradientSync, world: World, plan: Plan, frozen: Sequence[tuple[str, nn.Parameter]]
) -> Callable[[], None]:
    """Before each step: join an exchange this rank would miss; skip or stop, all ranks alike, on a NaN."""
    seen = sync.rounds

    def before(
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        nonlocal seen
        sync.refuse_new_parameters(frozen)
        closure = next((value for value in (*args[1:], kwargs.get("closure")) if callable(value)), None)
        if closure is None and sync.rounds == seen and world.size > 1:
            sync.take_part()
        seen = sync.rounds
        sync.stepped()
        if sync.nonfinite:
            _refuse_nonfinite(optimizer, sync.nonfinite, world, plan)
        # args[0] is the optimizer. A rank must not decide by its own loss (LBFGS does): it gets the mean over ranks.
        if closure is None or world.size == 1:
            return None
        return (args[0], _agreed_loss(cast("Closure", closure), sync, world)), {}

    return optimizer.register_step_pre_hook(before).remove


def _agreed_loss(closure: Closure, sync: GradientSync, world: World) -> Callable[[], Tensor]:
    """``closure``, returning the mean of the ranks' losses, weighed as their gradients are."""

    def agreed() -> Tensor:
        loss = torch.as_tensor(closure(), device=world.device).detach()
        count = sync.count
        mine = [float(loss) * count if count else 0.0, count]
        total, whole = world.sum(torch.tensor(mine, dtype=torch.float64, device=world.device)).tolist()
        return torch.tensor(total / whole if whole else 0.0, dtype=loss.dtype, device=world.device)

    return agreed


def _refuse_nonfinite(optimizer: Optimizer, where: tuple[str, ...], world: World, plan: Plan) -> None:
    named = ", ".join(where[:4]) + (f" and {len(where) - 4} more" if len(where) > 4 else "")
    if plan.on_nonfinite == "stop":
        raise NonFiniteError(
            f"step {world.step}: gradient is NaN or infinite ({named}); nothing was changed on any rank. Lower the "
            'learning rate, clip, or find the sample; Plan(on_nonfinite="skip") skips such steps'
        )
    world.log(f"gradwire: step {world.step} skipped on all ranks: gradient is NaN or infinite ({named})")
    for param_group in optimizer.param_groups:
        for param in param_group["params"]:
            param.grad = None


@contextmanager
def no_sync() -> Generator[None]:
    """Backwards inside keep their gradients on this rank, added up in ``.grad``; the next one outside agrees them all.

    All ranks must enter it alike. Scaling is yours, as in plain PyTorch: k backwards add up to the sum of their k means.
    (After ``gw.weight`` the window is one weighted mean instead.)

    >>> import gradwire as gw
    >>> with gw.init():
    ...     with gw.no_sync():
    ...         pass
    """
    world = current()
    world.local_only += 1
    try:
        yield
    finally:
        world.local_only -= 1


def weight(count: float) -> None:
    """Say what this rank's next backward counts, e.g. the tokens its mean loss is over; all ranks must call it.

    It holds until the optimizer steps or the loader moves on. count: >= 0 and finite. The agreed gradient is
    sum(count g) / sum(count) over ranks, and over the micro-batches of an accumulation window.

    >>> import gradwire as gw
    >>> with gw.init():
    ...     gw.weight(17)
    """
    value = float(count)
    if not 0 <= value < float("inf"):
        raise UsageError(f"gw.weight({count!r}): the count must be a finite number, not negative")
    current().set_weight(value)


def _measured_link(group: Group, device: torch.device) -> Link:
    """The group's link: the median of ten 8-byte all-reduces, the better of two of 1 MiB."""
    if group.size == 1:
        return Link(latency_s=0.0, bandwidth_bytes_per_s=math.inf, num_ranks=1)
    latency_s = median(_all_reduce_s(group, torch.zeros(1, dtype=torch.float64, device=device)) for _ in range(10))
    probe = torch.zeros(PROBE_BYTES // 4, device=device)
    seconds = min(_all_reduce_s(group, probe) for _ in range(2)) - latency_s
    unit = Link(latency_s=latency_s, bandwidth_bytes_per_s=1.0, num_ranks=group.size)
    return replace(unit, bandwidth_bytes_per_s=unit.ring_factor * PROBE_BYTES / max(seconds, 1e-6))


def _all_reduce_s(group: Group, probe: Tensor) -> float:
    began_s = time.monotonic()
    float(group.all_reduce(probe)[0])
    return time.monotonic() - began_s


def _check_arguments(model: object, optimizers: Sequence[object], loader: object, plan: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"gw.distribute: model must be a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UsageError(f"gw.distribute: model is wrapped in {type(model).__name__}; give the module inside it")
    if loader is not None and not all(hasattr(loader, name) for name in ("attach", "current", "describe")):
        raise UsageError(
            f"gw.distribute: loader must be a gw.DataLoader, not {type(loader).__name__}; "
            "use gw.DataLoader(...) or gw.shard(torch_loader)"
        )
    if plan is not None and not isinstance(plan, Plan):
        raise UsageError(
            f"gw.distribute: plan must be a gw.Plan, not {type(plan).__name__}; see gw.Plan.from_toml for files"
        )
    if not optimizers:
        raise UsageError("gw.distribute: no optimizer given")
    params = dict(model.named_parameters())
    for name, param in params.items():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UsageError(f"gw.distribute: {name} is lazy and has no shape yet; run one forward before")
        if param.is_meta:
            raise UsageError(f"gw.distribute: {name} is on the meta device; make the model on a real one before")
    if not any(param.requires_grad for param in params.values()):
        raise UsageError("gw.distribute: the model has no parameter with requires_grad=True; nothing would be trained")
    inside = {id(param) for param in params.values()}
    for each in optimizers:
        _check_optimizer(each, inside)


def _check_optimizer(optimizer: object, inside: set[int]) -> None:
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"gw.distribute: optimizer must be a torch optimizer, not {type(optimizer).__name__}")
    for number, param_group in enumerate(optimizer.param_groups):
        for param in param_group["params"]:
            if id(param) not in inside:
                raise UsageError(
                    f"gw.distribute: {type(optimizer).__name__} (param group {number}) steps a parameter of shape "
                    f"{tuple(param.shape)} that is not in the model, so it would differ between ranks; give the model "
                    "that holds it, or make the optimizer after moving the model to its device"
                )
