"""A model whose every value is known, laid out in different ways; what ranks do in test_layouts.py."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradwire.checkpoint.api import load, save
from gradwire.comm.world import World

SHAPES = {"matrix": (7, 5), "six": (6,), "cube": (3, 4, 5), "single": (1, 9)}
BUFFERS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64, torch.complex128,
]  # fmt: skip
LAYOUTS = {  # of each mesh
    "data=1": ("plain",),
    "shard=2": ("plain", "rows", "columns"),
    "shard=3": ("plain", "rows", "columns"),
    "shard=4": ("plain", "rows"),
    "data=2 x shard=2": ("plain", "hybrid"),
    "shard=2 x tensor=2": ("grid",),
}


def known(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """The value of that name: any bits but NaN's, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, generator=generator)
    return (torch.randn(shape, dtype=torch.float64, generator=generator) * 50).abs().to(dtype)


def lay(world: World, layout: str, value: Tensor) -> Tensor:
    """``value`` as this layout cuts it."""
    if layout == "plain" or value.dim() == 0:
        return value
    mesh, last = world.torch_mesh(), value.dim() - 1
    if layout == "rows":
        return distribute_tensor(value, mesh["shard"], [Shard(0)])
    if layout == "columns":
        return distribute_tensor(value, mesh["shard"], [Shard(last)])
    if layout == "hybrid":
        return distribute_tensor(value, mesh["data", "shard"], [Replicate(), Shard(0)])
    return distribute_tensor(value, mesh["shard", "tensor"], [Shard(0), Shard(last)])


class Known(nn.Module):
    """Parameters of `SHAPES` laid out, one of them tied, and buffers of all dtypes."""

    def __init__(self, world: World, layout: str, *, blank: bool = False) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            value = torch.zeros(shape) if blank else known(name, shape)
            self.register_parameter(name, nn.Parameter(lay(world, layout, value)))
        self.tied = self.matrix
        for dtype in BUFFERS:
            name = str(dtype).replace("torch.", "of_")
            value = known(name, (4, 3), dtype)
            self.register_buffer(name, torch.zeros_like(value) if blank else value.t().contiguous().t())
        scalar = torch.tensor(0.0 if blank else 2.5)
        self.register_buffer("scalar", scalar)
        self.register_buffer("empty", torch.zeros(0, 3))


def adam(world: World, layout: str, model: Known) -> torch.optim.AdamW:
    """As after three steps."""
    plain = [model.six, model.single]
    groups = [{"params": [model.matrix, model.cube], "lr": 0.25}, {"params": plain, "betas": (0.5, 0.75)}]
    optimizer = torch.optim.AdamW(groups, lr=0.125, weight_decay=0.5)
    for name in ("matrix", "six", "cube"):  # single was never used
        param = getattr(model, name)
        optimizer.state[param] = {
            "step": torch.tensor(3.0),
            "exp_avg": lay(world, layout, known(f"{name}.m", SHAPES[name])),
            "exp_avg_sq": lay(world, layout, known(f"{name}.v", SHAPES[name])),
        }
    return optimizer


def write(world: World, layout: str, folder: str) -> int:
    """Save it; the number of bytes that this rank wrote."""
    model = Known(world, layout)
    path = save(folder, model, adam(world, layout, model), note="known")
    mine = path / f"rank-{world.rank}.safetensors"
    return mine.stat().st_size if mine.exists() else 0


def read(world: World, layout: str, folder: str) -> list[str]:
    """Load it into a blank one; the names of what differs from what is known by a single byte."""
    model = Known(world, layout, blank=True)
    groups = [{"params": [model.matrix, model.cube]}, {"params": [model.six, model.single]}]
    optimizer = torch.optim.AdamW(groups)
    rest = load(folder, model, optimizer)
    wrong = [] if rest == {"note": "known"} else ["note"]
    for name, shape in SHAPES.items():
        wrong += differs(name, getattr(model, name), known(name, shape))
    for dtype in BUFFERS:
        name = str(dtype).replace("torch.", "of_")
        wrong += differs(name, getattr(model, name), known(name, (4, 3), dtype))
    wrong += differs("scalar", model.scalar, torch.tensor(2.5))
    wrong += [] if model.tied is model.matrix else ["tied"]
    for name in ("matrix", "six", "cube"):
        state = optimizer.state[getattr(model, name)]
        wrong += differs(f"{name}.m", state["exp_avg"], known(f"{name}.m", SHAPES[name]))
        wrong += differs(f"{name}.v", state["exp_avg_sq"], known(f"{name}.v", SHAPES[name]))
        wrong += differs(f"{name}.step", state["step"], torch.tensor(3.0))
        laid = isinstance(state["exp_avg"], DTensor) == isinstance(getattr(model, name), DTensor)
        wrong += [] if laid else [f"layout of {name}'s state"]
    wrong += ["single's state"] if model.single in optimizer.state else []
    settings = [(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups]
    wrong += [] if settings == [(0.25, (0.9, 0.999), 0.5), (0.125, (0.5, 0.75), 0.5)] else ["settings"]
    return wrong


def differs(name: str, value: Tensor, true: Tensor) -> list[str]:
    whole = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()
    same = whole.dtype == true.dtype and whole.shape == true.shape and torch.equal(whole, true)
    return [] if same else [name]


def write_all(world: World, folder: str) -> dict[str, int]:
    return {layout: write(world, layout, f"{folder}/{layout}") for layout in LAYOUTS[world.mesh.words()]}


def read_all(world: World, folders: list[str]) -> list[str]:
    layouts = LAYOUTS[world.mesh.words()]
    wrong: list[str] = []
    for place, folder in enumerate(sorted(folders)):
        layout = layouts[(place + world.size) % len(layouts)]
        wrong += [
            f"{Path(folder).parent.name}/{Path(folder).name} as {layout}: {name}"
            for name in read(world, layout, folder)
        ]
    return wrong


# --- torch's own sharding, on top of tensor parallelism ---------------------------------------------------------------


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def trained(net: nn.Module, steps: int, optimizer: torch.optim.Optimizer) -> None:
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        optimizer.zero_grad()
        net(torch.randn(4, 6, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()


def sharded(world: World) -> nn.Sequential:
    net, mesh = perceptron(), world.torch_mesh()
    if world.mesh.length(["tensor"]) > 1:
        parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["shard"])
    return net


def whole(values: dict[str, Tensor]) -> dict[str, list[float]]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).flatten().tolist()
        for name, value in values.items()
    }


def moments(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    return whole(
        {
            f"{name}.{key}": value
            for name, param in net.named_parameters()
            for key, value in optimizer.state[param].items()
        }
    )


def full_shard(world: World, folder: str, start: str) -> list[dict[str, list[float]]]:
    """Go on from ``start`` (one process's), save; what is held before and after."""
    net = sharded(world)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    load(start, net, optimizer)
    loaded = whole(net.state_dict()) | moments(net, optimizer)
    trained(net, 2, optimizer)
    save(folder, net, optimizer)
    return [loaded, whole(net.state_dict()) | moments(net, optimizer)]
