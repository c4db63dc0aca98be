"""Operations on an activation that ranks share, for test_tensor_part.py: each must mean what it means on the whole."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire.comm.world import World
from gradwire.parallel import cross_entropy as known_loss
from gradwire.parallel import part_math, part_shapes
from gradwire.parallel.moves import Ranks, take
from gradwire.parallel.part import Part

KNOWN = (known_loss, part_math, part_shapes)
SHAPE = (2, 3, 4, 12)  # shared along each dim whose length the ranks divide


def plain(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).view(shape).sin()


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (12,), plain(12), plain(12))


def attend(x: Tensor, **options: object) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 0.5, x + 1, **options)


def in_place(x: Tensor) -> Tensor:
    y = x * 1.0
    y += 2.0
    y.mul_(plain(12))
    return F.relu(y, inplace=True)


def into_plain(x: Tensor) -> Tensor:
    y = torch.zeros(SHAPE, dtype=x.dtype)
    y[:, 1:] = x[:, 1:]
    return y.add_(x)


def pairs(x: Tensor) -> Tensor:
    angles = torch.polar(torch.ones(4, 6, dtype=torch.float64), plain(4, 6))
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * angles).flatten(3)


OPERATIONS = {
    "arithmetic": lambda x: (1 - x) / (x.abs() + 2) ** 2 + plain(12) * x - plain(4, 1) + 2 * x - x % 0.7,
    "compare": lambda x: torch.where(x > 0, x, -x * plain(3, 1, 12)) + (x >= plain(4, 12)).double(),
    "activations": lambda x: F.gelu(x) + F.silu(x) + nn.Tanh()(x) + torch.sigmoid(x) + nn.ELU()(x) + x.relu(),
    "masked": lambda x: x.masked_fill(torch.ones(4, 12).tril().bool(), -1.0),
    "in place": in_place,
    "into plain": into_plain,
    "cast": lambda x: x.float().to(torch.float64) + x.type_as(plain(1)) + x.double().contiguous().clone(),
    "views": lambda x: x.view(2, 3, 48).reshape(6, 4, 4, 3).flatten(1, 2).unflatten(1, (2, -1)).reshape(-1, 12),
    "merge": lambda x: x.flatten(0, 2).view(2, 12, 12).reshape(24, 12).unflatten(0, (4, 6)),
    "permute": lambda x: (
        x.permute(3, 1, 0, 2).transpose(-1, 1).movedim(0, 2).mT.unsqueeze(1).unsqueeze(-1).squeeze(1).squeeze()
    ),
    "select": lambda x: x[:, None, :1] + x[..., :1] + x[1] + x.select(0, 1)[-1] + x[0, ..., 2:3, :].narrow(0, 1, 1),
    "index": lambda x: (
        x[:, [0, 2]]
        + x.index_select(2, torch.tensor([1]))[:, 1:]
        + x[x > 0].sum()
        + x.gather(1, x[:, :1].argmax(0, keepdim=True) * 0)
    ),
    "chunk": lambda x: (
        torch.cat(x.chunk(2, -1), 1)[:, 3:] * x.split(6, 3)[0] + sum(x.split([4, 8], 3)[0].split(2, -1)).sum()
    ),
    "unbind": lambda x: torch.stack(x.unbind(1), 1) + sum(x.unbind(2)).unsqueeze(2) + torch.stack(list(x)).mean(),
    "cat": lambda x: torch.cat([x[..., 6:], -x[..., :6]], -1) + torch.cat([x, plain(2, 3, 4, 12)], 1)[:, 3:],
    "stack": lambda x: torch.stack([x, plain(2, 3, 4, 12)], 2).sum(2),
    "repeat": lambda x: x.repeat(2, 1, 1, 1) * x.repeat(1, 1, 1, 3).sum() + x.repeat_interleave(2, 0),
    "repeat heads": lambda x: (
        x.repeat_interleave(3, 1)[:, 1:4] + x[:, :, None].expand(2, 3, 5, 4, 12).flatten(1, 2)[:, 4:7]
    ),
    "reductions": lambda x: (
        x.sum(0) + x.mean(-1, keepdim=True)[0] + x.amax((0, 1), keepdim=True)[0] + x.sum() + x.max(2)[0].sum()
    ),
    "norms": lambda x: (
        x.norm(dim=-1).sum() + F.normalize(x, dim=1) + x.var(1, keepdim=True) + x.logsumexp((0, 2)).sum() + x.norm()
    ),
    "softmax": lambda x: (
        x.softmax(-1) + F.softmax(x, dim=1) + torch.log_softmax(x, 2) + x.cumsum(2) + x.flip(0) + x.flip((1, 3))
    ),
    "topk": lambda x: (
        x.topk(2, 1).values.sum() + x.sort(-1).values + torch.max(x, plain(12)) + x.argmax(-1, keepdim=True) * x
    ),
    "layer norm": layer_norm,
    "rms norm": lambda x: F.rms_norm(x, (4, 12), plain(4, 12)),
    "linear": lambda x: F.linear(x, plain(5, 12), plain(5)),
    "bilinear": lambda x: (
        x @ x.mT + torch.matmul(x, plain(12, 4)) + (plain(4, 4) @ x) @ plain(12, 4) + plain(4, 12) @ x.mT
    ),
    "vectors": lambda x: x @ plain(12) + torch.einsum("abcd,d->abc", x, plain(12)),
    "einsum": lambda x: (
        torch.einsum("abcd,ad->bcd", x, plain(2, 12)) + torch.einsum("abcd,abcd,cx->bdx", x, x, plain(4, 3)).sum()
    ),
    "attention": lambda x: (
        attend(x) + attend(x, is_causal=True) + attend(x, attn_mask=plain(4, 4)) + attend(x, scale=0.3)
    ),
    "masked attention": lambda x: attend(x, attn_mask=plain(2, 3, 4, 4) > 0.9) + attend(x, attn_mask=plain(2, 1, 1, 4)),
    "dropout": lambda x: (
        F.dropout(x, 0.4) + F.dropout(x.transpose(1, 3) * 1, 0.4).transpose(1, 3) + nn.Dropout1d()(x[0])
    ),
    "attention dropout": lambda x: attend(x, dropout_p=0.3) + attend(x, dropout_p=0.3, is_causal=True),
    "masked dropout": lambda x: attend(x, dropout_p=0.3, attn_mask=plain(2, 3, 4, 4) > 0.9),
    "grouped": lambda x: (
        F.scaled_dot_product_attention(x.repeat_interleave(2, 1), x, x, dropout_p=0.2, enable_gqa=True).sum()
        + F.scaled_dot_product_attention(x, x[:, :1], x[:, 1:2])
    ),
    "pad": lambda x: (
        F.pad(x, (1, 2, 0, 1))[:, :, :4, 1:13] + F.pad(x, (0, 0, 0, 0, 1, 0))[:, 1:] + x.tril() + x.triu(1)
    ),
    "rotate": pairs,
    "factories": lambda x: torch.zeros_like(x) + torch.ones_like(x) * x + x.new_zeros(12) + torch.full_like(x, 2.0) * x,
    "losses": lambda x: F.cross_entropy(x, torch.ones(2, 4, 12, dtype=torch.long)) + F.mse_loss(x, plain(*SHAPE)),
    "class loss": lambda x: F.cross_entropy(x.flatten(0, 2), torch.arange(24) % 12, label_smoothing=0.1),
    "batch norm": lambda x: (
        nn.BatchNorm2d(3).double()(x) + F.conv2d(x, plain(3, 3, 1, 1)) + F.interpolate(x, scale_factor=1.0)
    ),
    "numbers": lambda x: (
        x * x.detach().sum().item() + (x.max() > 0) * 2 + len(x) + x.numel() + x.size(-1) + x.dim() + x.shape[1]
    ),
}


def value(operation: str, x: object, source: Tensor) -> tuple[list[float], list[float]]:
    torch.manual_seed(3)
    y = OPERATIONS[operation](x)
    y = y.full_tensor() if isinstance(y, Part) else y
    source.grad = None
    (y * plain(y.numel()).view(y.shape)).sum().backward()
    return y.detach().flatten().tolist(), source.grad.flatten().tolist()


def same(want: list[float], got: list[float]) -> bool:
    close = [abs(a - b) <= 1e-12 * max(1, abs(a)) for a, b in zip(want, got, strict=False)]
    return len(want) == len(got) and all(close)


def as_part(source: Tensor, dim: int, segments: tuple[int, ...], ranks: Ranks) -> Part:
    return Part(take(source, dim, segments, ranks), dim, segments, ranks)


def everywhere(world: World) -> list[str]:
    """Where an operation on parts is not the operation on the whole; and how many were tried."""
    torch.set_num_threads(1)
    ranks = Ranks.of(world.torch_mesh()["tensor"])
    wrong: list[str] = []
    tried = 0
    for operation in OPERATIONS:
        source = plain(*SHAPE).requires_grad_()
        want = value(operation, source, source)
        for dim, size in enumerate(SHAPE):
            for segments in ((size,), (size // 2,) * 2, (size // 3, 2 * size // 3)):
                if sum(segments) != size or any(part % ranks.size for part in segments):
                    continue
                tried += 1
                try:
                    got = value(operation, as_part(source, dim, segments, ranks), source)
                except Exception as error:
                    wrong.append(f"{operation} dim {dim} {segments}: {type(error).__name__} {error}"[:300])
                    continue
                if not all(same(a, b) for a, b in zip(want, got, strict=True)):
                    wrong.append(f"{operation} dim {dim} {segments}: another value")
    return [f"{tried} tried", *wrong]
