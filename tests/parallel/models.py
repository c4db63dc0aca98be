"""Models to cut, and one process's answer for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LENGTH = 11, 8, 6


def mlp() -> nn.Module:
    """In-place activations, so that stages begin with one."""
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh()),
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 7)),
        *(nn.ReLU(inplace=True), nn.Linear(7, 3)),
    )


class Attention(nn.Module):
    """Fused qkv, with sizes read from its input."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = (t.view(batch, length, 2, width // 2).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """The usual shape: embeddings, a list of blocks, norm, a head that is the embedding; a mask made of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        _, length = tokens.shape
        assert length <= LENGTH, f"at most {LENGTH} tokens, not {length}"
        causal = torch.ones(length, length, device=tokens.device).tril().bool()
        mask = causal & (tokens != 0)[:, None, None, :] | torch.eye(length).bool()
        x = self.token(tokens) + self.place(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x)).transpose(1, 2)


class Skips(nn.Module):
    """A U: values of the first stages are used in the last, one of them a tuple, one a size."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.pair, self.scale = Pair(), nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        pair = self.pair(x)
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x)) * self.scale
            kept.append(x)
        width = x.size(1)
        for layer, skip in zip(self.up, reversed(kept), strict=True):
            x = torch.tanh(layer(x)) + skip / width
        return self.head(x + pair[0] * pair[1][0] * self.scale)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], None]:
        return self.layer(x), [x.sigmoid()], None


class Twice(nn.Module):
    """One block called twice, in two stages; and a part of it that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.middle, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = torch.tanh(self.shared(batch["x"]))
        x = torch.tanh(self.shared(torch.tanh(self.middle(x))))
        return {"scores": self.head(x)}


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        nn.TransformerEncoder(layer, 5, nn.LayerNorm(WIDTH), enable_nested_tensor=False),
        nn.Linear(WIDTH, VOCABULARY),
    )


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    x: Callable[[int, torch.Generator], object]
    y: Callable[[int, torch.Generator], Tensor]
    loss: Callable[..., Tensor] = F.cross_entropy

    def model(self) -> nn.Module:
        """The same weights for every call, from a generator of its own: ranks are threads."""
        model, generator = self.build().double(), torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.4 + ("norm" in name))
        return model

    def batch(self, num_samples: int) -> tuple[object, Tensor]:
        generator = torch.Generator().manual_seed(11)
        return self.x(num_samples, generator), self.y(num_samples, generator)


def _rows(n: int, g: torch.Generator) -> Tensor:
    return torch.randn(n, 6, generator=g, dtype=torch.float64)


def _tokens(n: int, g: torch.Generator) -> Tensor:
    return torch.randint(0, VOCABULARY, (n, LENGTH), generator=g)


def _classes(n: int, g: torch.Generator) -> Tensor:
    return torch.randint(0, 3, (n,), generator=g)


CASES = {
    case.name: case
    for case in (
        Case("mlp", mlp, _rows, _classes),
        Case("gpt", Gpt, _tokens, _tokens),
        Case("skips", Skips, _rows, _classes),
        Case(
            "twice", Twice, lambda n, g: {"x": _rows(n, g)}, _classes, lambda out, y: F.cross_entropy(out["scores"], y)
        ),
        Case("encoder", encoder, _tokens, _tokens, lambda out, y: F.cross_entropy(out.transpose(1, 2), y)),
    )
}
