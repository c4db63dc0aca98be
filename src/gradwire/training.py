"""`distribute`: the order in which training is put together; what a script says of it besides."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwire.comm.world import Attachment, World, current
from gradwire.compress.choice import ByName
from gradwire.core.microbatch import MicrobatchSource
from gradwire.core.names import plain_name
from gradwire.core.plan import Plan, Sync
from gradwire.errors import UsageError
from gradwire.parallel.parted import part
from gradwire.sync.autograd import GradientHooks
from gradwire.sync.buffers import broadcast_all
from gradwire.sync.fingerprint import compare, facts_of
from gradwire.sync.kept import Distributed
from gradwire.sync.named import policy_of
from gradwire.sync.parts import Parts, open_channels
from gradwire.sync.row_steps import refuse_optimizers
from gradwire.sync.steps import StepHooks


def distribute(
    model: nn.Module,
    optimizer: Optimizer | list[Optimizer] | tuple[Optimizer, ...],
    loader: MicrobatchSource | None = None,
    *,
    plan: Plan | None = None,
    sync: Sync | None = None,
    example: object = None,
) -> Distributed:
    """Train ``model`` together with the other ranks, from its next backward on. The loop does not change.

    model: on its device, parameters made; its weights and buffers become rank 0's. optimizer: the one, or all, that
    step it. loader: the ``gw.DataLoader`` that feeds it, so that every sample counts the same; without one, ranks count
    alike unless ``gw.weight`` says otherwise. plan: beats ``gradwire run --plan``, which beats the default.
    sync: how and when the ranks agree, in place of the plan's: ``"q4"``, a reducer, or a policy (`gw.Plan`).
    example: an input of the model, a batch, for a pipeline to measure its blocks with; by default the loader gives one.

    Under a mesh with ``pipeline``, ``tensor`` or ``shard`` the model becomes this rank's part of it, in place; a pipeline is then
    trained by ``gw.forward_backward``.

    Afterwards ``.grad`` holds the mean over all ranks' samples when ``backward()`` returns. Calling it again on the same
    model replaces the earlier call (after unfreezing a layer, say), unless the model was cut. What a model needed is closed by
    the first call after the model and its optimizers are gone. What it returns is only needed to save, resume, and agree before
    the time (`local`).

    Raises UsageError for wrong arguments, PlanError for a plan this world cannot run, MismatchError if the ranks'
    models, plans, data or versions differ.

    >>> import torch
    >>> import gradwire as gw
    >>> with gw.init():
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     training = gw.distribute(model, optimizer)
    ...     model(torch.ones(4, 2)).mean().backward()
    ...     optimizer.step()
    """
    world = current()
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    _check_arguments(model, optimizers, loader, plan)
    plan = _checked_plan(world, plan, sync)
    policy = policy_of(plan.sync)
    if isinstance(policy.reducer, ByName):
        policy.reducer.check([plain_name(name) for name, param in model.named_parameters() if param.requires_grad])
    world.settle()
    world.take_mesh(plan)
    if world.mesh.length(("shard",)) > 1:
        refuse_optimizers(optimizers, plan.sharding)
    policy = policy if world.num_readers > 1 else policy.alone()
    channels = open_channels(world, policy)
    everybody = channels.everybody or channels.lanes[0]
    compare(facts_of(model, plan, loader, [type(each).__name__ for each in optimizers]), everybody, world.device)
    if world.size > 1:
        broadcast_all([param.data for param in model.parameters()] + list(model.buffers()), everybody)
    if loader is not None:
        loader.attach(plan.accumulate)
    parted = part(model, optimizers, world, plan, _example(loader, example, world))
    make_hooks = GradientHooks if parted.shard is None else parted.shard.hooks
    parts = Parts(model, world, channels, plan, policy, loader, make_hooks)
    return _put_together(model, optimizers, parts, parted.groups)


def _checked_plan(world: World, plan: Plan | None, sync: Sync | None) -> Plan:
    """What was given, or what the launcher was told; with the world's mesh where it names none."""
    if plan is not None and sync is not None and plan.sync != "exact":
        raise UsageError(f"gw.distribute: sync={sync} and plan.sync={plan.sync} are both given; give one")
    plan = plan or world.plan
    plan = plan if sync is None else replace(plan, sync=sync)
    plan = plan if plan.mesh else replace(plan, mesh=world.axes)
    plan.check(world.size)
    return plan


def _put_together(
    model: nn.Module, optimizers: Sequence[Optimizer], parts: Parts, groups: tuple[str, ...]
) -> Distributed:
    """Hooks on the model and the optimizers, and how to let go of them. groups: opened for the model besides the parts'."""
    gradients, parameters, loading = parts.gradients(), parts.parameters(), parts.loading
    steps = StepHooks(parts, gradients, parameters, parts.owned_steps())
    removes = steps.attach(optimizers) + parts.guards

    def detach() -> None:
        for remove in removes:
            remove()
        gradients.close()
        loading.close()

    attachment = Attachment(
        detach=detach,
        whole_batch=steps.whole_batch,
        groups=(*parts.group_names, *groups),
        owners=_owners(model, optimizers),
    )
    parts.world.replace_attachment(id(model), attachment)
    return Distributed(
        parts.world,
        params=parts.trained,
        sync=str(parts.plan.sync),
        gradients=gradients,
        parameters=parameters,
        steps=steps,
        loading=loading,
    )


def _example(loader: MicrobatchSource | None, given: object, world: World) -> object:
    """An input for rank 0 to measure a pipeline's blocks with."""
    if given is not None or loader is None or world.mesh.length(("pipeline",)) == 1 or world.rank:
        return given
    batch = loader.example()
    return batch[0] if isinstance(batch, tuple | list) and batch else batch


def _owners(model: nn.Module, optimizers: Sequence[Optimizer]) -> tuple[ref[object], ...]:
    """Without whom it cannot be trained; ``model`` itself may be a list of others made on the way."""
    modules = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    return tuple(ref(owner) for owner in (*modules, *optimizers))


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
    given: object = count
    if isinstance(given, str | bool) or (isinstance(given, Tensor) and given.numel() != 1):
        raise UsageError(f"gw.weight({count!r}): the count must be one number, e.g. the tokens that the mean is over")
    value = float(count)
    if not 0 <= value < float("inf"):
        raise UsageError(f"gw.weight({count!r}): the count must be a finite number, not negative")
    current().set_weight(value)


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
