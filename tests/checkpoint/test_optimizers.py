"""Optimizers go on to the same bits, whatever part of the parameters a rank steps."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.checkpoint.api import load, save
from gradwire.comm.world import World
from gradwire.testing import run_ranks

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "Adam with a tensor as lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01)),
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": lambda params: torch.optim.LBFGS(params, max_iter=3, history_size=2),
}


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    generator = torch.Generator().manual_seed(0)  # ranks are threads: they share the default one
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return made


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


EVERY = [(name, torch.float64) for name in OPTIMIZERS]
EVERY += [(name, torch.bfloat16) for name in OPTIMIZERS if name != "LBFGS"]  # whose line of steps ends in NaN there


@pytest.mark.parametrize(("name", "dtype"), EVERY, ids=lambda each: str(each).removeprefix("torch."))
def test_an_optimizer_goes_on_to_the_same_bits(tmp_path, name, dtype):
    model, again = net(dtype), net(dtype)
    optimizer, fresh = (OPTIMIZERS[name](each.parameters()) for each in (model, again))
    with gw.init():
        for seed in range(3):
            step(model, optimizer, seed)
        save(tmp_path, model, optimizer)
        load(tmp_path, again, fresh)
        assert same(fresh.state_dict(), optimizer.state_dict())
        for seed in range(3, 6):
            step(model, optimizer, seed)
            step(again, fresh, seed)
    assert same(again.state_dict(), model.state_dict())


def test_moments_wider_than_their_parameters_stay_so(tmp_path):
    model = net(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    wide = torch.full((4, 3), 1 / 3)
    optimizer.state[model[0].weight]["momentum_buffer"] = wide
    with gw.init():
        save(tmp_path, model, optimizer)
        fresh = torch.optim.SGD(model.parameters(), momentum=0.9)
        load(tmp_path, model, fresh)
    assert same(fresh.state[model[0].weight]["momentum_buffer"], wide)


def test_loading_replaces_what_an_optimizer_had(tmp_path):
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    with gw.init():
        save(tmp_path, model, optimizer)
        step(model, optimizer, 0)
        load(tmp_path, model, optimizer)
    assert not optimizer.state
    assert same(model.state_dict(), net().state_dict())


def test_several_optimizers_schedulers_scalers_and_averages_go_on(tmp_path):
    def things() -> dict[str, object]:
        model = net()
        optimizers = [
            torch.optim.Adam(model[0].parameters()),
            torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9),
        ]
        step_lr = torch.optim.lr_scheduler.MultiStepLR(optimizers[0], [2, 4])
        warm = torch.optim.lr_scheduler.LinearLR(optimizers[1], total_iters=3)
        then = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[1], 10)
        chain = torch.optim.lr_scheduler.SequentialLR(optimizers[1], [warm, then], [3])
        average = torch.optim.swa_utils.AveragedModel(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        return {
            "model": model, "optimizer": optimizers, "schedulers": [step_lr, chain], "average": average, "scaler": scaler,
        }  # fmt: skip

    def go(of: dict[str, object], seeds: range) -> None:
        for seed in seeds:
            for optimizer, scheduler in zip(of["optimizer"], of["schedulers"], strict=True):
                step(of["model"], optimizer, seed)
                scheduler.step()
            of["average"].update_parameters(of["model"])
            of["scaler"].scale(torch.ones(1))
            of["scaler"].update(float(seed + 1))

    one, other = things(), things()
    with gw.init():
        go(one, range(5))
        save(tmp_path, **one, epoch=2, best=float("inf"), history={0: [1.5, None]}, last=torch.tensor([1, 2]))
        rest = load(tmp_path, **other)
    assert same(rest, {"epoch": 2, "best": float("inf"), "history": {0: [1.5, None]}, "last": torch.tensor([1, 2])})
    go(one, range(5, 9))
    go(other, range(5, 9))
    for name in ("model", "average", "scaler"):
        assert same(one[name].state_dict(), other[name].state_dict()), name
    for mine, theirs in zip(one["schedulers"], other["schedulers"], strict=True):
        assert mine.get_last_lr() == theirs.get_last_lr()


class Stage(nn.Module):
    """Some layers under the names they have in the whole model."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        whole = net()
        for name in names:
            self.add_module(name, whole.get_submodule(name))


def staged(rank: int) -> tuple[Stage, torch.optim.Adam]:
    """A pipeline's: rank 0 steps the first layer, rank 1 the last; biases have a group of their own."""
    stage = Stage(["0"] if rank == 0 else ["2"])
    weights = [param for name, param in stage.named_parameters() if "weight" in name]
    biases = [param for name, param in stage.named_parameters() if "bias" in name]
    groups = [{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.01}]
    return stage, torch.optim.Adam(groups)


def whole_of(names: bool = True) -> tuple[nn.Sequential, torch.optim.Adam]:
    model = net()
    weights = [param for name, param in model.named_parameters() if "weight" in name]
    biases = [param for name, param in model.named_parameters() if "bias" in name]
    return model, torch.optim.Adam([{"params": weights}, {"params": biases}])


def fill(stage: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in stage.parameters():
        param.grad = param.detach() + 1
    optimizer.step()


def test_stages_of_a_pipeline_are_one_model_to_one_process_and_back(tmp_path: Path):
    def write(world: World) -> None:
        stage, optimizer = staged(world.rank)
        fill(stage, optimizer)
        save(tmp_path / "staged", stage, optimizer)

    def read(world: World) -> list[bool]:
        stage, optimizer = staged(world.rank)
        load(tmp_path / "whole", stage, optimizer)
        true, theirs = staged(world.rank)
        fill(true, theirs)
        return [same(stage.state_dict(), true.state_dict()), same(optimizer.state_dict(), theirs.state_dict())]

    run_ranks(2, write, plan=gw.Plan(mesh={"pipeline": 2}))
    model, optimizer = whole_of()
    with gw.init():
        load(tmp_path / "staged", model, optimizer)
        save(tmp_path / "whole", model, optimizer)
    true, theirs = net(), [{"params": [], "lr": 0.1}, {"params": [], "lr": 0.01}]
    for name, param in true.named_parameters():
        theirs["bias" in name]["params"].append(param)
    adam = torch.optim.Adam(theirs)
    fill(true, adam)
    assert same(model.state_dict(), true.state_dict())
    assert same(optimizer.state_dict(), adam.state_dict())
    assert run_ranks(2, read, plan=gw.Plan(mesh={"pipeline": 2})) == [[True, True]] * 2


def test_where_ranks_differ_each_gets_its_own_and_another_world_the_first(tmp_path):
    def write(world: World) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step(model, optimizer, world.rank)
        save(tmp_path, model, optimizer)

    def read(world: World) -> list[bool]:
        model, true = net(), net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        load(tmp_path, model, optimizer)
        theirs = torch.optim.SGD(true.parameters(), lr=0.1, momentum=0.9)
        step(true, theirs, world.rank if world.size == 3 else 0)
        return [same(model.state_dict(), true.state_dict()), same(optimizer.state_dict(), theirs.state_dict())]

    run_ranks(3, write)
    assert run_ranks(3, read) == [[True, True]] * 3
    assert run_ranks(2, read) == [[True, True]] * 2


def test_an_optimizer_may_name_parameters_that_the_model_does_not_hold(tmp_path):
    """As when it steps rows of its own: its groups' ``param_names`` say whose they are."""
    model = net()
    rows = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(list(rows.items()), lr=0.1, momentum=0.9)
    for row in rows.values():
        row.grad = torch.ones_like(row)
    optimizer.step()
    with gw.init():
        save(tmp_path, model, optimizer)
        fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        load(tmp_path, model, fresh)
    for param in model.parameters():
        assert torch.equal(fresh.state[param]["momentum_buffer"], torch.ones_like(param))


def test_a_compiled_model_has_the_names_of_the_plain_one(tmp_path):
    plain, compiled = net(), torch.compile(net())
    with gw.init():
        save(tmp_path, plain, torch.optim.Adam(plain.parameters()))
        load(tmp_path, compiled, torch.optim.Adam(compiled.parameters()))


def test_extra_state_of_a_module_is_kept(tmp_path):
    class Counting(nn.Linear):
        seen: dict[int, object] = {0: 0}  # noqa: RUF012

        def get_extra_state(self):
            return self.seen

        def set_extra_state(self, state):
            self.seen = state

    one, other = Counting(2, 2), Counting(2, 2)
    one.seen = {7: torch.tensor([3.0]), 8: ("a", None)}
    with gw.init():
        save(tmp_path, one)
        load(tmp_path, other)
    assert same(other.seen, one.seen)
    assert copy.deepcopy(other) is not other
