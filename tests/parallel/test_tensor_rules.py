"""Which layers are shared: no process group, no ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire.errors import PlanError, UsageError
from gradwire.parallel.cross_entropy import cross_entropy
from gradwire.parallel.part_shapes import cut, place_in_view
from gradwire.parallel.rules import describe
from tests.parallel.tensor_models import FusedAttention, SwiGLU, built


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def rules_of(model: nn.Module, n: int = 2, rules: dict[str, str] | None = None) -> dict[str, str]:
    return {name: rule for name, rule, _ in describe(model, n, rules)}


def reason(model: nn.Module, name: str, n: int = 2, rules: dict[str, str] | None = None) -> str:
    return next(choice.reason for choice in describe(model, n, rules) if choice.name == name)


def test_an_encoder_is_shared_by_heads_pairs_and_vocabulary() -> None:
    found = rules_of(built("encoder"))
    assert found["encoder.layers.0.self_attn"] == "heads"
    assert (found["encoder.layers.1.linear1"], found["encoder.layers.1.linear2"]) == ("column", "row")
    assert (found["embed"], found["head"]) == ("vocabulary", "vocabulary")


def test_custom_blocks_are_shared_by_what_feeds_what() -> None:
    found = rules_of(built("custom"))
    assert [name for name, rule in found.items() if rule == "row"] == [
        "0.mixer.c_proj", "0.mlp.3", "1.mixer.proj", "1.mlp.down", "2.mixer.wo", "2.mlp.down"
    ]  # fmt: skip
    assert set(found.values()) == {"column", "row"}


def test_a_chain_alternates() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU())]
    assert list(rules_of(nn.Sequential(*layers)).values()) == ["column", "row", "column", "row"]


class Apart(nn.Module):
    """The first layer of the pair is in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.SiLU())
        self.second = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_pairs_are_found_across_modules() -> None:
    assert rules_of(Apart()) == {"first.0": "column", "second": "row"}


class Normalised(Apart):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.layer_norm(torch.fft.fft(self.first(x)).real, (16,)))


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * 2


class Opaque(Apart):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(Hidden.apply(self.first(x)))


class Looped(Apart):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for _ in range(int(y.abs().max()) % 3):
            y = y + 1
        return self.second(y)


@pytest.mark.parametrize("kind", [Normalised, Opaque, Looped])
def test_what_is_not_understood_stays_whole(kind: type[nn.Module]) -> None:
    model = nn.Sequential(mlp(), kind())
    assert {name: rule for name, rule in rules_of(model).items() if name[0] == "1"} == {
        "1.first.0": "replicate", "1.second": "replicate"
    }  # fmt: skip


def test_reading_a_forward_leaves_torch_as_it_was() -> None:
    before = (torch.ones, torch.arange, vars(torch.autograd.Function)["apply"])
    describe(built("custom"), 2)
    assert (torch.ones, torch.arange, vars(torch.autograd.Function)["apply"]) == before
    assert Hidden.apply(torch.ones(1)).item() == 2


class ReadsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp = nn.Embedding(16, 8), mlp()

    def forward(self, ids: Tensor) -> Tensor:
        return self.mlp(self.embed(ids)) @ self.embed.weight.T


def test_a_weight_that_a_forward_reads_itself_stays_whole() -> None:
    assert rules_of(ReadsWeight())["embed"] == "replicate"
    assert reason(ReadsWeight(), "embed") == "a forward reads its weight itself"


def test_heads_that_do_not_divide_keep_attention_whole_and_share_the_rest() -> None:
    layer = nn.TransformerEncoderLayer(12, 4, 24)
    assert rules_of(layer, 3) == {"self_attn": "replicate", "linear1": "column", "linear2": "row"}
    assert reason(layer, "self_attn", 3) == "4 heads are not divisible by 3"
    both = nn.Sequential(mlp(), FusedAttention(12, 3))
    assert reason(both, "1.c_attn") == "n_head=3 is not divisible by 2"


def test_rules_override_and_the_last_one_counts() -> None:
    assert rules_of(SwiGLU(8, 16), 2, {"*": "replicate", "up": "column"}) == {
        "gate": "replicate", "up": "column", "down": "replicate", "dropout": "replicate"
    }  # fmt: skip
    model = nn.Sequential(mlp(), nn.LayerNorm(8), nn.Dropout(0.1))
    assert rules_of(model, 2, {"1": "sequence", "2": "sequence"})["2"] == "sequence"
    layer = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16))
    assert rules_of(layer, 2, {"0.self_attn": "replicate"})["0.self_attn"] == "replicate"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = nn.Embedding(16, 8), mlp(), nn.Linear(8, 16)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mlp(self.embed(ids)))


def test_a_tied_weight_is_whole_for_all_or_shared_by_all() -> None:
    found = rules_of(Tied(), 2, {"head": "replicate"})
    assert (found["embed"], found["head"]) == ("replicate", "replicate")


@pytest.mark.parametrize(
    ("model", "n", "rules", "words"),
    [
        (mlp(), 2, {"3": "column"}, "'3' matches no module; its Linear and Embedding layers: 0, 2"),
        (mlp(), 2, {"1": "column"}, "'1' = 'column' matches 1, a GELU, which no rule is for"),
        (mlp(), 3, {"0": "column"}, "0 has 32 outputs, not divisible by tensor=3; use 33 outputs, another tensor"),
        (mlp(), 3, {"2": "row"}, "2 has 32 inputs, not divisible by tensor=3"),
        (mlp(), 2, {"0": "sequence"}, "0 is a Linear, which takes column, row, vocabulary or replicate, not sequence"),
        (mlp(), 5, None, "no layer of Sequential can be shared (0: 0: 32 features are not divisible by 5"),
        (mlp(), 2, {"*": "replicate"}, "no layer of Sequential can be shared (0: rule '*'"),
        (nn.Conv2d(3, 3, 3), 2, None, "it has no Linear, Embedding or attention"),
        (Tied(), 2, {"embed": "row"}, "embed is a Embedding, which takes vocabulary or replicate, not row"),
        (Tied(), 2, {"head": "row"}, "embed (vocabulary), head (row) are one tied weight and must be cut alike"),
        (nn.TransformerEncoderLayer(12, 4, 24), 3, {"self_attn": "column"}, "self_attn has 4 heads, not divisible by tensor=3"),
        (nn.Sequential(nn.Embedding(16, 8, max_norm=1.0), mlp()), 2, {"0": "vocabulary"}, "0 uses max_norm"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), 2, None, "can be shared"),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))), 2, {"0": "row"}, "0 has a parametrized weight"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused_by_name_with_its_cure(
    model: nn.Module, n: int, rules: dict[str, str] | None, words: str
) -> None:
    with pytest.raises(PlanError) as error:
        describe(model, n, rules)
    assert words in str(error.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(PlanError, match=r"'x' matches no module.*; .*'2' = 'sequence'"):
        describe(mlp(), 2, {"x": "row", "2": "sequence"})


def test_a_piece_knows_its_place_in_a_view_or_that_it_has_none() -> None:
    assert place_in_view((2, 5, 12), 2, (12,), (10, 12), 2) == (1, (12,))
    assert place_in_view((2, 5, 12), 2, (12,), (2, 5, 3, 4), 2) is None  # three heads, two ranks
    assert place_in_view((2, 4, 5), 1, (4,), (8, 5), 2) == (0, (4, 4))
    assert place_in_view((2, 5, 20), 2, (12, 4, 4), (10, 20), 2) == (1, (12, 4, 4))
    assert cut((12,), [6, 6]) is None


def test_cross_entropy_of_plain_logits_is_torchs_to_the_bit() -> None:
    logits, target = torch.randn(6, 5), torch.tensor([0, 1, 4, -100, 2, 3])
    for options in ({}, {"reduction": "none"}, {"label_smoothing": 0.1, "ignore_index": 4}):
        kept = target if "ignore_index" not in options else target.clamp(min=0)
        assert torch.equal(cross_entropy(logits, kept, **options), F.cross_entropy(logits, kept, **options))


def test_an_error_is_a_gradwire_one() -> None:
    assert issubclass(PlanError, UsageError)
