"""The networks that the benchmarks train."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


def small_conv_net() -> nn.Module:
    """Three 3x3 convolutions and two linear layers for 28x28 grey bytes in 10 classes: 276,234 parameters."""
    convolutions: list[nn.Module] = []
    for inputs, outputs in ((1, 24), (24, 48), (48, 96)):
        convolutions += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(Grey(), *convolutions, nn.Flatten(), nn.Linear(864, 256), nn.ReLU(), nn.Linear(256, 10))


class Grey(nn.Module):
    """(n, h, w) bytes -> (n, 1, h, w) numbers with about mean 0 and deviation 1, as Fashion-MNIST has them."""

    def forward(self, x: Tensor) -> Tensor:
        return ((x.float() / 255 - 0.286) / 0.353).unsqueeze(1)


class Transformer(nn.Module):
    """A causal byte-level transformer, pre-norm; the output is tied to the embedding.

    context: its longest text. rotary: attention also knows how far apart two places are (RoFormer, arXiv 2104.09864), which
    is learnt in far fewer steps.
    """

    def __init__(self, *, width: int, layers: int, heads: int, context: int, rotary: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        rotation = Rotation(context, width // heads) if rotary else nn.Identity()
        self.layers = nn.ModuleList(Layer(width, heads, rotation) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(n, context) bytes -> (n, context, 256) logits of the next byte."""
        hidden = self.tokens(x) + self.places
        for layer in self.layers:
            hidden = layer(hidden)
        return F.linear(self.norm(hidden), self.tokens.weight)


class Rotation(nn.Module):
    """Turns each pair of a head's numbers by an angle in proportion to the place. size: numbers of a head."""

    def __init__(self, context: int, size: int) -> None:
        super().__init__()
        speeds = 10000.0 ** -(torch.arange(size // 2) / (size // 2))
        angles = torch.arange(context)[:, None] * speeds
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., context, size) -> the same shape."""
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * self.cosine - right * self.sine, left * self.sine + right * self.cosine], dim=-1)


class Layer(nn.Module):
    """Attention and a feed-forward part, each on the normalised input and added to it."""

    def __init__(self, width: int, heads: int, rotation: nn.Module) -> None:
        super().__init__()
        self.heads = heads
        self.rotation = rotation
        self.norm_in = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, context, width) -> the same shape."""
        n, length, width = x.shape
        parts = self.query_key_value(self.norm_in(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.rotation(query), self.rotation(key), value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.feed(x)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over samples (and places)."""
    return F.cross_entropy(output.flatten(0, -2), target.flatten())
