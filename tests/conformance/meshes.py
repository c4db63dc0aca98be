"""The table of meshes: every row must give the weights that one process gives. Ranks are processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gradwire as gw
from gradwire.comm.world import World

BATCH_SIZE = 8
NUM_SAMPLES = 4 * BATCH_SIZE + 3  # the last batch has three samples
NUM_EPOCHS = 4
VOCABULARY = 12
Weights = dict[str, Tensor]


class Perceptron(nn.Sequential):
    """Layers whose rows do not divide by the ranks."""

    def __init__(self) -> None:
        layers = [
            nn.Linear(5, 12),
            nn.Tanh(),
            nn.Linear(12, 7),
            nn.Tanh(),
            nn.Linear(7, 12),
            nn.Tanh(),
            nn.Linear(12, 4),
        ]
        super().__init__(*layers)


class LanguageModel(nn.Module):
    """Blocks in a loop; a mask and positions made in forward; the head is the embedding where ``tied``."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.position = nn.Parameter(torch.zeros(6, 12))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 6, 24, dropout=0.0, batch_first=True, norm_first=True) for _ in range(4)
        )
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.full((6, 6), float("-inf"), dtype=self.norm.weight.dtype).triu(1)
        hidden = self.embedding(tokens) + self.position
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        return self.head(self.norm(hidden)).transpose(1, 2)


def model(name: str) -> nn.Module:
    """The same weights for every call."""
    made = Perceptron() if name == "perceptron" else LanguageModel(tied=name == "tied")
    made = made.double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, param in made.named_parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3 + ("norm" in key))
    return made


def data(name: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    if name == "perceptron":
        x = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
        return TensorDataset(x, torch.randint(0, 4, (NUM_SAMPLES,), generator=generator))
    tokens = torch.randint(0, VOCABULARY, (NUM_SAMPLES, 6), generator=generator)
    return TensorDataset(tokens, tokens.roll(-1, 1))


def adam(of: nn.Module) -> torch.optim.Optimizer:
    # Where a gradient is zero but for rounding, Adam's default epsilon of 1e-8 makes whole steps of the noise.
    return torch.optim.Adam(of.parameters(), lr=0.01, eps=1e-4)


def truth(name: str) -> Weights:
    """Plain PyTorch: twenty steps."""
    made = model(name)
    optimizer = adam(made)
    x, y = data(name).tensors
    for _ in range(NUM_EPOCHS):
        for batch_x, batch_y in zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True):
            F.cross_entropy(made(batch_x), batch_y).backward()
            nn.utils.clip_grad_norm_(made.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return {key: value.detach() for key, value in made.state_dict().items()}


def train(world: World, names: tuple[str, ...]) -> dict[str, Weights]:
    """The same loop with gradwire's lines in it; rank 0's weights win, so others start elsewhere."""
    found: dict[str, Weights] = {}
    for name in names:
        made = model(name)
        if world.rank:
            with torch.no_grad():
                for param in made.parameters():
                    param.add_(1.0)
        optimizer = adam(made)
        loader = gw.DataLoader(data(name), BATCH_SIZE, shuffle=False)
        gw.distribute(made, optimizer, loader)
        for _ in range(NUM_EPOCHS):
            for x, y in loader:
                gw.forward_backward(made, F.cross_entropy, x, y)
                gw.clip_grad_norm_(made.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        found[name] = gw.whole_state_dict(made)
    return found


@dataclass(frozen=True)
class MeshRow:
    """models: which can be parted so."""

    name: str
    plan: gw.Plan
    models: tuple[str, ...] = ("perceptron", "untied", "tied")

    @property
    def num_ranks(self) -> int:
        """The mesh's product."""
        num = 1
        for size in self.plan.mesh.values():
            num *= size
        return num


@dataclass
class Pipelines:
    """Short words for the settings below."""

    gpipe: gw.Pipeline = field(default_factory=lambda: gw.Pipeline(schedule="gpipe", microbatches=3))
    interleaved: gw.Pipeline = field(default_factory=lambda: gw.Pipeline(schedule="interleaved", stages_per_rank=2))
    within: gw.Pipeline = field(default_factory=lambda: gw.Pipeline(cuts=("2",)))
    zero_bubble: gw.Pipeline = field(default_factory=lambda: gw.Pipeline(schedule="zero-bubble", microbatches=4))


P = Pipelines()
TRANSFORMERS = ("untied", "tied")
ROWS = (
    # each axis alone
    MeshRow("rows of the optimizer, 2", gw.Plan(mesh={"shard": 2}, sharding="optimizer")),
    MeshRow("rows of the optimizer, 3", gw.Plan(mesh={"shard": 3}, sharding="optimizer", accumulate=2)),
    MeshRow("gradients, 2", gw.Plan(mesh={"shard": 2}, sharding="gradients")),
    MeshRow("parameters, 2", gw.Plan(mesh={"shard": 2}, accumulate=2)),
    MeshRow("parameters, 3", gw.Plan(mesh={"shard": 3})),
    MeshRow("parameters, 4", gw.Plan(mesh={"shard": 4})),
    MeshRow("pipeline, 2", gw.Plan(mesh={"pipeline": 2}, accumulate=2)),
    MeshRow("pipeline, 3, gpipe", gw.Plan(mesh={"pipeline": 3}, pipeline=P.gpipe)),
    MeshRow("pipeline, 4, zero bubble", gw.Plan(mesh={"pipeline": 4}, pipeline=P.zero_bubble)),
    MeshRow("pipeline, 2, interleaved", gw.Plan(mesh={"pipeline": 2}, pipeline=P.interleaved)),
    MeshRow("tensor, 2", gw.Plan(mesh={"tensor": 2}, accumulate=2)),
    MeshRow("tensor, 3", gw.Plan(mesh={"tensor": 3}), TRANSFORMERS),
    MeshRow("tensor, 6", gw.Plan(mesh={"tensor": 6}), TRANSFORMERS),
    # hybrids
    MeshRow("data x optimizer rows", gw.Plan(mesh={"data": 2, "shard": 2}, sharding="optimizer")),
    MeshRow("data x parameters", gw.Plan(mesh={"data": 2, "shard": 2})),
    MeshRow("data x gradients", gw.Plan(mesh={"data": 2, "shard": 2}, sharding="gradients")),
    MeshRow("gradients x tensor", gw.Plan(mesh={"shard": 2, "tensor": 2}, sharding="gradients")),
    MeshRow("data x pipeline", gw.Plan(mesh={"data": 2, "pipeline": 2})),
    MeshRow("data x pipeline of 3", gw.Plan(mesh={"data": 2, "pipeline": 3})),
    MeshRow("data x tensor", gw.Plan(mesh={"data": 2, "tensor": 2})),
    MeshRow("data of 3 x tensor", gw.Plan(mesh={"data": 3, "tensor": 2})),
    MeshRow("pipeline x optimizer rows", gw.Plan(mesh={"pipeline": 2, "shard": 2}, sharding="optimizer")),
    MeshRow("pipeline x tensor", gw.Plan(mesh={"pipeline": 2, "tensor": 2})),
    MeshRow(
        "pipeline x tensor, cut between shared layers",
        gw.Plan(mesh={"pipeline": 2, "tensor": 2}, pipeline=P.within),
        ("perceptron",),
    ),
    MeshRow("shard x tensor", gw.Plan(mesh={"shard": 2, "tensor": 2})),
    MeshRow("optimizer rows x tensor", gw.Plan(mesh={"shard": 2, "tensor": 2}, sharding="optimizer")),
    MeshRow("data x shard x tensor", gw.Plan(mesh={"data": 2, "shard": 2, "tensor": 2})),
    MeshRow("data x pipeline x rows", gw.Plan(mesh={"data": 2, "pipeline": 2, "shard": 2}, sharding="optimizer")),
    MeshRow("data x pipeline x tensor", gw.Plan(mesh={"data": 2, "pipeline": 2, "tensor": 2})),
)
