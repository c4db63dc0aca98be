"""The two models that the benchmarks train, with data of the right shape.

Batches are sized so that one step takes about 0.4 s on one core: long enough to measure, and the share of exchange in
a step is what a small cluster of such machines sees. The data is random: speed does not depend on what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

CONTEXT = 128


class Block(nn.Module):
    """Two 3x3 convolutions with batch normalisation around a shortcut (He et al. 2016, basic block)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, outputs, h / stride, w / stride)."""
        return F.relu(self.main(x) + self.shortcut(x))


def conv_net() -> nn.Module:
    """ResNet-18 for 3x32x32 images in 10 classes: 11,173,962 parameters."""
    widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [block for a, b, stride in widths for block in (Block(a, b, stride), Block(b, b, 1))]
    stem = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Transformer(nn.Module):
    """A causal byte-level transformer, pre-norm, 6 layers of width 320, 5 heads; output tied to the embedding."""

    def __init__(self, width: int = 320, layers: int = 6, heads: int = 5) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.zeros(CONTEXT, width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(n, CONTEXT) bytes -> (n, CONTEXT, 256) logits of the next byte."""
        hidden = self.tokens(x) + self.places
        for layer in self.layers:
            hidden = layer(hidden)
        return F.linear(self.norm(hidden), self.tokens.weight)


class Layer(nn.Module):
    """Attention and a feed-forward part, each on the normalised input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_in = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, CONTEXT, width) -> the same shape."""
        n, length, width = x.shape
        parts = self.query_key_value(self.norm_in(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.feed(x)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its data and its loss. samples_per_rank: the batch of one rank in one step."""

    build: Callable[[], nn.Module]
    samples_per_rank: int
    sample: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]

    def model(self, seed: int) -> nn.Module:
        """The model, with the weights of this seed on every rank."""
        torch.manual_seed(seed)
        return self.build()

    def dataset(self, num_samples: int, seed: int) -> TensorDataset:
        """``num_samples`` random samples, the same for the same seed."""
        return TensorDataset(*self.sample(num_samples, torch.Generator().manual_seed(seed)))


def _images(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    images = torch.randn(count, 3, 32, 32, generator=generator)
    return images, torch.randint(10, (count,), generator=generator)


def _bytes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    text = torch.randint(256, (count, CONTEXT + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over samples (and places)."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


WORKLOADS = {
    "conv": Workload(build=conv_net, samples_per_rank=12, sample=_images),
    "transformer": Workload(build=Transformer, samples_per_rank=8, sample=_bytes),
}
