"""What ranks that own rows of the optimizer's state do in test_owned.py: importable, since they are processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.comm.dtensor import is_parted, local_of
from gradwire.comm.world import World

PLAN = gw.Plan(mesh={"shard": 2}, sharding="optimizer")
ACROSS = gw.Plan(mesh={"data": 2, "shard": 2}, sharding="optimizer")

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "Adam foreach": lambda params: torch.optim.Adam(params, lr=0.01, foreach=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.01),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "Muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.01),
}


class Net(nn.Module):
    """Five rows, seven rows, a scalar, one row, a part that is not used, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 5), nn.Linear(5, 7), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Linear(2, 3)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return self.last(hidden * self.scale)


def net() -> Net:
    model = Net().double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.5)
    return model


def batch(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, parts: int, rank: int, steps: range) -> None:
    """Equal parts of each batch; two backwards a step; clipped."""
    for step in steps:
        part = batch(step).chunk(parts)[rank]
        model(part).square().mean().backward()
        (0.5 * model(part)).mean().backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()


def alone(name: str, num_steps: int = 5) -> dict[str, Tensor]:
    model = net()
    optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
    trained(model, optimizer, 1, 0, range(num_steps))
    return weights(model)


def every_optimizer(world: World) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, make in OPTIMIZERS.items():
        model = net()
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        gw.distribute(model, optimizer)
        trained(model, optimizer, world.size, world.rank, range(5))
        found[name] = weights(model)
    return found


def resumed(world: World) -> dict[str, Tensor]:
    """Two steps, everything saved, three more in a new model; the optimizer's state is of rows, and may be given whole."""
    model = net()
    optimizer = OPTIMIZERS["Adam"](list(model.parameters()))
    gw.distribute(model, optimizer)
    trained(model, optimizer, world.size, world.rank, range(2))
    state = optimizer.state_dict()
    assert all(is_parted(each["exp_avg"]) for key, each in state["state"].items() if key != 0)
    if world.rank == 1:  # one rank loads rows, the other the whole
        for each in state["state"].values():
            each.update({key: each[key] for key in each})
    again = net()
    again.load_state_dict(model.state_dict())
    other = OPTIMIZERS["Adam"](list(again.parameters()))
    gw.distribute(again, other)
    other.load_state_dict(state)
    trained(again, other, world.size, world.rank, range(2, 5))
    return weights(again)


def whole_state_loaded(world: World) -> dict[str, Tensor]:
    """The state of one process goes on on two ranks."""
    model = net()
    optimizer = OPTIMIZERS["Adam"](list(model.parameters()))
    trained(model, optimizer, 1, 0, range(2))
    again = net()
    again.load_state_dict(model.state_dict())
    other = OPTIMIZERS["Adam"](list(again.parameters()))
    gw.distribute(again, other)
    other.load_state_dict(optimizer.state_dict())
    trained(again, other, world.size, world.rank, range(2, 5))
    return weights(again)


def bytes_of_state(world: World) -> tuple[int, int]:
    """What the optimizer's state takes on this rank, and what that of one process takes."""
    model = net()
    optimizer = OPTIMIZERS["Adam"](list(model.parameters()))
    gw.distribute(model, optimizer)
    trained(model, optimizer, world.size, world.rank, range(1))
    values = [
        value
        for each in optimizer.state.values()
        for value in each.values()
        if isinstance(value, Tensor) and value.dim()
    ]
    return sum(local_of(value).untyped_storage().nbytes() for value in values), sum(value.nbytes for value in values)


def with_a_nan(world: World) -> dict[str, Tensor]:
    """One rank meets a NaN in the second step: all skip it, and the state stays."""
    model = net()
    optimizer = OPTIMIZERS["Adam"]([p for p in model.parameters() if p.requires_grad])
    gw.distribute(model, optimizer)
    trained(model, optimizer, world.size, world.rank, range(1))
    bad = batch(99) * (float("nan") if world.rank == 1 else 1.0)
    model(bad).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    trained(model, optimizer, world.size, world.rank, range(1, 5))
    return weights(model)


def weighted(world: World) -> dict[str, Tensor]:
    """gw.weight, no_sync windows and parts of unequal size."""
    model = net()
    optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
    gw.distribute(model, optimizer)
    sizes = [1, 2, 4, 1][: world.size - 1]
    for step in range(3):
        part = batch(step).split([*sizes, 8 - sum(sizes)])[world.rank]
        first, second = part[:1], part[1:]
        with gw.no_sync():
            gw.weight(len(first))
            model(first).square().mean().backward()
        gw.weight(len(second))
        (model(second).square().mean() if len(second) else model(first).mean() * 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def weighted_alone() -> dict[str, Tensor]:
    model = net()
    optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
    for step in range(3):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def lossy(world: World) -> dict[str, Tensor]:
    """q8 between the copies, rows within each."""
    model = nn.Linear(64, 64)
    nn.init.eye_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gw.distribute(model, optimizer, sync="q8")
    for step in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        model(x.chunk(world.size)[world.rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def lossy_alone() -> dict[str, Tensor]:
    model = nn.Linear(64, 64)
    nn.init.eye_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def refused(world: World) -> list[str]:
    """What cannot work, told on every rank."""
    told: list[str] = []
    model = net()
    trained_ones = [p for p in model.parameters() if p.requires_grad]
    for attempt in (
        lambda: gw.distribute(model, torch.optim.LBFGS(trained_ones)),
        lambda: gw.distribute(model, torch.optim.SGD(trained_ones, lr=0.1), sync="local:every=4"),
    ):
        try:
            attempt()
        except gw.GradwireError as error:
            told.append(str(error))
    optimizer = torch.optim.SGD(trained_ones, lr=0.1)
    gw.distribute(model, optimizer)
    try:
        optimizer.step(lambda: model(batch(0)).mean())
    except gw.UsageError as error:
        told.append(str(error))
    return told


def everything_on_two(world: World) -> dict[str, object]:
    """One world for all of it: a world of processes costs a second."""
    checks = (every_optimizer, resumed, whole_state_loaded, bytes_of_state, with_a_nan, weighted, refused)
    return {check.__name__: check(world) for check in checks}


def everything_on_four(world: World) -> dict[str, object]:
    return {check.__name__: check(world) for check in (resumed, weighted, lossy, bytes_of_state)}
