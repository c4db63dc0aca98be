"""Wrong calls of the plan, the world and `distribute`: a typed error at once, naming the thing and what is allowed.

The same table for data stands in tests/data/test_bad_input.py, for the command line and the environment in tests/launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import gradwire as gw
from gradwire.core.partition import Partition
from gradwire.testing import run_ranks


def model() -> nn.Linear:
    return nn.Linear(2, 2)


def sgd(of: nn.Module | None = None) -> torch.optim.SGD:
    return torch.optim.SGD((of or model()).parameters(), lr=0.1)


def distribute(of: object, optimizer: object = None, loader: object = None, plan: object = None) -> None:
    with gw.init():
        gw.distribute(of, sgd(of) if optimizer is None else optimizer, loader, plan=plan)  # type: ignore[arg-type]


def frozen() -> nn.Module:
    return model().requires_grad_(False)


def lazy() -> nn.Module:
    return nn.LazyLinear(2)


def in_world(action: Callable[[gw.World], object]) -> None:
    with gw.init() as world:
        action(world)


def twice() -> None:
    with gw.init():
        gw.init()


sgd()  # torch imports much with the first optimizer; that is not the time measured below
TORCH_LOADER = torch.utils.data.DataLoader(TensorDataset(torch.zeros(4, 2)))

WRONG = {
    "mesh is no mapping": (
        lambda: gw.Plan(mesh=["data"]),
        gw.PlanError,
        r"mesh=\['data'\] must map axis names to sizes",
    ),  # type: ignore[arg-type]
    "unknown axis": (
        lambda: gw.Plan(mesh={"pipe": 2}),
        gw.PlanError,
        "unknown mesh axis 'pipe'; allowed: pipeline, data, shard, tensor",
    ),
    "axis of no ranks": (lambda: gw.Plan(mesh={"data": 0}), gw.PlanError, "mesh data=0 must be a whole number"),
    "axis of half a rank": (lambda: gw.Plan(mesh={"data": 0.5}), gw.PlanError, "data=0.5 must be a whole"),  # type: ignore[dict-item]
    "mesh too large": (lambda: gw.Plan(mesh={"data": 3}).check(2), gw.PlanError, "use data=2 or start 3"),
    "accumulate 0": (lambda: gw.Plan(accumulate=0), gw.PlanError, "accumulate=0 must be a whole number, at least 1"),
    "accumulate True": (lambda: gw.Plan(accumulate=True), gw.PlanError, "accumulate=True must be a whole number"),
    "accumulate 1.5": (lambda: gw.Plan(accumulate=1.5), gw.PlanError, "accumulate=1.5 must be"),  # type: ignore[arg-type]
    "bucket_bytes -1": (lambda: gw.Plan(bucket_bytes=-1), gw.PlanError, "bucket_bytes=-1 must be"),
    "batch_norm": (lambda: gw.Plan(batch_norm="global"), gw.PlanError, "batch_norm='global'; allowed: local, sync"),  # type: ignore[arg-type]
    "on_nonfinite": (lambda: gw.Plan(on_nonfinite="ignore"), gw.PlanError, "allowed: skip, stop"),  # type: ignore[arg-type]
    "two at once": (lambda: gw.Plan(accumulate=0, batch_norm="x"), gw.PlanError, "accumulate=0 .*; batch_norm='x'"),  # type: ignore[arg-type]
    "file: unknown key": (lambda: gw.Plan.from_toml("acumulate = 2"), gw.PlanError, "unknown key 'acumulate'; allowed"),
    "file: no TOML": (
        lambda: gw.Plan.from_toml("accumulate 2", where="p.toml"),
        gw.PlanError,
        "p.toml is not valid TOML",
    ),
    "file: text for number": (lambda: gw.Plan.from_toml("accumulate = '2'"), gw.PlanError, "accumulate='2' must be"),
    "file: bad axis": (lambda: gw.Plan.from_toml("[mesh]\nring = 2"), gw.PlanError, "unknown mesh axis 'ring'"),
    "partition of -1": (lambda: Partition.even(-1, 2), gw.UsageError, "cannot part -1 items"),
    "partition over nobody": (lambda: Partition.even(3, 0), gw.UsageError, "among 0 ranks"),
    "partition weights": (lambda: Partition.proportional(3, [0, 0]), gw.UsageError, "not all zero"),
    "partition weight -1": (lambda: Partition.proportional(3, [2, -1]), gw.UsageError, "not negative"),
    "partition bounds": (lambda: Partition((0, 5, 3)), gw.UsageError, "never fall"),
    "partition index": (lambda: Partition.even(3, 2).owner(3), gw.UsageError, "outside 0..2"),
    "reshard": (lambda: Partition.even(3, 2).reshard(Partition.even(4, 2), 0), gw.UsageError, "reshard 3 items into 4"),
    "no world": (gw.current, gw.UsageError, r"call gw.init\(\) first"),
    "no world for distribute": (lambda: gw.distribute(model(), sgd()), gw.UsageError, r"call gw.init\(\) first"),
    "no world for weight": (lambda: gw.weight(1), gw.UsageError, r"call gw.init\(\) first"),
    "no world for a loader": (lambda: gw.DataLoader(range(4), 2), gw.UsageError, r"call gw.init\(\) first"),
    "init twice": (twice, gw.UsageError, "called twice"),
    "device of nowhere": (lambda: gw.init(device="tpu"), gw.UsageError, "device='tpu'"),
    "device without CUDA": (lambda: gw.init(device="cuda:0"), gw.UsageError, "use device='cpu'"),
    "unknown group": (lambda: in_world(lambda world: world.group("pipe")), gw.UsageError, "allowed: pipeline, data"),
    "sum of a text": (lambda: in_world(lambda world: world.sum("3")), gw.UsageError, "not str"),  # type: ignore[type-var]
    "weight -1": (lambda: in_world(lambda _: gw.weight(-1)), gw.UsageError, "not negative"),
    "weight inf": (lambda: in_world(lambda _: gw.weight(float("inf"))), gw.UsageError, "finite"),
    "weight nan": (lambda: in_world(lambda _: gw.weight(float("nan"))), gw.UsageError, "finite"),
    "model is a list": (lambda: distribute([model()], sgd()), gw.UsageError, "must be a torch.nn.Module, not list"),
    "model is DataParallel": (lambda: distribute(nn.DataParallel(model())), gw.UsageError, "wrapped in DataParallel"),
    "optimizer is a class": (
        lambda: distribute(model(), [torch.optim.SGD]),
        gw.UsageError,
        "must be a torch optimizer",
    ),
    "optimizer is text": (lambda: distribute(model(), "sgd"), gw.UsageError, "must be a torch optimizer, not str"),
    "no optimizer": (lambda: distribute(model(), ()), gw.UsageError, "no optimizer given"),
    "optimizer is a number": (lambda: distribute(model(), 3), gw.UsageError, "torch optimizer, not int"),
    "foreign optimizer": (lambda: distribute(model(), sgd()), gw.UsageError, "that is not in the model"),
    "torch loader": (lambda: distribute(model(), loader=TORCH_LOADER), gw.UsageError, r"use gw.DataLoader.*gw.shard"),
    "all frozen": (lambda: distribute(frozen()), gw.UsageError, "nothing would be trained"),
    "lazy": (lambda: distribute(lazy(), sgd()), gw.UsageError, "run one forward before"),
    "meta": (lambda: distribute(nn.Linear(2, 2, device="meta")), gw.UsageError, "on the meta device"),
    "plan is text": (
        lambda: distribute(model(), plan="accumulate = 2"),
        gw.UsageError,
        "plan must be a gw.Plan, not str",
    ),
    "plan of another world": (lambda: distribute(model(), plan=gw.Plan(mesh={"data": 2})), gw.PlanError, "use data=1"),
    "no such name": (lambda: gw.Dataloader, AttributeError, "no attribute 'Dataloader'; it has"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_call_is_refused_at_once_by_name(wrong: str) -> None:
    call, kind, words = WRONG[wrong]
    began_s = time.monotonic()
    with pytest.raises(kind, match=words):
        call()
    assert time.monotonic() - began_s < 2.0


def test_a_world_can_be_opened_again_after_a_wrong_call() -> None:
    with pytest.raises(gw.UsageError):
        gw.init(device="tpu")
    with gw.init() as world:
        assert world.size == 1


def test_a_plan_of_another_world_is_refused_on_every_rank() -> None:
    def run(world: gw.World) -> str:
        of = model()
        with pytest.raises(gw.PlanError) as caught:
            gw.distribute(of, sgd(of), plan=gw.Plan(mesh={"data": 3}))
        return str(caught.value)

    assert set(run_ranks(2, run)) == {"mesh data=3 needs 3 ranks, the launcher started 2; use data=2 or start 3"}


@pytest.mark.parametrize(
    "plan", [gw.Plan(), gw.Plan(accumulate=3, bucket_bytes=7, batch_norm="sync", mesh={"data": 2})]
)
def test_a_plan_survives_its_file(plan: gw.Plan) -> None:
    assert gw.Plan.from_toml(plan.to_toml()) == plan
