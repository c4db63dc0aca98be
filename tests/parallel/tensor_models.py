"""Models as users write them; all in float64, none knows of other ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class EncoderLM(nn.Module):
    """Embedding tied to the head, two of torch's encoder layers between."""

    def __init__(self, vocab: int = 12, width: int = 12, heads: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, heads, 24, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=torch.float64)
        return self.head(self.encoder(self.embed(ids), mask=mask, is_causal=True))


class Decoder(nn.Module):
    def __init__(self, dropout: float = 0.0, **options: object) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(12, 12, 24, dropout, batch_first=True, norm_first=True)
        self.cross = nn.MultiheadAttention(12, 12, dropout, kdim=5, vdim=7, add_bias_kv=True, add_zero_attn=True)
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        memory = x.flip(1) * 0.5
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[0, -1] = True
        y = self.layer(x, memory, memory_key_padding_mask=padding).transpose(0, 1)
        z, weights = self.cross(y, y[..., :5], y[..., :7], average_attn_weights=True)
        return self.out(z.transpose(0, 1)) + weights.sum()


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.silu(self.gate(x)) * self.up(x)))


class FusedAttention(nn.Module):
    """nanoGPT's: sizes are read off the whole."""

    def __init__(self, width: int = 12, heads: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head, self.n_embd, self.dropout = heads, width, dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class ViTAttention(nn.Module):
    """timm's: one reshape into q, k and v."""

    def __init__(self, width: int = 12, heads: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = self.drop(((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1))
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


def rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), 1.0 / torch.arange(1, half + 1, dtype=x.dtype))
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class GroupedAttention(nn.Module):
    """Llama's: fewer heads of keys and values, rotary positions, norms a head, projections apart."""

    def __init__(
        self, heads: int = 24, kv_heads: int = 12, head: int = 4, width: int = 12, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.wq = nn.Linear(width, heads * head, bias=False)
        self.wk = nn.Linear(width, kv_heads * head, bias=False)
        self.wv = nn.Linear(width, kv_heads * head, bias=False)
        self.wo = nn.Linear(heads * head, width, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(head), nn.LayerNorm(head)
        self.slopes = nn.Parameter(torch.linspace(0.1, 1.0, heads).view(heads, 1, 1))
        self.n_heads, self.n_kv_heads, self.head, self.dropout = heads, kv_heads, head, dropout

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_norm(self.wq(x).view(b, t, self.n_heads, self.head)).transpose(1, 2)
        k = self.k_norm(self.wk(x).view(b, t, self.n_kv_heads, self.head)).transpose(1, 2)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head).transpose(1, 2)
        q, k = rotate(q), rotate(k)
        times = self.n_heads // self.n_kv_heads
        k = k[:, :, None].expand(-1, -1, times, -1, -1).reshape(b, self.n_heads, t, self.head)
        v = v.repeat_interleave(times, dim=1)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head) + self.slopes
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        weights = F.dropout(F.softmax(scores, dim=-1, dtype=x.dtype), self.dropout, self.training)
        return self.wo(torch.einsum("bhts,bhsd->bthd", weights, v).flatten(2))


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mixer, self.mlp = nn.LayerNorm(12), nn.RMSNorm(12), mixer, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def custom(dropout: float = 0.0) -> nn.Module:
    mlp = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Dropout(dropout), nn.Linear(48, 12), nn.Dropout(dropout))
    return nn.Sequential(
        Block(FusedAttention(dropout=dropout), mlp),
        Block(ViTAttention(dropout=dropout), SwiGLU(12, 24, dropout)),
        Block(GroupedAttention(dropout=dropout), SwiGLU(12, 36, dropout)),
    )


def encoder(dropout: float = 0.0) -> nn.Module:
    return EncoderLM(dropout=dropout)


def decoder(dropout: float = 0.0) -> nn.Module:
    return Decoder(dropout=dropout)


MODELS = {"encoder": encoder, "decoder": decoder, "custom": custom}


def built(name: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name](dropout=dropout).double()


def batch(name: str, seed: int = 1) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    if name == "encoder":
        return torch.randint(12, (3, 8), generator=numbers)
    return torch.randn(3, 8, 12, generator=numbers, dtype=torch.float64)
