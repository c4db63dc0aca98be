"""The models that every plan must train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_CLASSES = 4


class Mlp(nn.Module):
    """Five inputs; one layer frozen, one never used, one used only for some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.rare = nn.Linear(8, 8)
        self.last = nn.Linear(8, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        return self.last(hidden)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6, affine=False)
        self.norm3, self.head = nn.BatchNorm1d(6, momentum=None), nn.Linear(6, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm1(self.conv1(x)))
        x = torch.tanh(self.norm2(self.conv2(x)))
        return self.head(self.norm3(x.mean(3)).mean(2))


class TiedTransformer(nn.Module):
    """Eleven tokens; the output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.zeros(6, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens) + self.position)).transpose(1, 2)


class SparseBag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 6, sparse=True)
        self.head = nn.Linear(6, NUM_CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(rows).sum(1)))


@dataclass(frozen=True)
class Case:
    """A model, and data of ``numel`` samples for it."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Tensor]
    targets: Callable[[Tensor, torch.Generator], Tensor]
    clip: float | None = 1.0
    batch_norm: str = "local"

    def model(self, dtype: torch.dtype) -> nn.Module:
        """The same weights for every call: drawn from a generator of its own, since ranks are threads."""
        model = self.build().to(dtype)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3 + ("norm" in name))
        return model

    def data(self, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(11)
        x = self.inputs(num_samples, generator)
        y = self.targets(x, generator)
        return (x.to(dtype) if x.is_floating_point() else x), y


def _classes(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, NUM_CLASSES, (len(x),), generator=generator)


CASES = (
    Case("mlp", Mlp, lambda n, g: torch.randn(n, 5, generator=g), _classes),
    Case("conv", ConvNet, lambda n, g: torch.randn(n, 1, 6, 6, generator=g), _classes, batch_norm="sync"),
    Case("tied", TiedTransformer, lambda n, g: torch.randint(0, 11, (n, 6), generator=g), lambda x, g: x.roll(-1, 1)),
    Case("sparse", SparseBag, lambda n, g: torch.randint(0, 50, (n, 3), generator=g), _classes, clip=None),
)

LOSS = F.cross_entropy
