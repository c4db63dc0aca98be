"""Policies that agree less often, later, or on parameters: against plain PyTorch that does the same by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import gradwire as gw
from gradwire.comm.world import World
from gradwire.core.outer import Nesterov
from gradwire.core.policies import Accumulate, Delayed, EveryStep, LocalSteps
from gradwire.testing import run_ranks

BATCH = 12
STEPS = 11
SIZES = [2, 3, 4]


def data(last: int = 0) -> tuple[Tensor, Tensor]:
    """STEPS batches; the last one has ``last`` samples less."""
    generator = torch.Generator().manual_seed(3)
    count = STEPS * BATCH - last
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(count, 2, generator=generator, dtype=torch.float64)


torch.manual_seed(1)  # here, because ranks are threads and the generator is theirs together
MODEL = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def model() -> nn.Module:
    return copy.deepcopy(MODEL)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def batches(last: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = data(last)
    yield from zip(x.split(BATCH), y.split(BATCH), strict=True)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    nn.functional.mse_loss(module(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(module: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


def train(world: World, plan: gw.Plan, last: int = 0, make=sgd) -> list[Tensor]:
    module = model()
    optimizer = make(module)
    loader = gw.DataLoader(TensorDataset(*data(last)), BATCH, shuffle=False)
    gw.distribute(module, optimizer, loader, plan=plan)
    for x, y in loader:
        step(module, optimizer, x, y)
    return weights(module)


def assert_close(ours: list[Tensor], truth: list[Tensor]) -> None:
    for mine, other in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def assert_replicas(ranks: list[list[Tensor]]) -> None:
    for rank in ranks[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(rank, ranks[0], strict=True))


# --- accumulate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, *SIZES])
@pytest.mark.parametrize("micro", [1, 2])
def test_accumulated_batches_are_one_larger_batch(num_ranks: int, micro: int) -> None:
    plan = gw.Plan(sync=Accumulate(every=3), accumulate=micro)
    ranks = run_ranks(num_ranks, lambda world: train(world, plan))
    single, pending = model(), list(batches())
    optimizer = sgd(single)
    for start in range(0, STEPS - STEPS % 3, 3):
        x, y = (torch.cat(parts) for parts in zip(*pending[start : start + 3], strict=True))
        step(single, optimizer, x, y)
    assert_replicas(ranks)
    assert_close(ranks[0], weights(single))


# --- delayed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("bucket_bytes", [None, 64])
def test_a_delayed_gradient_is_that_of_the_batch_before(num_ranks: int, bucket_bytes: int | None) -> None:
    ranks = run_ranks(num_ranks, lambda world: train(world, gw.Plan(sync=Delayed(), bucket_bytes=bucket_bytes)))
    single = model()
    optimizer = sgd(single)
    late: list[Tensor] | None = None
    for x, y in batches():
        nn.functional.mse_loss(single(x), y).backward()
        fresh = [param.grad for param in single.parameters()]
        for param, grad in zip(single.parameters(), late or [None] * len(fresh), strict=True):
            param.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        late = fresh  # pyright: ignore
    assert_replicas(ranks)
    assert_close(ranks[0], weights(single))


def test_one_process_does_not_delay() -> None:
    (ours,) = run_ranks(1, lambda world: train(world, gw.Plan(sync=Delayed())))
    single = model()
    optimizer = sgd(single)
    for x, y in batches():
        step(single, optimizer, x, y)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, weights(single), strict=True))


# --- local steps -----------------------------------------------------------------------------------------------------


def parts(x: Tensor, num_ranks: int, accumulate: int = 1) -> list[Tensor]:
    """What gradwire's even split gives each rank of a batch: its part of every micro-batch."""
    cut = [micro.tensor_split(num_ranks) for micro in x.tensor_split(min(accumulate, len(x)))]
    return [torch.cat(each) for each in zip(*cut, strict=True)]


def local_truth(policy: LocalSteps, num_ranks: int, last: int = 0, accumulate: int = 1) -> list[list[Tensor]]:
    """Every rank's weights after local steps, by hand, one rank after another in one process."""
    models = [model() for _ in range(num_ranks)]
    optimizers = [sgd(each) for each in models]
    anchor, outer = weights(models[0]), policy.outer
    velocity = [torch.zeros_like(each) for each in anchor]
    assert isinstance(outer, Nesterov)
    counts = [0] * num_ranks
    for number, (x, y) in enumerate(batches(last)):
        if number < policy.exact_steps:
            for each, optimizer in zip(models, optimizers, strict=True):
                step(each, optimizer, x, y)
            anchor = weights(models[0])
            continue
        split = zip(parts(x, num_ranks, accumulate), parts(y, num_ranks, accumulate), strict=True)
        for rank, (mine_x, mine_y) in enumerate(split):
            if len(mine_x):
                step(models[rank], optimizers[rank], mine_x, mine_y)
            counts[rank] += len(mine_x)
        if (number - policy.exact_steps) % policy.every < policy.every - 1:
            continue
        whole = sum(counts)
        for index, global_value in enumerate(anchor):
            own = [list(each.parameters())[index].detach() for each in models]
            delta = sum((global_value - value) * (count / whole) for value, count in zip(own, counts, strict=True))
            velocity[index] = outer.momentum * velocity[index] + delta
            anchor[index] = global_value - outer.lr * (delta + outer.momentum * velocity[index])
        counts = [0] * num_ranks
        for each in models:
            for param, value in zip(each.parameters(), anchor, strict=True):
                param.data.copy_(value)
    return [weights(each) for each in models]


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("last", [0, BATCH - 2])
@pytest.mark.parametrize(
    "policy",
    [
        LocalSteps(every=1, outer=Nesterov(lr=1.0, momentum=0.0), exact_steps=0),
        LocalSteps(every=3, exact_steps=2),
        LocalSteps(every=4, exact_steps=0),
    ],
    ids=["average", "after exact steps", "nesterov"],
)
def test_local_steps_do_what_one_process_does_by_hand(num_ranks: int, policy: LocalSteps, last: int) -> None:
    ranks = run_ranks(num_ranks, lambda world: train(world, gw.Plan(sync=policy), last))
    for mine, truth in zip(ranks, local_truth(policy, num_ranks, last), strict=True):
        assert_close(mine, truth)


def test_local_steps_with_micro_batches_take_the_same_steps() -> None:
    policy = LocalSteps(every=3, exact_steps=2)
    ranks = run_ranks(2, lambda world: train(world, gw.Plan(sync=policy, accumulate=3), 4))
    for mine, truth in zip(ranks, local_truth(policy, 2, 4, accumulate=3), strict=True):
        assert_close(mine, truth)


def test_sgd_averaged_after_every_local_step_is_exact() -> None:
    """Without momentum the mean of the ranks' steps is the step of the mean gradient."""
    policy = LocalSteps(every=1, outer=Nesterov(lr=1.0, momentum=0.0), exact_steps=0)
    plain = lambda module: torch.optim.SGD(module.parameters(), lr=0.1)  # noqa: E731
    ranks = run_ranks(3, lambda world: train(world, gw.Plan(sync=policy), 10, plain))
    single = model()
    optimizer = plain(single)
    for x, y in batches(10):
        step(single, optimizer, x, y)
    assert_replicas(ranks)
    assert_close(ranks[0], weights(single))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_late_agreement_keeps_the_steps_made_meanwhile(num_ranks: int) -> None:
    policy = LocalSteps(every=4, exact_steps=0, late=2)
    ranks = run_ranks(num_ranks, lambda world: train(world, gw.Plan(sync=policy)))
    assert isinstance(policy.outer, Nesterov)
    models = [model() for _ in range(num_ranks)]
    optimizers = [sgd(each) for each in models]
    anchor, velocity = weights(models[0]), [torch.zeros_like(each) for each in weights(models[0])]
    sent: list[list[Tensor]] = []
    for number, (x, y) in enumerate(batches()):
        for each, optimizer, own_x, own_y in zip(
            models, optimizers, parts(x, num_ranks), parts(y, num_ranks), strict=True
        ):
            step(each, optimizer, own_x, own_y)
        if sent and number % 4 == 1:
            for index in range(len(anchor)):
                delta = sum(anchor[index] - own[index] for own in sent) / num_ranks
                velocity[index] = policy.outer.momentum * velocity[index] + delta
                anchor[index] = anchor[index] - policy.outer.lr * (delta + policy.outer.momentum * velocity[index])
                for each, own in zip(models, sent, strict=True):
                    list(each.parameters())[index].data.add_(anchor[index] - own[index])
            sent = []
        if number % 4 == 3:
            sent = [weights(each) for each in models]
    for mine, each in zip(ranks, models, strict=True):
        assert_close(mine, weights(each))


@pytest.mark.parametrize("fragments", [2, 3])
def test_fragments_are_agreed_in_turn_and_none_is_forgotten(fragments: int) -> None:
    policy = LocalSteps(every=3, exact_steps=0, fragments=fragments, outer=Nesterov(lr=1.0, momentum=0.0))

    def body(world: World) -> list[list[bool]]:
        module = model()
        optimizer = sgd(module)
        loader = gw.DataLoader(TensorDataset(*data()), BATCH, shuffle=False)
        gw.distribute(module, optimizer, loader, plan=gw.Plan(sync=policy))
        equal = []
        for x, y in loader:
            step(module, optimizer, x, y)
            rows = [world.group().all_gather(param.detach()) for param in module.parameters()]
            equal.append([bool((row == row[0]).all()) for row in rows])
        return equal

    equal = run_ranks(2, body)[0]
    for start in range(0, 9, 3):
        agreed = [sum(row) for row in equal[start : start + 3]]
        assert sorted(agreed) == sorted([0] * (3 - fragments) + [4 // fragments] * fragments) or sum(agreed) == 4
        assert all(any(row[param] for row in equal[start : start + 3]) for param in range(4))


@pytest.mark.parametrize(
    ("outer", "right"), [(Nesterov(lr=1.0, momentum=0.0), 7.0), (Nesterov(lr=0.7, momentum=0.9), 6.01)]
)
def test_case_18_the_outer_gradient_is_global_minus_local(outer: Nesterov, right: float) -> None:
    def body(world: World) -> float:
        module = nn.Linear(1, 1, bias=False).double()
        module.weight.data.fill_(10.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        gw.distribute(module, optimizer, sync=LocalSteps(every=1, outer=outer, exact_steps=0))
        module.weight.sum().mul([2.0, 4.0][world.rank]).backward()  # locals 8 and 6
        optimizer.step()
        return float(module.weight)

    assert run_ranks(2, body) == [pytest.approx(right, abs=1e-12)] * 2


def test_a_nan_in_local_parameters_sends_all_ranks_back_to_those_agreed_last() -> None:
    def body(world: World) -> tuple[list[Tensor], list[Tensor]]:
        module = model()
        optimizer = sgd(module)
        gw.distribute(module, optimizer, sync=LocalSteps(every=2, exact_steps=0))
        before = weights(module)
        for number, (x, y) in enumerate(batches()):
            if number == 2:
                break
            step(module, optimizer, x, y)
            if number == 0 and world.rank == 1:
                next(module.parameters()).data[0, 0] = float("nan")
        return before, weights(module)

    for before, after in run_ranks(2, body):
        assert all(torch.equal(mine, other) for mine, other in zip(before, after, strict=True))


def test_a_nan_gradient_skips_the_local_step_of_its_rank_only() -> None:
    def body(world: World) -> bool:
        module = model()
        optimizer = sgd(module)
        gw.distribute(module, optimizer, sync=LocalSteps(every=50, exact_steps=0))
        before = weights(module)
        x, y = next(batches())
        step(module, optimizer, x * (float("nan") if world.rank == 1 else 1.0), y)
        after = weights(module)
        return all(torch.equal(mine, other) for mine, other in zip(before, after, strict=True))

    assert run_ranks(3, body) == [False, True, False]


def test_local_steps_average_batch_norms_statistics() -> None:
    def body(world: World) -> Tensor:
        module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        optimizer = sgd(module)
        gw.distribute(module, optimizer, sync=LocalSteps(every=2, exact_steps=0))
        for _ in range(2):
            module(torch.randn(8, 2, generator=torch.Generator().manual_seed(world.rank))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return module[1].running_mean.clone()  # pyright: ignore

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


def test_a_closure_is_refused_under_local_steps() -> None:
    def body(world: World) -> None:
        module = model()
        optimizer = torch.optim.LBFGS(module.parameters())
        gw.distribute(module, optimizer, sync="local:every=4")
        optimizer.step(lambda: module(torch.ones(1, 5).double()).sum())  # pyright: ignore

    with pytest.raises(AssertionError, match="closure"):
        run_ranks(2, body)


# --- kept and resumed ------------------------------------------------------------------------------------------------

PLANS = {
    "exact": gw.Plan(),
    "delayed": gw.Plan(sync=Delayed(), bucket_bytes=64),
    "local": gw.Plan(sync=LocalSteps(every=4, exact_steps=1), bucket_bytes=64),
    "late": gw.Plan(sync=LocalSteps(every=4, exact_steps=1, late=2)),
    "fragments": gw.Plan(sync=LocalSteps(every=4, exact_steps=1, fragments=2)),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("stop", [3, 6])
def test_a_resumed_run_goes_on_with_the_same_bits(plan: gw.Plan, stop: int) -> None:
    def body(world: World) -> tuple[list[Tensor], list[Tensor]]:
        module, resumed = model(), model()
        optimizer = sgd(module)
        loader = gw.DataLoader(TensorDataset(*data()), BATCH, shuffle=False)
        training = gw.distribute(module, optimizer, loader, plan=plan)
        kept = None
        for number, (x, y) in enumerate(loader):
            step(module, optimizer, x, y)
            if number == stop:
                kept = copy.deepcopy(
                    (module.state_dict(), optimizer.state_dict(), loader.state_dict(), training.state_dict())
                )
        assert kept is not None
        again = sgd(resumed)
        loader = gw.DataLoader(TensorDataset(*data()), BATCH, shuffle=False)
        training = gw.distribute(resumed, again, loader, plan=plan)
        resumed.load_state_dict(kept[0])
        again.load_state_dict(kept[1])
        loader.load_state_dict(kept[2])
        training.load_state_dict(kept[3])
        for x, y in loader:
            step(resumed, again, x, y)
        return weights(module), weights(resumed)

    for through, resumed in run_ranks(2, body):
        assert all(torch.equal(mine, other) for mine, other in zip(through, resumed, strict=True))


@pytest.mark.parametrize("new_size", [2, 4])  # one process has no local steps: it loads the model's own state_dict
def test_local_state_is_shared_out_to_another_world_size(new_size: int) -> None:
    plan = gw.Plan(sync=LocalSteps(every=50, exact_steps=0))

    def before(world: World):
        module = model()
        training = gw.distribute(module, optimizer := sgd(module), plan=plan)
        for number, (x, y) in enumerate(batches()):
            if number < 3:
                step(module, optimizer, parts(x, 3)[world.rank], parts(y, 3)[world.rank])
        return training.state_dict(), weights(module)

    kept = run_ranks(3, before)
    states = [state for state, _ in kept]
    mean = [torch.stack(each).mean(0) for each in zip(*(own for _, own in kept), strict=True)]

    def after(world: World) -> list[Tensor]:
        module = model()
        training = gw.distribute(module, sgd(module), plan=plan)
        training.load_state_dict(*states)
        return weights(module)

    for own in run_ranks(new_size, after):
        assert_close(own, mean)


def test_state_of_another_plan_or_model_is_refused() -> None:
    def body(world: World) -> None:
        module = model()
        training = gw.distribute(module, sgd(module))
        state = training.state_dict()
        with pytest.raises(gw.MismatchError, match="kept under sync q4"):
            training.load_state_dict({**state, "sync": "q4"})
        with pytest.raises(gw.MismatchError, match="other parameters"):
            training.load_state_dict({**state, "parameters": ["w"]})
        with pytest.raises(gw.UsageError, match="give the states of all 3 ranks"):
            training.load_state_dict({**state, "world_size": 3})
        with pytest.raises(gw.UsageError, match="no state given"):
            training.load_state_dict()

    run_ranks(2, body)


def test_policies_say_what_is_wrong_with_their_settings() -> None:
    for make, words in [
        (lambda: LocalSteps(every=0), "every=0"),
        (lambda: LocalSteps(every=4, fragments=5), "must not be above every=4"),
        (lambda: LocalSteps(every=4, late=4), "must be below every=4"),
        (lambda: LocalSteps(every=4, exact_steps=-1), "exact_steps=-1"),
        (lambda: Accumulate(every=0), "every=0"),
        (lambda: Nesterov(lr=0.0), "lr=0.0"),
        (lambda: Nesterov(momentum=1.0), "momentum=1.0"),
        (lambda: gw.Plan(sync="local"), "needs every="),
        (lambda: replace(gw.Plan(), sync="q5"), "unknown name 'q5'"),
        (lambda: gw.Plan(sync="local:every=4,codec=local"), "codec=local must be one of"),
        (lambda: gw.Plan(sync="topk:ratio=2"), "ratio=2 must be a share"),
        (lambda: gw.Plan(sync="local:every=4,codec=topk(ratio=0.1"), "a bracket is not closed"),
        (lambda: gw.Plan(sync="local:every=4,codec=topk(ratio=0.1))"), "a bracket too many is closed; options of"),
        (lambda: gw.Plan(sync="topk(ratio=0.01))"), "a bracket too many is closed; write topk:ratio=0.01$"),
        (lambda: gw.Plan(sync="topk(ratio=0.01"), "a bracket is not closed; write topk:ratio=0.01$"),
        (lambda: gw.Plan(sync="q4,exact_steps=3"), "write q4:exact_steps=3; allowed"),
        (lambda: gw.Plan(sync="local every=8"), "write local:every=8; allowed"),
        (lambda: gw.Plan(sync="local(every=8)"), "write local:every=8; allowed"),
        (lambda: gw.Plan(sync="topk(ratio=2)"), "write topk:KEY=VALUE; allowed"),
        (lambda: gw.Plan(sync="local:every=99999999999999999999"), "at least 1 and at most 999,999,999"),
        (lambda: gw.Plan(sync="q4:,"), "'' is not KEY=VALUE"),
        (lambda: gw.Plan(sync="q4:exact_steps=3,,"), "'' is not KEY=VALUE"),
        (lambda: gw.Plan(sync="Q4"), "unknown name 'Q4'; perhaps q4"),
        (lambda: gw.Plan(sync="lowrank(rank=4)"), "write lowrank:rank=4"),
        (
            lambda: gw.Plan(sync=cast("Any", 4)),
            "sync=4 says neither when nor how to agree; it must be a text such as 'q4'",
        ),
        (lambda: gw.Plan.from_toml("[sync]\ncodec = 'q4'", where="p.toml"), "p.toml: sync={'codec': 'q4'}"),
        (lambda: gw.Plan(sync=cast("Any", LocalSteps)), r"make one: LocalSteps\(...\)"),
        (lambda: gw.Plan(sync=cast("Any", gw.AllReduce)), r"make one: AllReduce\(...\)"),
        (lambda: gw.Plan(sync=cast("Any", gw.Quantize(bits=4))), "wrap it: ErrorFeedback"),
        (lambda: LocalSteps(every=2, reducer=cast("Any", "q4")), "a text stands only for sync itself"),
        (lambda: Delayed(reducer=cast("Any", gw.Quantize(bits=4))), "wrap it: ErrorFeedback"),
        (lambda: EveryStep(reducer=cast("Any", gw.AllReduce)), r"make one: AllReduce"),
        (lambda: Accumulate(every=2, reducer=cast("Any", LocalSteps(every=2))), "a policy says when, not how"),
        (lambda: LocalSteps(every=2, outer=cast("Any", "nesterov")), "must be an outer step such as Nesterov"),
        (lambda: Nesterov(lr=cast("Any", "1")), "lr='1'"),
        (lambda: gw.ByName({"a": cast("Any", "q4")}, other=gw.AllReduce()), "a text stands only for sync itself"),
    ]:
        with pytest.raises((gw.UsageError, gw.PlanError), match=words):
            make()


def test_once_is_said_in_the_singular() -> None:
    assert "every local step after 1 exact step (" in LocalSteps(every=1, exact_steps=1).words()
    assert "every 2 local steps, taken 1 step late (" in LocalSteps(every=2, late=1, exact_steps=0).words()
    assert Accumulate(every=1).words().endswith("every batch, which is one step")


def test_spaces_in_a_text_do_not_make_another_plan() -> None:
    assert gw.Plan(sync=" local: every=4, codec=q4 ") == gw.Plan(sync="local:every=4,codec=q4")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_pattern_that_matches_nothing_is_refused(num_ranks: int) -> None:
    def body(world: World) -> bool:
        model = nn.Linear(2, 1)
        rule = gw.ByName({"wieght": gw.AllReduce()}, other=gw.AllReduce())
        with pytest.raises(gw.UsageError, match="'wieght' matches no trained parameter; there are weight, bias"):
            gw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), sync=rule)
        return True

    assert all(run_ranks(num_ranks, body))
