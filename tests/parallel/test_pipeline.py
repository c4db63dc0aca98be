"""A model in stages trains as one process does."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwire as gw
from gradwire.comm.world import World
from gradwire.parallel.backward import Kept
from gradwire.parallel.holding import keep
from gradwire.parallel.split import forward_backward, pipeline_of, split
from gradwire.testing import run_ranks
from gradwire.testing.ranks import RankError
from tests.parallel.models import CASES, Case

SCHEDULES = {"gpipe": 1, "1f1b": 1, "zero-bubble": 1, "interleaved": 2}
TOLERANCE = 1e-12  # float64; sums over micro-batches are in another order


def settings(schedule: str, microbatches: int = 3, **more: object) -> gw.Pipeline:
    return gw.Pipeline(schedule=schedule, microbatches=microbatches, stages_per_rank=SCHEDULES[schedule], **more)


def on_ranks(num_ranks, function, **mesh):
    return run_ranks(num_ranks, function, plan=gw.Plan(mesh=mesh or {"pipeline": num_ranks}))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # eps: a key's bias has a gradient of zero, up to rounding, which Adam would divide by itself
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, batches=(7, 7, 2)) -> list[float]:
    losses = []
    for num_samples in batches:  # 2: fewer samples than micro-batches
        x, y = case.batch(num_samples)
        losses.append(float(forward_backward(model, case.loss, x, y)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(float(forward_backward(model, case.loss, *case.batch(5))))
    return losses


EVERY = [
    pytest.param(
        name,
        schedule,
        num_ranks,
        id=f"{name}-{schedule}-{num_ranks}",
        marks=[pytest.mark.slow] if num_ranks == 4 else [],
    )
    for name in CASES
    for schedule in SCHEDULES
    for num_ranks in (2, 3, 4)
    if name != "twice" or num_ranks * SCHEDULES[schedule] <= 4  # it has four blocks
]


@pytest.mark.parametrize(("name", "schedule", "num_ranks"), EVERY)
def test_every_schedule_gives_one_processs_losses_and_weights(name, schedule, num_ranks):
    case = CASES[name]
    alone = case.model()
    expected = train(case, alone, optimizer_of(alone))

    def body(world: World):
        model = case.model()
        optimizer = optimizer_of(model)
        made = split(model, world, settings(schedule), case.batch(7)[0])
        keep([optimizer], made.parameters.values())
        losses = train(case, model, optimizer)
        return losses, {key: value.tolist() for key, value in model.state_dict().items()}

    weights = alone.state_dict()
    ranks = on_ranks(num_ranks, body)
    for losses, _ in ranks:
        assert losses == pytest.approx(expected, rel=TOLERANCE)
    for _, part in ranks:
        for key, value in part.items():
            assert torch.allclose(torch.tensor(value, dtype=torch.float64), weights[key], rtol=0, atol=TOLERANCE)
    assert set().union(*(part for _, part in ranks)) == set(weights)


def test_two_windows_of_four_microbatches_with_gradient_one_have_mean_one():
    """cases.md 17."""

    def body(world: World):
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
        nn.init.ones_(model[0].weight)
        nn.init.ones_(model[1].weight)
        split(model, world, gw.Pipeline(microbatches=4, cuts=("1",)))
        found = []
        for _ in range(2):
            loss = forward_backward(model, lambda out, y: out.mean(), torch.ones(4, 1, dtype=torch.float64))
            found.append([float(loss), *(float(p.grad) for p in model.parameters() if p.grad is not None)])
            model.zero_grad()
        return found

    assert on_ranks(2, body) == [[[1.0, 1.0]] * 2] * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_add_up_over_calls_until_they_are_cleared_those_of_shared_parameters_too(schedule):
    case = CASES["gpt"]
    alone = case.model()
    for num_samples in (5, 3, 4):
        forward_backward(alone, case.loss, *case.batch(num_samples))
    expected = {name: param.grad for name, param in alone.named_parameters(remove_duplicate=False)}

    def body(world: World):
        model = case.model()
        split(model, world, settings(schedule), case.batch(5)[0])
        for num_samples in (5, 3, 4):
            forward_backward(model, case.loss, *case.batch(num_samples))
        return max(
            float((param.grad - expected[name]).abs().max())
            for name, param in model.named_parameters(remove_duplicate=False)
        )

    assert max(on_ranks(2, body)) < TOLERANCE


def test_all_backwards_but_the_last_of_a_batch_keep_their_gradients_on_the_rank():
    """So that data parallel ranks agree once; under zero-bubble there is one backward through autograd's hooks."""
    case = CASES["mlp"]

    def body(world: World):
        found = {}
        for schedule in SCHEDULES:
            model = case.model()
            split(model, world, settings(schedule), case.batch(6)[0])
            seen: list[int] = []
            first = next(iter(model.parameters()))
            first.register_post_accumulate_grad_hook(lambda _, seen=seen: seen.append(world.local_only))
            forward_backward(model, case.loss, *case.batch(6))
            world.group(
                "pipeline"
            ).barrier()  # torch.fx patches modules for all threads while one traces the next model
            found[schedule] = seen
        return found

    for found in on_ranks(2, body):
        assert found.pop("zero-bubble") == [0]
        assert set(found["interleaved"]) <= {0, 1} and found.pop("interleaved").count(0) <= 1
        assert all(seen == [1, 1, 0] for seen in found.values())


def test_tokens_that_are_padding_do_not_count():
    """A mean over uneven numbers of tokens: ``count`` says how many."""
    case = CASES["gpt"]

    def loss(out, y):
        return F.cross_entropy(out, y, ignore_index=0)

    x, y = case.batch(6)
    y = torch.where(torch.arange(6)[:, None] > torch.arange(6), 0, y)
    alone = case.model()
    expected = forward_backward(alone, loss, x, y)

    def body(world: World):
        model = case.model()
        split(model, world, settings("1f1b"), x)
        total = forward_backward(model, loss, x, y, count=lambda part: float((part != 0).sum()))
        grads = [(name, param.grad) for name, param in model.named_parameters() if param.grad is not None]
        return float(total - expected), max(
            float((grad - alone.get_parameter(name).grad).abs().max()) for name, grad in grads
        )

    for loss_error, grad_error in on_ranks(2, body):
        assert abs(loss_error) < TOLERANCE and grad_error < TOLERANCE


@pytest.mark.parametrize(("activations", "limit"), [("bf16", 0.02), ("q8", 0.02), ("q4", 0.3)])
def test_activations_may_travel_with_fewer_bits(activations, limit):
    case = CASES["mlp"]
    alone = case.model()
    forward_backward(alone, case.loss, *case.batch(9))
    norm = nn.utils.get_total_norm([p.grad for p in alone.parameters()])

    def body(world: World):
        model = case.model()
        split(model, world, settings("1f1b", activations=activations), case.batch(9)[0])
        forward_backward(model, case.loss, *case.batch(9))
        return [float((p.grad - alone.get_parameter(n).grad).norm() / norm) for n, p in model.named_parameters()]

    for errors in on_ranks(2, body):
        assert max(errors) < limit
    assert max(max(errors) for errors in on_ranks(2, body)) > 0


def test_pipelines_stand_side_by_side_along_data():
    """Each of two lines of two ranks has its own batch, and rank 0 says where all are cut."""
    case = CASES["skips"]
    alone = [case.model(), case.model()]
    for line, model in enumerate(alone):
        forward_backward(model, case.loss, *case.batch(4 + line))

    def body(world: World):
        model = case.model()
        line = world.mesh.coordinate(world.rank)["data"]
        made = split(model, world, settings("1f1b"), case.batch(4)[0])
        forward_backward(model, case.loss, *case.batch(4 + line))
        grads = [(p.grad, alone[line].get_parameter(name).grad) for name, p in model.named_parameters()]
        return made.cuts.starts, max(float((ours - theirs).abs().max()) for ours, theirs in grads)

    found = on_ranks(4, body, pipeline=2, data=2)
    assert len({starts for starts, _ in found}) == 1
    assert max(error for _, error in found) < TOLERANCE


def test_parts_of_other_ranks_are_gone_and_calling_the_model_says_what_to_call():
    case = CASES["gpt"]

    def body(world: World):
        model = case.model()
        blocks = [weakref.ref(block.norm1.weight) for block in model.blocks]
        split(model, world, gw.Pipeline(microbatches=2, cuts=("blocks.2",)))
        gc.collect()
        with pytest.raises(
            gw.UsageError, match=r"call gw\.forward_backward\(model, loss_fn, x, y\) instead of model\(x\)"
        ):
            model(case.batch(2)[0])
        other = 2 if world.rank == 0 else 0
        with pytest.raises(
            gw.UsageError, match=rf"the block blocks.{other} is on rank {1 - world.rank} of the pipeline"
        ):
            model.blocks[other](torch.ones(1))
        return [ref() is not None for ref in blocks], list(model.state_dict())[:2], pipeline_of(model).holding.ties

    first, second = on_ranks(2, body)
    assert first[:2] == ([True, True, False, False], ["token.weight", "place.weight"])
    assert second[0] == [False, False, True, True]
    assert [(tie.names, tie.ranks) for tie in first[2]] == [(("token.weight", "head.weight"), (0, 1))]


def test_one_script_runs_without_a_pipeline_too():
    model = nn.Linear(6, 3).double()
    x, y = CASES["mlp"].batch(4)
    with torch.no_grad():
        assert not forward_backward(model, F.cross_entropy, x, y).requires_grad
    assert model.weight.grad is None
    loss = forward_backward(model, F.cross_entropy, x, y)
    assert not loss.requires_grad and model.weight.grad is not None


def test_under_no_grad_any_mean_will_do():
    case = CASES["mlp"]
    x, y = case.batch(7)
    expected = float((case.model()(x).argmax(1) == y).double().mean())

    def body(world: World):
        model = case.model().eval()
        split(model, world, settings("1f1b"), x)
        with torch.no_grad():
            return float(forward_backward(model, lambda out, y: (out.argmax(1) == y).double().mean(), x, y))

    assert on_ranks(3, body) == pytest.approx([expected] * 3)


def test_a_rank_that_raises_in_its_loss_does_not_leave_the_others_waiting():
    case = CASES["mlp"]

    def loss(out, y):
        raise ZeroDivisionError("in the loss")

    def body(world: World):
        model = case.model()
        split(model, world, settings("1f1b"), case.batch(6)[0])
        forward_backward(model, loss, *case.batch(6))

    with pytest.raises(RankError, match="ZeroDivisionError"):
        on_ranks(3, body)


def test_after_a_failed_batch_the_pipeline_says_so_instead_of_mixing_messages():
    case = CASES["mlp"]

    def body(world: World):
        model = case.model()
        split(model, world, settings("1f1b"), case.batch(6)[0])
        if world.rank == 1:
            with pytest.raises(RuntimeError, match="in the loss"):
                forward_backward(
                    model, lambda out, y: (_ for _ in ()).throw(RuntimeError("in the loss")), *case.batch(6)
                )
            forward_backward(model, case.loss, *case.batch(6))
        else:
            forward_backward(model, case.loss, *case.batch(6))

    with pytest.raises(RankError, match="of this model failed"):
        on_ranks(2, body)


def test_what_happened_is_measured_and_shown():
    case = CASES["mlp"]

    def body(world: World):
        model = case.model()
        made = split(model, world, settings("1f1b", 4), case.batch(8)[0])
        forward_backward(model, case.loss, *case.batch(8))
        return made.bubble, made.timeline().bubble, made.predicted().bubble, [len(s) for s in made.timeline().spans]

    for own, measured, predicted, counts in on_ranks(2, body):
        assert 0 <= own < 1 and 0 < measured < 1 and 0 < predicted < 1
        assert counts == [8, 8]


def test_groups_settings_and_state_of_optimizers_are_kept_for_what_stays():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    keep([optimizer], model[1].parameters())
    assert [(group["lr"], len(group["params"])) for group in optimizer.param_groups] == [(0.5, 0), (0.1, 2)]
    assert list(optimizer.state) == list(model[1].parameters())


@pytest.mark.parametrize("cut", ["2.1", "2.2"])
def test_a_block_without_parameters_stays_in_a_container_that_is_elsewhere(cut):
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, 2), nn.Tanh(), nn.Sequential(nn.Tanh(), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 1))
        )

    def body(world: World):
        model = build().double()
        split(model, world, gw.Pipeline(microbatches=2, cuts=(cut,)))
        return float(forward_backward(model, lambda out, y: out.mean() * 0 + 1, torch.ones(3, 2, dtype=torch.float64)))

    assert on_ranks(2, body) == pytest.approx([1.0, 1.0])


def test_data_parallel_ranks_agree_on_what_a_pipelines_backwards_leave():
    """The two ways a stage's gradients come: local backwards and a last one that may miss a block; or all at once."""

    def body(world: World):
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
        gw.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
        first, last = (part.weight for part in model)
        with gw.no_sync():
            ((first + 2 * last).sum() * (world.rank + 1)).backward()
        (last.sum() * 10).backward()
        found = [float(first.grad), float(last.grad)]
        model.zero_grad()
        kept = Kept()
        kept.add([first, last], [torch.full_like(first, 2.0 + world.rank), torch.full_like(last, 4.0)])
        kept.deliver()
        return [*found, float(first.grad), float(last.grad)]

    assert run_ranks(2, body) == [[1.5, 13.0, 2.5, 4.0]] * 2
