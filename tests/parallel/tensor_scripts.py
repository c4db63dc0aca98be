"""What ranks do in test_tensor*.py, and what one process does instead: importable, since ranks are processes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.checkpoint import checkpoint

from gradwire.comm.world import World
from gradwire.parallel.cross_entropy import cross_entropy
from gradwire.parallel.moved import exchange
from gradwire.parallel.norm import clip_grad_norm_
from gradwire.parallel.tensor import share
from tests.parallel.tensor_models import FusedAttention, batch, built

Numbers = dict[str, list[float]]


def flat(tensor: Tensor) -> list[float]:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().flatten().tolist()


def work(world: World | None, name: str, *, dropout: float = 0.0, rules: dict[str, str] | None = None) -> Numbers:
    """Forward in eval mode, gradients, and five steps of Adam with clipping; the same with and without other ranks."""
    model = built(name, dropout)
    optimizer = Adam([{"params": list(model.parameters()), "lr": 0.003}], eps=1e-4)
    torch.manual_seed(7)
    if world is not None:
        if world.rank:
            torch.manual_seed(100 + world.rank)
        exchange([optimizer], share(model, world.torch_mesh()["tensor"], rules))
    found: Numbers = {}
    model.eval()
    with torch.no_grad():
        found["eval"] = flat(model(batch(name)))
    model.train()
    for step in range(5):
        optimizer.zero_grad()
        y = model(batch(name, step))
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).square().mean().backward()
        if step == 0:
            found["train"] = flat(y)
            found |= {f"grad {key}": flat(p.grad) for key, p in model.named_parameters() if p.grad is not None}
        found[f"norm {step}"] = [float(clip_grad_norm_(model.parameters(), 0.1))]
        optimizer.step()
    found |= {f"after {key}": flat(value) for key, value in model.state_dict().items()}
    return found


def everything(world: World) -> dict[str, Numbers]:
    torch.set_num_threads(1)
    return {
        f"{name} {dropout}": work(world, name, dropout=dropout)
        for name in ("encoder", "decoder", "custom")
        for dropout in (0.0, 0.3)
    }


class Small(nn.Module):
    """A language model with norms and dropouts between attention and MLP, and an untied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 12, padding_idx=3)
        layer = nn.TransformerEncoderLayer(12, 4, 24, 0.3, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(12), enable_nested_tensor=True)
        self.head = nn.Linear(12, 12)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding))


def small() -> Small:
    torch.manual_seed(0)
    return Small().double()


def loss_and_gradients(model: nn.Module) -> Numbers:
    torch.manual_seed(5)
    ids = batch("encoder")
    logits = model(ids)
    target = ids.flip(0).masked_fill(ids == 2, -100)
    loss = cross_entropy(logits.view(-1, 12), target.view(-1), label_smoothing=0.1)
    loss = loss + F.cross_entropy(logits.transpose(1, 2), target, reduction="sum")
    loss.backward()
    return {"loss": flat(loss)} | {key: flat(p.grad) for key, p in model.named_parameters() if p.grad is not None}


def by_rules(world: World) -> dict[str, object]:
    """What a model of rules gives, and what kind of logits it had."""
    mesh = world.torch_mesh()["tensor"]
    model = small()
    rules = {"head": "vocabulary", "*.norm?": "sequence", "*.dropout?": "sequence", "encoder.norm": "sequence"}
    share(model, mesh, rules)
    kind = type(model(batch("encoder"))).__name__
    found = loss_and_gradients(model)
    odd = batch("encoder")[:, :7]  # positions that the ranks do not divide stay whole
    return {"kind": kind, "found": found, "odd": flat(model.eval()(odd)), "pieces": pieces(model)}


def pieces(model: nn.Module) -> dict[str, float]:
    """Which part of each parameter lives here."""
    return {key: (p.to_local().numel() / p.numel()) for key, p in model.named_parameters() if isinstance(p, DTensor)}


def inference(world: World) -> list[float]:
    """torch's fused layers would read whole weights."""
    model = small()
    share(model, world.torch_mesh()["tensor"])
    return padded(model)


def padded(model: nn.Module) -> list[float]:
    """What a model gives in evaluation, at the positions that are not padding."""
    padding = torch.zeros(3, 8, dtype=torch.bool)
    padding[1, 5:] = True
    with torch.no_grad():
        return flat(model.eval()(batch("encoder"), padding)[~padding])


def losses(world: World | None) -> Numbers:
    """Every way to call the loss, with shared logits as a DTensor, or plain ones."""
    numbers = torch.Generator().manual_seed(2)
    found: Numbers = {}
    for shape in ((24, 12), (12,), (2, 12, 5)):
        whole = torch.randn(*shape, generator=numbers, dtype=torch.float64) * 30
        target = torch.randint(12, () if len(shape) == 1 else (shape[0], *shape[2:]), generator=numbers)
        target = target.masked_fill(target == 1, -1) if len(shape) > 1 else target
        for reduction in ("mean", "sum", "none"):
            for smoothing in (0.0, 0.2):
                logits = whole.clone().requires_grad_()
                if world is not None:
                    mesh = world.torch_mesh()["tensor"]
                    logits = distribute_tensor(whole, mesh, [Shard(int(len(shape) > 1))]).requires_grad_()
                loss = cross_entropy(logits, target, ignore_index=-1, reduction=reduction, label_smoothing=smoothing)
                (loss * torch.arange(1.0, loss.numel() + 1).view(loss.shape)).sum().backward()
                assert logits.grad is not None
                found[f"{shape} {reduction} {smoothing}"] = flat(loss) + flat(logits.grad)
    return found


def norms(world: World) -> dict[str, float]:
    """cases.md 21: sharded 3 and 4, on both 12."""
    mesh = world.torch_mesh()["tensor"]
    found: dict[str, float] = {}
    for order in (1.0, 2.0, 3.0, math.inf):
        sharded = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Shard(0)]))
        sharded.grad = distribute_tensor(torch.tensor([3.0, 4.0]), mesh, [Shard(0)])
        same, alone = nn.Parameter(torch.zeros(1)), nn.Parameter(distribute_tensor(torch.zeros(1), mesh, [Replicate()]))
        same.grad, alone.grad = torch.tensor([12.0]), distribute_tensor(torch.tensor([0.0]), mesh, [Replicate()])
        found[f"{order}"] = float(clip_grad_norm_([sharded, same, alone], 1.0, order))
        found[f"{order} clipped"] = float(same.grad)
    across = nn.Parameter(torch.zeros(1))
    across.grad = torch.tensor([3.0 + world.rank])
    found["across"] = float(clip_grad_norm_([across], 1.0, across=world.group("tensor", channel="norm")))
    return found


def odd_heads(world: World) -> tuple[list[float], list[float]]:
    """A rule may share projections whose heads the ranks do not divide: slow, but right."""
    rules = {"c_attn": "column", "c_proj": "row"}
    torch.manual_seed(0)
    model = FusedAttention(12, 3).double()
    share(model, world.torch_mesh()["tensor"], rules)
    x = batch("custom")
    y = model(x)
    y.square().sum().backward()
    return flat(y), flat(model.c_attn.weight.grad)


def taken_over(world: World | None) -> Numbers:
    """An optimizer that has stepped goes on after its parameters were shared."""
    model = built("custom")
    norms, rest = [p for p in model.parameters() if p.dim() == 1], [p for p in model.parameters() if p.dim() != 1]
    optimizers = [SGD([{"params": norms, "lr": 0.1}, {"params": rest}], lr=0.01, momentum=0.9), Adam(rest, eps=1e-4)]
    for step in range(3):
        if step == 1 and world is not None:
            replaced = share(model, world.torch_mesh()["tensor"])
            exchange(optimizers, replaced)
            assert [group["lr"] for group in optimizers[0].param_groups] == [0.1, 0.01]
            held = {id(p) for group in optimizers[0].param_groups for p in group["params"]}
            assert held == {id(p) for p in model.parameters()}
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch("custom", step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return {key: flat(value) for key, value in model.state_dict().items()}


ATTENTION = {
    "unbatched": ({}, {"need_weights": True}),
    "each head's weights": ({"batch_first": True}, {"average_attn_weights": False}),
    "no bias": ({"bias": False, "dropout": 0.4}, {"need_weights": False}),
    "a mask a head": ({}, {"attn_mask": "3d", "need_weights": False}),
    "both masks": ({"dropout": 0.4, "batch_first": True}, {"attn_mask": "2d", "padding": True}),
    "causal": ({"add_zero_attn": True}, {"attn_mask": "2d", "is_causal": True}),
}


def attention(world: World | None) -> Numbers:
    """nn.MultiheadAttention in all ways to build and call it; self attention and cross attention."""
    found: Numbers = {}
    for kind, (built_with, called_with) in ATTENTION.items():
        torch.manual_seed(4)
        model = nn.MultiheadAttention(12, 4, **built_with).double()
        if world is not None:
            share(model, world.torch_mesh()["tensor"])
        shape = (5, 12) if kind == "unbatched" else (5, 5, 12)
        x = torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).view(shape).sin().requires_grad_()
        options: dict[str, object] = dict(called_with)
        if "attn_mask" in options:
            mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
            options["attn_mask"] = mask.expand(20, 5, 5) if options["attn_mask"] == "3d" else mask
        if options.pop("padding", False):
            options["key_padding_mask"] = torch.zeros(5, 5, dtype=torch.bool).index_fill(1, torch.tensor([4]), True)
        for key in (x, x * 0.5):
            y, weights = model(x, key, key, **options)
            (y.square().sum() + (0 if weights is None else weights.square().sum())).backward()
            found[f"{kind} {key is x}"] = flat(y) + ([] if weights is None else flat(weights))
        found |= {f"{kind} {name}": flat(p.grad) for name, p in model.named_parameters()} | {f"{kind} x": flat(x.grad)}
    return found


def recomputed(world: World | None) -> Numbers:
    """Activation checkpoints around shared blocks, of both kinds; and mixed precision runs."""
    model = built("custom", 0.3)
    if world is not None:
        share(model, world.torch_mesh()["tensor"])
    x = batch("custom").requires_grad_()
    for reentrant, block in zip((True, False, False), model, strict=True):
        x = checkpoint(block, x, use_reentrant=reentrant)
    x.square().mean().backward()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert bool(torch.isfinite(model.float()(batch("custom").float())).all()) or world is None
    return {key: flat(p.grad) for key, p in model.named_parameters()}


def with_fully_shard(world: World) -> Numbers:
    """FSDP2 over ranks that share layers."""
    torch.set_num_threads(1)
    model = built("custom")
    share(model, world.torch_mesh()["tensor"])
    for block in model:
        fully_shard(block, mesh=world.torch_mesh()["shard"])
    fully_shard(model, mesh=world.torch_mesh()["shard"])
    model(batch("custom")).square().mean().backward()
    norm = clip_grad_norm_(model.parameters(), 0.1)
    return {key: flat(p.grad) for key, p in model.named_parameters()} | {"norm": [float(norm)]}


def small_things(world: World) -> dict[str, object]:
    torch.set_num_threads(1)
    refused: list[str] = []
    for bad in (lambda: out_of_bounds(world), lambda: register_hook(world)):
        try:
            bad()
        except Exception as error:
            refused.append(f"{type(error).__name__}: {error}")
    return {
        "by rules": by_rules(world),
        "inference": inference(world),
        "losses": losses(world),
        "norms": norms(world),
        "odd heads": odd_heads(world) if world.size == 2 else None,
        "taken over": taken_over(world),
        "attention": attention(world),
        "recomputed": recomputed(world),
        "refused": refused,
    }


def out_of_bounds(world: World) -> None:
    model = small()
    share(model, world.torch_mesh()["tensor"])
    model(torch.tensor([[1, 12]]))


def register_hook(world: World) -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
    model[1].register_forward_hook(lambda module, args, y: y.register_hook(print))
    share(model, world.torch_mesh()["tensor"])
    model(torch.ones(1, 12))
