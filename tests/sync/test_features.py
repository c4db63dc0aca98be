"""What people do between `backward()` and `step()`, and to their models: each against one plain process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from gradwire.comm.world import World
from gradwire.testing import ListSource, RankError, run_ranks

X = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.randn(24, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
BATCHES = [(X[:8], Y[:8]), (X[8:13], Y[8:13]), (X[13:], Y[13:])]


def mlp() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype) * 0.5)
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def mean_square(model: nn.Module, x: Tensor, y: Tensor) -> None:
    F.mse_loss(model(x), y).backward()


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, batches, backward=mean_square, **zeroing: bool) -> Tensor:
    """The loop of a user: the same lines for one plain process and for a rank."""
    for batch in batches:
        backward(model, *batch)
        optimizer.step()
        optimizer.zero_grad(**zeroing)
    return vector(model)


def fit_ranks(num_ranks: int, build, make, batches, backward=mean_square, plan: gw.Plan | None = None, **zeroing: bool):
    """`fit` on every rank of a world: its weights, rank by rank."""

    def run(world: World) -> Tensor:
        model = build()
        optimizer = make(model)
        source = ListSource(batches, world)
        gw.distribute(model, optimizer, source, plan=plan)
        return fit(model, optimizer, source, backward, **zeroing)

    return run_ranks(num_ranks, run, timeout_s=120)


def assert_same(results: list[Tensor], truth: Tensor) -> None:
    for result in results:
        assert torch.equal(result, results[0])
        torch.testing.assert_close(result, truth, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_several_backwards_before_one_step_add_up(num_ranks: int) -> None:
    def twice(model: nn.Module, x: Tensor, y: Tensor) -> None:
        mean_square(model, x, y)
        (model(x) ** 2).mean().backward()

    model = mlp()
    truth = fit(model, sgd(model), BATCHES, twice)
    assert_same(fit_ranks(num_ranks, mlp, sgd, BATCHES, twice, gw.Plan(bucket_bytes=128)), truth)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_either_way(set_to_none: bool) -> None:
    model = mlp()
    truth = fit(model, sgd(model), BATCHES)
    assert_same(fit_ranks(2, mlp, sgd, BATCHES, set_to_none=set_to_none), truth)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_sync_by_hand_equals_the_sum_of_means(num_ranks: int) -> None:
    model = mlp()
    optimizer = sgd(model)
    for _ in range(2):
        for x, y in BATCHES:
            (F.mse_loss(model(x), y) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()

    def run(world: World) -> Tensor:
        ours = mlp()
        steps = sgd(ours)
        source = ListSource(BATCHES, world)
        gw.distribute(ours, steps, source)
        for _ in range(2):
            for index, (x, y) in enumerate(source):
                if index < 2:
                    with gw.no_sync():
                        (F.mse_loss(ours(x), y) / 3).backward()
                else:
                    (F.mse_loss(ours(x), y) / 3).backward()
            steps.step()
            steps.zero_grad()
        return vector(ours)

    assert_same(run_ranks(num_ranks, run), vector(model))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [2, 3])
def test_a_window_that_is_short_is_scaled_rightly(num_ranks: int, accumulate: int) -> None:
    batches = [(X[:7], Y[:7]), (X[7:8], Y[7:8]), (X[8:10], Y[8:10])]
    model = mlp()
    truth = fit(model, sgd(model), batches)
    assert_same(fit_ranks(num_ranks, mlp, sgd, batches, plan=gw.Plan(accumulate=accumulate)), truth)


def test_the_weights_move_at_a_windows_last_microbatch_only() -> None:
    def run(world: World) -> list[bool]:
        model = mlp()
        optimizer = sgd(model)
        source = ListSource(BATCHES, world)
        gw.distribute(model, optimizer, source, plan=gw.Plan(accumulate=2))
        moved = []
        for x, y in source:
            before = vector(model)
            fit(model, optimizer, [(x, y)])
            moved.append(not torch.equal(vector(model), before))
        return moved

    assert run_ranks(2, run) == [[False, True] * len(BATCHES)] * 2


def test_two_optimizers_over_one_model_and_two_models() -> None:
    def game(
        generator: nn.Module, critic: nn.Module, a: torch.optim.Optimizer, b: torch.optim.Optimizer, batches
    ) -> Tensor:
        for x, y in batches:
            critic(generator(x).repeat(1, 4)).mean().backward()
            a.step()
            a.zero_grad()
            b.zero_grad()
            (critic(generator(x).detach().repeat(1, 4)) - critic(y.repeat(1, 4))).square().mean().backward()
            b.step()
            b.zero_grad()
        return torch.cat([vector(generator), vector(critic)])

    first, second = mlp(), mlp()
    truth = game(first, second, sgd(first), sgd(second), BATCHES)

    def run(world: World) -> Tensor:
        one, two = mlp(), mlp()
        a, b = sgd(one), sgd(two)
        source = ListSource(BATCHES, world)
        gw.distribute(one, a, source)
        gw.distribute(two, b, source)
        return game(one, two, a, b, source)

    assert_same(run_ranks(2, run), truth)

    def halves(model: nn.Sequential) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model[:2].parameters(), lr=0.1), torch.optim.Adam(model[2:].parameters(), eps=1e-3)]

    def train(model: nn.Sequential, optimizers: list[torch.optim.Optimizer], batches) -> Tensor:
        for x, y in batches:
            F.mse_loss(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return vector(model)

    alone = mlp()
    truth = train(alone, halves(alone), BATCHES)

    def run_halves(world: World) -> Tensor:
        ours = mlp()
        optimizers = halves(ours)
        source = ListSource(BATCHES, world)
        gw.distribute(ours, optimizers, source)
        return train(ours, optimizers, source)

    assert_same(run_ranks(2, run_halves), truth)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    def backward(model: nn.Sequential, x: Tensor, y: Tensor) -> None:
        hidden = checkpoint(model[1:4], model[0](x), use_reentrant=use_reentrant)
        F.mse_loss(model[4](hidden), y).backward()

    model = mlp()
    truth = fit(model, sgd(model), BATCHES, backward)
    assert_same(fit_ranks(2, mlp, sgd, BATCHES, backward, gw.Plan(bucket_bytes=64)), truth)


def test_a_gradient_penalty_leaves_the_agreed_gradient_alone() -> None:
    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum(1).mean()

    model = mlp()
    x, y = BATCHES[0]
    F.mse_loss(model(x), y).backward()
    torch.autograd.grad(model(x).sum(), list(model.parameters()))
    penalty(model, x).backward()
    truth = torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])

    def run(world: World) -> Tensor:
        ours = mlp()
        source = ListSource([(x, y)], world)
        gw.distribute(ours, sgd(ours), source)
        for mine, target in source:
            F.mse_loss(ours(mine), target).backward()
            torch.autograd.grad(ours(mine).sum(), list(ours.parameters()))
            penalty(ours, mine).backward()
        return torch.cat([param.grad.flatten() for param in ours.parameters() if param.grad is not None])

    assert_same(run_ranks(2, run), truth)


def test_autocast_and_grad_scaler_skip_an_overflow_on_all_ranks() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches, poison) -> tuple[Tensor, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step, (x, y) in enumerate(batches):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(x.float())
            loss = F.mse_loss(output.float(), y.float())
            scaler.scale(loss * (float("inf") if poison(step) else 1.0)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return vector(model), scaler.get_scale()

    alone = mlp().float()
    truth, scale = train(alone, sgd(alone), BATCHES, lambda step: step == 1)

    def run(world: World) -> tuple[Tensor, float]:
        ours = mlp().float()
        steps = sgd(ours)
        source = ListSource(BATCHES, world)
        gw.distribute(ours, steps, source)
        return train(ours, steps, source, lambda step: step == 1 and world.rank == 1)

    for weights, ours in run_ranks(2, run):
        assert ours == scale == 512.0
        torch.testing.assert_close(
            weights, truth, rtol=1e-2, atol=1e-2
        )  # bfloat16 activations round by the batch's shape


def test_sparse_gradients_of_sparse_adam() -> None:
    rows = torch.randint(0, 20, (12, 2), generator=torch.Generator().manual_seed(5))

    def table() -> nn.Embedding:
        made = nn.Embedding(20, 3, sparse=True).double()
        with torch.no_grad():
            made.weight.copy_(torch.arange(60.0).view(20, 3) / 60)
        return made

    def train(model: nn.Embedding, optimizer: torch.optim.Optimizer, batches) -> Tensor:
        for (mine,) in batches:
            model(mine).sum((1, 2)).square().mean().backward()
            assert model.weight.grad is not None
            assert model.weight.grad.is_sparse
            optimizer.step()
            optimizer.zero_grad()
        return vector(model)

    batches = [(rows[:6],), (rows[6:7],), (rows[7:],)]
    alone = table()
    truth = train(alone, torch.optim.SparseAdam(list(alone.parameters()), eps=1e-3), batches)

    def run(world: World) -> Tensor:
        ours = table()
        steps = torch.optim.SparseAdam(list(ours.parameters()), eps=1e-3)
        source = ListSource(batches, world)
        gw.distribute(ours, steps, source)
        return train(ours, steps, source)

    for num_ranks in (1, 2, 3):
        assert_same(run_ranks(num_ranks, run), truth)


def test_a_conditionally_used_branch() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common, self.left, self.right = (nn.Linear(4, 1).double() for _ in range(3))
            with torch.no_grad():
                for number, param in enumerate(self.parameters()):
                    param.fill_(0.1 * number)

        def forward(self, x: Tensor) -> Tensor:
            positive = x[:, 0] > 0
            sides = [
                side(x[chosen]) for side, chosen in ((self.left, positive), (self.right, ~positive)) if chosen.any()
            ]
            return self.common(x).mean() + torch.cat(sides).sum() / len(x)

    def adam(model: nn.Module) -> torch.optim.AdamW:
        return torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)

    def backward(model: nn.Module, x: Tensor) -> None:
        model(x).backward()

    batches = [(X[i : i + 2],) for i in range(0, 24, 2)]
    model = Branch()
    truth = fit(model, adam(model), batches, backward)
    assert_same(fit_ranks(2, Branch, adam, batches, backward), truth)


def test_other_buffers_follow_rank_0_when_they_change() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)
            self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.mean()
            return self.linear(x).sum()

    def run(world: World) -> list[float]:
        model = Counting()
        gw.distribute(model, sgd(model))
        for _ in range(2):
            model(torch.full((2, 1), 1.0 + world.rank)).backward()
        return model.seen.tolist()

    assert run_ranks(3, run) == [[2.0, 2.0]] * 3


def test_local_batch_norm_averages_by_samples() -> None:
    def run(world: World) -> tuple[float, float]:
        model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0))
        source = ListSource([(torch.tensor([[0.0], [2.0], [4.0], [6.0], [8.0], [100.0]]),)], world, shares=[5, 1])
        gw.distribute(model, sgd(model), source)
        for (x,) in source:
            padded = torch.cat([x, x])
            model(padded).sum().backward()
        return float(model[0].running_mean), float(model[0].num_batches_tracked)

    assert run_ranks(2, run) == [(pytest.approx((4 * 5 + 100) / 6), 1.0)] * 2


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model(backend: str) -> None:
    model = mlp()
    truth = fit(model, sgd(model), BATCHES)
    for num_ranks in (1, 2):
        ranks = fit_ranks(num_ranks, lambda: torch.compile(mlp(), backend=backend, dynamic=True), sgd, BATCHES)
        assert_same(ranks, truth)


def test_the_bucket_size_follows_measurement_without_changing_the_bits() -> None:
    measured = fit_ranks(3, mlp, sgd, BATCHES * 4)[0]
    for size in (64, 200, 1 << 20):
        assert torch.equal(fit_ranks(3, mlp, sgd, BATCHES * 4, plan=gw.Plan(bucket_bytes=size))[0], measured)


def test_an_unknown_loader_is_refused_rather_than_weighed_wrongly() -> None:
    def run(world: World) -> None:
        model = mlp()
        gw.distribute(model, sgd(model))
        for x, y in gw.DataLoader(torch.utils.data.TensorDataset(X, Y), 8):
            F.mse_loss(model(x), y).backward()

    with pytest.raises(RankError, match=r"call gw.distribute\(model, optimizer, loader\)"):
        run_ranks(2, run, timeout_s=20)


def test_an_unfrozen_parameter_is_refused_by_name() -> None:
    def run(world: World) -> None:
        model = mlp()
        model[2].requires_grad_(False)
        optimizer = sgd(model)
        gw.distribute(model, optimizer)
        model[2].requires_grad_(True)
        model(X).sum().backward()
        optimizer.step()

    with pytest.raises(RankError, match=r"2\.weight was frozen"):
        run_ranks(2, run, timeout_s=20)


def test_distributing_again_after_unfreezing_trains_everything() -> None:
    def run(world: World) -> Tensor:
        model = mlp()
        model[2].requires_grad_(False)
        optimizer = sgd(model)
        gw.distribute(model, optimizer)
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model[2].requires_grad_(True)
        gw.distribute(model, optimizer)
        model(X[world.rank :: 2]).sum().backward()
        optimizer.step()
        return vector(model)

    first, second = run_ranks(2, run)
    assert torch.equal(first, second)


def test_the_model_is_the_users_again_after_the_world_closed() -> None:
    def run(world: World) -> nn.Module:
        model = mlp()
        gw.distribute(model, sgd(model))
        model(X).sum().backward()
        return model

    models = run_ranks(2, run)
    model = copy.deepcopy(models[0])
    model.zero_grad()
    model(X).sum().backward()
    models[0].zero_grad()
    models[0](X).sum().backward()
    for ours, plain in zip(models[0].parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)


class Stream(torch.utils.data.IterableDataset):
    """A stream without a length."""

    def __iter__(self):
        return zip(X, Y, strict=True)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_a_stream_without_a_length_trains(num_ranks: int) -> None:
    model = mlp()
    truth = fit(model, sgd(model), [(X[:10], Y[:10]), (X[10:20], Y[10:20]), (X[20:], Y[20:])])

    def run(world: World) -> Tensor:
        ours = mlp()
        optimizer = sgd(ours)
        loader = gw.DataLoader(Stream(), 10)
        gw.distribute(ours, optimizer, loader)
        return fit(ours, optimizer, loader)

    assert_same(run_ranks(num_ranks, run), truth)


def weighed(model: nn.Module, x: Tensor, y: Tensor) -> None:
    gw.weight(len(x))
    hidden = checkpoint(model[:2], x, use_reentrant=True)
    hidden = checkpoint(model[2:4], hidden, use_reentrant=True)
    F.mse_loss(model[4](hidden), y).backward()


def test_a_count_holds_for_every_backward_of_a_reentrant_checkpoint() -> None:
    batches = [(x.clone().requires_grad_(), y) for x, y in BATCHES]
    model = mlp()
    truth = fit(model, sgd(model), batches)
    for accumulate in (1, 2):
        assert_same(fit_ranks(2, mlp, sgd, batches, weighed, gw.Plan(accumulate=accumulate)), truth)


def test_a_rank_that_skips_its_empty_part_while_others_count() -> None:
    batches = [(X[:8], Y[:8]), (X[8:9], Y[8:9]), (X[9:], Y[9:])]
    model = mlp()
    truth = fit(model, sgd(model), batches)

    def run(world: World) -> Tensor:
        ours = mlp()
        optimizer = sgd(ours)
        source = ListSource(batches, world)
        gw.distribute(ours, optimizer, source)
        for x, y in source:
            assert source.current is not None
            if source.current.samples:
                gw.weight(source.current.samples)
                mean_square(ours, x, y)
            optimizer.step()
            optimizer.zero_grad()
        return vector(ours)

    assert_same(run_ranks(2, run), truth)


def test_counts_on_some_ranks_only_are_refused_on_all() -> None:
    def run(world: World) -> str:
        model = mlp()
        gw.distribute(model, sgd(model))
        if world.rank:
            gw.weight(3)
        with pytest.raises(gw.UsageError) as caught:
            mean_square(model, X, Y)
        return str(caught.value)

    assert all("on some ranks only" in text for text in run_ranks(2, run, timeout_s=20))


def test_ranks_at_different_batches_are_refused_naming_both() -> None:
    def run(world: World) -> str:
        model = mlp()
        source = ListSource(BATCHES, world)
        gw.distribute(model, sgd(model), source)
        with pytest.raises(gw.MismatchError) as caught:
            for step, (x, y) in enumerate(source):
                if step or not world.rank:
                    mean_square(model, x, y)
        return str(caught.value)

    for text in run_ranks(2, run, timeout_s=20):
        assert "rank 0 is at epoch 0 batch 0 micro-batch 0, rank 1 at epoch 0 batch 1 micro-batch 0" in text


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_lbfgs_decides_by_everybodys_loss(num_ranks: int, search: str | None) -> None:
    def solve(model: nn.Module, optimizer: torch.optim.LBFGS, batches) -> Tensor:
        for x, y in batches:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return vector(model)

    def lbfgs(model: nn.Module) -> torch.optim.LBFGS:
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5, line_search_fn=search)

    alone = mlp()
    truth = solve(alone, lbfgs(alone), BATCHES)

    def run(world: World) -> Tensor:
        ours = mlp()
        optimizer = lbfgs(ours)
        source = ListSource(BATCHES, world)
        gw.distribute(ours, optimizer, source)
        return solve(ours, optimizer, source)

    ranks = run_ranks(num_ranks, run)
    assert all(torch.equal(rank, ranks[0]) for rank in ranks)
    torch.testing.assert_close(ranks[0], truth, rtol=1e-8, atol=1e-9)  # it divides by small differences of gradients


def two_losses(model: nn.Module, x: Tensor, y: Tensor) -> None:
    gw.weight(len(x))
    mean_square(model, x, y)
    (model(x) ** 2).mean().backward()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_two_losses_of_a_counted_micro_batch_count_it_once(num_ranks: int) -> None:
    def plain(model: nn.Module, x: Tensor, y: Tensor) -> None:
        mean_square(model, x, y)
        (model(x) ** 2).mean().backward()

    model = mlp()
    truth = fit(model, sgd(model), BATCHES, plain)
    for accumulate in (1, 2):
        assert_same(fit_ranks(num_ranks, mlp, sgd, BATCHES, two_losses, gw.Plan(accumulate=accumulate)), truth)
