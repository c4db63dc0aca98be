"""The parts a pipeline is made of: blocks, micro-batches, messages, backwards in two parts, costs, the report."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradwire as gw
from gradwire.comm.world import World
from gradwire.core.balance import Unit
from gradwire.parallel.backward import Kept, backward_inputs
from gradwire.parallel.batch import cut, num_samples
from gradwire.parallel.blocks import Blocks
from gradwire.parallel.message import codec_of, pack, receive, send
from gradwire.parallel.profile import measure
from gradwire.parallel.report import split_report
from gradwire.parallel.split import forward_backward, split
from gradwire.parallel.stage import Stage
from gradwire.testing import run_ranks
from gradwire.testing.ranks import RankError
from tests.parallel.models import CASES, Block, Gpt, Skips, mlp

LINE = gw.Plan(mesh={"pipeline": 2})


def names(nodes) -> set[str]:
    return {node.name.removeprefix("model_") for node in nodes}


# --- blocks ----------------------------------------------------------------------------------------------------------


def test_blocks_are_elements_of_lists_and_torchs_layers_under_the_users_names():
    assert Blocks(Gpt()).names == ("token", "place", *(f"blocks.{i}" for i in range(4)), "norm", "head")
    assert Blocks(mlp()).names == ("0", "1", "2", "3", "4.0", "4.1", "4.2", "5", "6")
    assert "blocks.0.attention" in Blocks(Gpt(), deep=True).names


def test_a_mask_is_made_again_on_every_stage_and_only_hidden_states_travel():
    blocks = Blocks(Gpt())
    second = blocks.program(4, 8)
    assert names(second.received) == {"blocks_1"} and {"ones", "tril", "eye"} <= names(second.nodes)
    assert blocks.program(0, 4).sent == second.received


def test_skip_connections_cross_every_stage_between():
    blocks = Blocks(Skips())
    middle = blocks.program(3, 4)
    assert set(middle.received) & set(middle.sent or ())
    assert len(blocks.program(6, 8).received) >= 2


class Forwards(nn.Module):
    """A model with two layers, and a forward of the test's."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1))
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda m, x: m.b(m.a(x)) if x.sum() > 0 else m.a(x), "a decision by a value"),
        (lambda m, x: m.b(m.a(x)) * float(x.sum()), "could not be traced"),
        (lambda m, x: m.b(m.a(x.mul_(2))), "changes its input in place"),
        (lambda m, x: m.b(m.a(x)) + m.seen.add_(1), "changes seen in place"),
    ],
)
def test_a_forward_that_cannot_be_cut_is_refused_with_the_reason(forward, words):
    with pytest.raises(gw.UsageError, match=f"Forwards cannot be cut into stages: its forward .*{words}"):
        Blocks(Forwards(forward))


def test_a_forward_of_two_inputs_is_refused():
    with pytest.raises(gw.UsageError, match="takes x, y; a pipeline calls it with one argument"):
        Blocks(TwoInputs())


def test_a_block_that_decides_by_values_stays_whole():
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum() > 0 else self.other(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Deciding(), Deciding()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    assert Blocks(Outer()).names == ("first", "second")


def test_random_numbers_between_blocks_are_drawn_anew_each_time():
    model = Forwards(lambda m, x: m.b(m.a(x) + torch.rand(1)) + torch.rand_like(x))
    blocks = Blocks(model)
    stage = Stage(blocks, blocks.program(0, 2))
    x = torch.ones(3, 2)
    first, second = (stage.run(model, x, ())[0] for _ in range(2))
    assert not torch.equal(first, second)  # pyright: ignore
    torch.manual_seed(5)
    (ours,) = stage.run(model, x, ())
    torch.manual_seed(5)
    assert torch.equal(ours, model(x))  # pyright: ignore


@pytest.mark.parametrize("name", CASES)
def test_all_stages_together_are_the_models_forward_in_both_modes(name):
    case = CASES[name]
    model = case.model()
    x, _ = case.batch(3)
    for mode in (True, False):
        model.train(mode)
        blocks = Blocks(model)
        values: tuple[object, ...] = ()
        for place in range(len(blocks.names)):
            values = Stage(blocks, blocks.program(place, place + 1)).run(model, copy.deepcopy(x), values)
        expected = model(copy.deepcopy(x))
        torch.testing.assert_close(values[0], expected, rtol=0, atol=1e-12)


def test_cuts_may_be_named_by_a_block_or_what_holds_it():
    blocks = Blocks(mlp())
    assert (blocks.place_of("4"), blocks.place_of("4.1")) == (4, 5)
    with pytest.raises(gw.PlanError, match="the model has no block '7'; its blocks are 0, 1"):
        blocks.place_of("7")


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 2)), {}, r"1 blocks \(0\), too few for 2 stages; use pipeline=1"),
        (mlp, {"cuts": ("0",)}, "leaves a stage without a block"),
        (mlp, {"cuts": ("9",)}, "has no block '9'"),
        (mlp, {"cuts": ("1", "2")}, "2 stages have 1 cuts"),
        (mlp, {"memory_bytes": (10, 10)}, "no cut of 9 blocks into 2 stages fits pipeline.memory_bytes"),
        (mlp, {"speeds": (1.0,)}, "give one for each of the 2 ranks"),
    ],
)
def test_what_cannot_be_split_is_refused_on_all_ranks(model, settings, words):
    def body(world: World):
        with pytest.raises(gw.PlanError, match=words):
            split(model(), world, gw.Pipeline(microbatches=2, **settings), torch.ones(4, 6))
        return True

    assert run_ranks(2, body, plan=LINE) == [True, True]


def test_a_split_needs_an_example_or_cuts_and_ranks_with_the_same_blocks():
    def body(world: World):
        with pytest.raises(gw.PlanError, match="needs an example input to measure"):
            split(mlp(), world, gw.Pipeline())
        with pytest.raises(gw.MismatchError, match=r"rank 0's blocks are 0, .*, rank 1's pair.layer, "):
            split(Skips() if world.rank else mlp(), world, gw.Pipeline(cuts=("2",)))
        return True

    assert run_ranks(2, body, plan=LINE) == [True, True]


def test_zero_bubble_refuses_hooks_it_would_call_twice_and_batch_norm_is_named_once(capsys):
    def body(world: World):
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        split(copy.deepcopy(model), world, gw.Pipeline(cuts=("2",)))
        split(copy.deepcopy(model), world, gw.Pipeline(cuts=("2",), microbatches=1))
        model[0].weight.register_hook(lambda grad: grad)
        with pytest.raises(gw.UsageError, match=r"0.weight has a hook \(register_hook\).*use schedule=\"1f1b\""):
            split(model, world, gw.Pipeline(schedule="zero-bubble", cuts=("2",)))

    run_ranks(2, body, plan=LINE)
    assert capsys.readouterr().out.count("BatchNorm normalises each micro-batch by itself") == 1


def test_speeds_may_be_measured():
    def body(world: World):
        made = split(mlp(), world, gw.Pipeline(speeds="measured", microbatches=2), torch.ones(8, 6))
        return made.pipeline.speeds

    first, second = run_ranks(2, body, plan=LINE)
    assert first == second and len(first) == 2 and min(first) == 1.0


# --- micro-batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "parts", "sizes"), [(7, 3, [3, 2, 2]), (2, 4, [1, 1]), (4, 4, [1] * 4), (5, 1, [5])])
def test_a_batch_is_cut_nearly_evenly_whatever_it_is(total, parts, sizes):
    batch = {"x": torch.arange(total), "pair": (torch.arange(total), [torch.ones(total, 2), "name"])}
    found = cut(batch, parts)
    assert [num_samples(part) for part in found] == sizes
    assert torch.equal(torch.cat([part["pair"][0] for part in found]), torch.arange(total))  # pyright: ignore
    assert found[0]["pair"][1][1] == "name"  # pyright: ignore


@pytest.mark.parametrize("batch", [torch.ones(0, 2), torch.tensor(1.0), (torch.ones(2), torch.ones(3)), {"a": 1}, None])
def test_what_is_no_batch_is_refused(batch):
    with pytest.raises(gw.UsageError, match="cuts a batch along the first dimension"):
        num_samples(batch)


def test_a_loss_must_be_one_mean_of_a_matching_target():
    x, y = CASES["mlp"].batch(4)
    with pytest.raises(gw.UsageError, match="use reduction='mean'"):
        forward_backward(nn.Linear(6, 3), nn.CrossEntropyLoss(reduction="sum"), x, y)

    def body(world: World):
        model = CASES["mlp"].model()
        split(model, world, gw.Pipeline(cuts=("2",)))
        with pytest.raises(gw.UsageError, match="x has 4 samples and y 3"):
            forward_backward(model, F.cross_entropy, x, y[:3])
        forward_backward(model, F.cross_entropy, x, y)  # nothing was begun, so it goes on
        forward_backward(model, lambda out, _: out, x, y)

    with pytest.raises(RankError, match=r"must give one number, the mean; it gave a tensor \(1, 3\)"):
        run_ranks(2, body, plan=LINE)


# --- messages --------------------------------------------------------------------------------------------------------


def test_messages_carry_any_values_exactly():
    values = [
        None, True, -3, 0.1, torch.arange(6.0).view(2, 3).t(), torch.tensor(2, dtype=torch.int16), torch.empty(0, 4),
        (torch.tensor([True]), [1, (2.5, None)]), torch.ones(2, dtype=torch.bfloat16), torch.ones(1, requires_grad=True),
        *(torch.full((2, 1, 1, 2), float(i)) for i in range(20)),
    ]  # fmt: skip

    def body(world: World):
        group = world.among("pipeline", (0, 1), channel="test")
        if world.rank == 0:
            send(pack(values, ["v"] * len(values), None), group, 1, world.device)
            return None
        return receive(group, 0, world.device, None)

    found = run_ranks(2, body, plan=LINE)[1]
    assert found is not None
    torch.testing.assert_close(
        [v for v in found if isinstance(v, Tensor)], [v for v in values if isinstance(v, Tensor)]
    )
    assert found[:4] == values[:4] and found[7][1] == values[7][1] and found[9].requires_grad  # pyright: ignore


def test_what_cannot_travel_is_refused_by_name():
    with pytest.raises(gw.UsageError, match="the value state, a dict, would have to travel"):
        pack([{"a": 1}], ["the value state"], None)


def test_codecs_are_used_for_floating_point_alone():
    message = pack([torch.ones(1000), torch.arange(3)], ["a", "b"], codec_of("q8"))
    assert [tensor.numel() for tensor in message.tensors] == [4 * 260, 24]


# --- a backward in two parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_of_inputs_and_weights_may_be_computed_apart(shared):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.MultiheadAttention(6, 2), nn.Linear(6, 6)
    ).double()
    if shared:  # a bias used twice on the way cannot be put off, and must not count twice
        model[4].bias = model[0].bias
    params = list(model.parameters())
    x = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
    hidden = torch.tanh(model[1](F.linear(x, model[0].weight / model[0].weight.norm(), model[0].bias)))
    y = model[4](hidden + model[3](hidden, hidden, hidden)[0])
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(y, [x, *params], grad, retain_graph=True)
    kept = Kept()
    (dx,), later = backward_inputs([y], [grad], [x], params, kept)
    assert (later is None) is shared and bool(kept.grads) is shared
    if later is not None:
        later.run(params, kept)
    torch.testing.assert_close([dx, *(kept.grads[param] for param in params)], list(expected), rtol=0, atol=1e-12)
    kept.deliver()
    torch.testing.assert_close([param.grad for param in params], list(expected[1:]), rtol=0, atol=1e-12)


# --- costs and the report --------------------------------------------------------------------------------------------


def test_measuring_leaves_the_model_as_it_was_and_finds_the_costly_block():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1024), nn.Linear(1024, 2))
    before = copy.deepcopy(model.state_dict())
    units = measure(model, Blocks(model), torch.randn(64, 8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())
    assert [unit.parameter_bytes for unit in units] == [288, 64, 0, 4 * 9 * 1024, 4 * 2 * 1025]
    assert [unit.sent_bytes for unit in units] == [2048, 2048, 2048, 64 * 1024 * 4, 64 * 2 * 4]
    assert units[4].activation_bytes >= 64 * 1024 * 4  # its input
    assert all(unit.forward_s > 0 for unit in units)


def test_the_report_shows_stages_reasons_and_the_schedule():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)), torch.ones(
            12, 64
        )

    report = split_report(build, 3, gw.Pipeline(microbatches=4))
    assert "5 blocks in 3 stages; a micro-batch is 3 of 12 samples" in report
    assert all(f"stage {s}  rank {s}" in report for s in range(3)) and "8.32 KB" in report
    assert "The cuts make the slowest stage as fast as possible" in report
    assert "rank 2  .  .  F0 B0" in report and "of the time is bubble" in report
    named = split_report(build, 2, gw.Pipeline(cuts=("2",)))
    assert "those that pipeline.cuts names: 2" in named and "stage 1  rank 1  2 ... 4" in named


@pytest.mark.parametrize("made", [nn.Linear(1, 1), (nn.Linear(1, 1),), (1, 2)])
def test_a_report_needs_a_model_and_an_example(made):
    with pytest.raises(gw.UsageError, match="it must give the model and an example input"):
        split_report(lambda: made, 2)


def test_a_block_of_the_users_is_one_unit():
    units = [Unit(name=name) for name in Blocks(nn.Sequential(*(Block2() for _ in range(3)))).names]
    assert [unit.name for unit in units] == ["0", "1", "2"]


class Block2(Block):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore
        return super().forward(x, torch.ones(x.shape[1], x.shape[1]).bool()) * random.choice([1.0])
