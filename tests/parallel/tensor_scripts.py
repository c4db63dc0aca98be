"""What ranks do in test_tensor*.py, and what one process does instead: importable, since ranks are processes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Adam

from gradwire.comm.world import World
from gradwire.parallel.norm import clip_grad_norm_
from gradwire.parallel.tensor import exchange, share
from tests.parallel.tensor_models import batch, built

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
