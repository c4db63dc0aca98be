"""Rows of the public bug reports: loss 0.5 (w - y)^2 at w = 0, so that the gradient is minus the mean of y."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.comm.world import World
from gradwire.testing import ListSource, RankError, run_ranks


class Scalar(nn.Module):
    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def forward(self, y: Tensor) -> Tensor:
        return (0.5 * (self.w - y) ** 2).mean()


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def distributed_scalar(plan: gw.Plan | None = None) -> tuple[Scalar, torch.optim.SGD]:
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gw.distribute(model, optimizer, plan=plan)
    return model, optimizer


@pytest.mark.parametrize("by_hand", [True, False])
def test_case_1_token_weighted_window_is_one_mean(by_hand: bool) -> None:
    micros = [[tensor(1), tensor(1, 1, 1)], [tensor(5, 5), tensor(*[9] * 6)]]

    def run(world: World) -> float:
        model, _ = distributed_scalar()
        first, last = micros[world.rank]
        if by_hand:
            with gw.no_sync():
                gw.weight(len(first))
                model(first).backward()
            gw.weight(len(last))
            model(last).backward()
        else:
            whole = torch.cat([first, last])
            gw.weight(len(whole))
            model(whole).backward()
        return float(model.w.grad)

    assert run_ranks(2, run) == [pytest.approx(-68 / 12)] * 2


def test_case_1_alone_gives_the_same_window_mean() -> None:
    def run(world: World) -> float:
        model, _ = distributed_scalar()
        with gw.no_sync():
            for y in (tensor(1), tensor(1, 1, 1), tensor(5, 5)):
                gw.weight(len(y))
                model(y).backward()
        gw.weight(6)
        model(tensor(*[9] * 6)).backward()
        return float(model.w.grad)

    assert run_ranks(1, run) == [pytest.approx(-68 / 12)]


def test_case_2_unequal_counts_are_weighted_by_samples() -> None:
    def run(world: World) -> float:
        model = Scalar()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        source = ListSource([(tensor(0, 0, 3),)], world)
        gw.distribute(model, optimizer, source)
        for (y,) in source:
            model(y).backward()
        return float(model.w.grad)

    assert run_ranks(2, run) == [-1.0, -1.0]


def test_case_3_no_sync_window_is_the_mean_of_local_sums() -> None:
    sums = [(1.0, 3.0), (2.0, 5.0)]

    def run(world: World) -> float:
        model, _ = distributed_scalar()
        first, last = sums[world.rank]
        with gw.no_sync():
            model(tensor(-first)).backward()
            assert float(model.w.grad) == first  # this rank's own, as torch's no_sync leaves it
        model(tensor(-last)).backward()
        return float(model.w.grad)

    assert run_ranks(2, run) == [5.5, 5.5]


def test_case_7_a_schedule_steps_once_per_step_whatever_the_world() -> None:
    def run(world: World) -> list[float]:
        model, optimizer = distributed_scalar()
        optimizer.param_groups[0]["lr"] = 1.0
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.1)
        rates = []
        for _ in range(10):
            model(tensor(1)).backward()
            optimizer.step()
            schedule.step()
            rates.append(schedule.get_last_lr()[0])
        return [rates[4], rates[9]]

    assert run_ranks(4, run) == [pytest.approx([0.1, 0.01])] * 4


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_case_9_a_nan_on_one_rank_skips_the_step_on_all(num_ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    def run(world: World) -> tuple[list[float], dict[str, Tensor]]:
        model = Scalar()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        gw.distribute(model, optimizer)
        after = []
        for step in range(1, 5):
            y = tensor(float("nan")) if step == 3 and world.rank == 1 else tensor(2)
            model(y).backward()
            optimizer.step()
            optimizer.zero_grad()
            after.append(float(model.w.detach()))
            if step == 2:
                state = {name: value.clone() for name, value in optimizer.state[model.w].items()}
            if step == 3:
                assert all(torch.equal(optimizer.state[model.w][name], value) for name, value in state.items())
        return after, {}

    results = run_ranks(num_ranks, run)
    weights = results[0][0]
    assert weights[2] == weights[1] != weights[3]
    assert all(result[0] == weights for result in results)
    told = capsys.readouterr().out
    assert told.count("skipped on all ranks") == 1
    assert "rank 1: w" in told


def test_case_9_stop_raises_on_all_ranks_naming_rank_and_parameter() -> None:
    def run(world: World) -> str:
        model, optimizer = distributed_scalar(gw.Plan(on_nonfinite="stop"))
        model(tensor(float("inf")) if world.rank == 1 else tensor(1)).backward()
        with pytest.raises(gw.NonFiniteError) as caught:
            optimizer.step()
        assert float(model.w) == 0.0
        return str(caught.value)

    assert all("rank 1: w" in text for text in run_ranks(2, run))


def test_case_10_a_parameter_never_used_is_not_decayed() -> None:
    def run(world: World) -> float:
        model = nn.ParameterDict({"used": torch.zeros(1), "unused": torch.ones(1)})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
        gw.distribute(model, optimizer)
        model["used"].sum().backward()
        assert model["unused"].grad is None
        optimizer.step()
        return float(model["unused"])

    assert run_ranks(2, run) == [1.0, 1.0]


@pytest.mark.parametrize("used_on", [0, 1])
def test_case_11_unused_on_one_rank_counts_as_zero(used_on: int) -> None:
    def run(world: World) -> float:
        model = nn.ParameterDict({"a": torch.zeros(1), "b": torch.zeros(1)})
        gw.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
        (model["a"] * 4 if world.rank == used_on else model["b"] * 2).sum().backward()
        return float(model["a"].grad)

    assert run_ranks(2, run) == [2.0, 2.0]


def test_case_11_a_rank_that_touches_no_parameter_joins_at_its_step() -> None:
    def run(world: World) -> float:
        model, optimizer = distributed_scalar()
        if world.rank == 0:
            model(tensor(-4)).backward()
        optimizer.step()
        return float(model.w.detach())

    assert run_ranks(2, run) == [-2.0, -2.0]


def test_case_12_models_in_another_order_are_refused_naming_both() -> None:
    def run(world: World) -> str:
        names = ["a", "b"] if world.rank == 0 else ["b", "a"]
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in names})
        with pytest.raises(gw.MismatchError) as caught:
            gw.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
        return str(caught.value)

    for text in run_ranks(2, run):
        assert "rank 0 has a.weight" in text
        assert "rank 1 has b.weight" in text


def test_case_13_half_precision_is_divided_before_it_is_summed() -> None:
    def run(world: World) -> float:
        model = nn.ParameterDict({"w": torch.zeros(1, dtype=torch.float16)})
        gw.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
        (model["w"] * torch.tensor(40000.0, dtype=torch.float16)).sum().backward()
        return float(model["w"].grad)

    assert run_ranks(2, run) == [40000.0, 40000.0]


def test_case_16_a_tied_parameter_has_one_gradient_and_one_storage() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor([3.0]))
            self.b = self.a

        def forward(self, x: float) -> Tensor:
            return (self.a * self.b * x).sum()

    def run(world: World) -> float:
        model = Tied()
        gw.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
        model(2.0).backward()
        assert model.a is model.b
        return float(model.a.grad)

    assert run_ranks(2, run) == [12.0, 12.0]


@pytest.mark.parametrize("rule", ["local", "sync"])
def test_case_20_running_mean_is_equal_on_all_ranks(rule: str) -> None:
    def run(world: World) -> float:
        model = nn.BatchNorm1d(1, momentum=0.1)
        wrapper = nn.Sequential(model)
        gw.distribute(wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.1), plan=gw.Plan(batch_norm=rule))
        x = torch.full((4, 1), 10.0 * world.rank)
        wrapper(x).sum().backward()
        return float(wrapper[0].running_mean)

    assert run_ranks(2, run) == [pytest.approx(0.5)] * 2


def test_replicas_stop_by_name_when_one_rank_has_another_dtype() -> None:
    def run(world: World) -> None:
        model = nn.Linear(2, 2).to(torch.float64 if world.rank else torch.float32)
        gw.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))

    with pytest.raises(
        RankError, match=r"rank 0 has weight \(2, 2\) float32 trained, rank 1 has weight \(2, 2\) float64"
    ):
        run_ranks(2, run)


def test_no_warning_is_left_behind() -> None:
    def run(world: World) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model, optimizer = distributed_scalar()
            model(tensor(1)).backward()
            optimizer.step()
        return len(caught)

    assert run_ranks(1, run) == [0]
