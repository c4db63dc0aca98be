"""What ranks do in test_full_shard*.py: importable, since they are processes. All return plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from gradwire.comm.world import World
from gradwire.parallel.full_shard import FullShard
from gradwire.parallel.moved import exchange

Values = list[list[float]]
STEPS = 5
UNIT_BYTES = 300


class Blocks(nn.Module):
    """Small, with what sharding meets: tied weights, a scalar, a frozen layer, unused ones, rows that do not divide."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(4))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.spare = nn.Linear(6, 6)
        self.spare_blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.head(self.frozen(x) * self.scale + self.one)


def tokens_of(step: int) -> tuple[Tensor, Tensor]:
    """A global batch: (12, 3) tokens in, the same shape of classes out."""
    source = torch.Generator().manual_seed(100 + step)
    return torch.randint(11, (12, 3), generator=source), torch.randint(11, (12, 3), generator=source)


def mine(world: World | None, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """This rank's samples: 1 of 12 fewer on rank 0, so that the parts are uneven."""
    if world is None:
        return batch
    samples = [index for index in range(12) if (index + 1) % world.size == world.rank]
    if world.rank == 1:
        samples.append(samples.pop())
    return batch[0][samples], batch[1][samples]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def whole(value: Tensor) -> list[float]:
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().double().flatten().tolist()


def values(model: nn.Module) -> Values:
    return [whole(value) for value in model.state_dict().values()]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": partial(torch.optim.Adam, lr=0.05, foreach=True),
    "Adam for-loop": partial(torch.optim.Adam, lr=0.05, foreach=False, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "NAdam": partial(torch.optim.NAdam, lr=0.05),
    "RAdam": partial(torch.optim.RAdam, lr=0.05),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "Adamax": partial(torch.optim.Adamax, lr=0.05),
    "ASGD": partial(torch.optim.ASGD, lr=0.05),
    "Rprop": partial(torch.optim.Rprop, lr=0.01),
}


class Sharded:
    """A sharded model with the samples' weights, for loops that look like one process's."""

    def __init__(self, model: nn.Module, world: World, *, reshard: bool = True) -> None:
        self.shard = FullShard(model, world, reshard_after_forward=reshard, bucket_bytes=UNIT_BYTES)
        self.weight = 1.0
        params = list(model.parameters())
        self.log: list[tuple[str, int]] = []
        self.hooks = self.shard.hooks(
            params,
            before=lambda index: self.log.append(("before", index)),
            after=lambda index: self.log.append(("after", index)),
            scale=lambda: self.weight,
        )


def step(model: nn.Module, optimizer: Optimizer, sharded: Sharded | None, world: World | None, number: int) -> None:
    """One step with the mean over the global batch, clipped."""
    x, y = mine(world, tokens_of(number))
    if sharded is not None:
        sharded.weight = len(x) / 12
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def train(name: str, world: World | None, *, reshard: bool = True) -> Values:
    model = Blocks()
    sharded = None if world is None else Sharded(model, world, reshard=reshard)
    optimizer = OPTIMIZERS[name]([param for param in model.parameters() if param.requires_grad])
    for number in range(STEPS):
        step(model, optimizer, sharded, world, number)
    return values(model)


def train_with_all(world: World | None) -> dict[str, Values]:
    return {name: train(name, world, reshard=place % 2 == 0) for place, name in enumerate(OPTIMIZERS)}


# --- one behaviour each; `everything` runs them in one start ---------------------------------------------------------


def gradients(model: nn.Module) -> dict[str, list[float] | None]:
    return {name: None if param.grad is None else whole(param.grad) for name, param in model.named_parameters()}


def backward(model: nn.Module, sharded: Sharded | None, world: World | None, number: int) -> None:
    x, y = mine(world, tokens_of(number))
    if sharded is not None:
        sharded.weight = len(x) / 12
    loss_of(model, x, y).backward()


def made(world: World | None, *, checkpointed: bool = False, reshard: bool = True) -> tuple[Blocks, Sharded | None]:
    model = Blocks(checkpointed=checkpointed)
    return model, None if world is None else Sharded(model, world, reshard=reshard)


def two_backwards(world: World | None) -> object:
    model, sharded = made(world)
    for number in range(3):
        backward(model, sharded, world, number)
    return gradients(model)


def checkpointing(world: World | None) -> object:
    model, sharded = made(world, checkpointed=True)
    for number in range(2):
        model.zero_grad()
        backward(model, sharded, world, number)
    return gradients(model)


def no_reshard(world: World | None) -> object:
    model, sharded = made(world, reshard=False)
    for number in range(2):
        model.zero_grad()
        backward(model, sharded, world, number)
    return gradients(model)


def evaluating(world: World | None) -> object:
    """no_grad, inference_mode, a forward whose backward never comes, changes between them."""
    model, sharded = made(world)
    params = list(model.parameters())
    x, y = tokens_of(7)
    found = []
    for number, mode in enumerate((torch.no_grad, torch.inference_mode, torch.enable_grad, torch.no_grad)):
        with mode():
            found.append(loss_of(model, x, y).item())
        with torch.no_grad():
            for param in params:
                param.mul_(1.0 - number / 10)
    backward(model, sharded, world, 0)
    return found, gradients(model)


class Twice(nn.Module):
    """One block that runs three times, and one that is called with what needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        first = self.blocks[0](x)
        for _ in range(3):
            first = self.blocks[1](first).tanh()
        return first, {"other": self.blocks[2](x)}


def running_twice(world: World | None) -> object:
    model = Twice()
    sharded = None if world is None else Sharded(model, world)
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for _ in range(3):
        part = x if world is None else x[world.rank :: world.size]
        first, others = model(part)
        (first.square().sum() + others["other"].sum()).backward()
    del sharded
    return gradients(model)


class Branches(nn.Module):
    """Rank 1 does not use all of its parameters, nor its scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.left = nn.Linear(6, 1)
        self.nobody = nn.Linear(6, 1)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.double()

    def forward(self, x: Tensor, *, left: bool) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.left(x) * self.scalar if left else x


def branches(world: World | None) -> object:
    model = Branches()
    sharded = None if world is None else Sharded(model, world)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for rank in range(2) if world is None else (world.rank,):
        model(x[rank::2], left=rank == 0).sum().backward()
    told = None if sharded is None else {kind for kind, index in sharded.log if index == 7 and kind == "after"}
    assert told in (None, set())  # nobody.weight
    return gradients(model)


def not_finite(world: World | None) -> object:
    """A rank whose loss is NaN counts nothing."""
    model, sharded = made(world)
    x, y = tokens_of(0)
    if sharded is None or world is None:
        loss_of(model, x, y).backward()
        return gradients(model)
    sharded.weight = float(world.rank == 0)
    loss = loss_of(model, x, y)
    (loss if world.rank == 0 else loss * float("nan")).backward()
    return gradients(model)


class Trap(torch.autograd.Function):
    """Raises in backward while armed."""

    armed = False

    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: object, *grads: Tensor) -> Tensor:
        if Trap.armed:
            raise RuntimeError("the script's own")
        return grads[0]


def exceptions(world: World | None) -> object:
    """In backward on both ranks, on rank 1 alone, and in forward on both; each caught, each batch lost on all ranks."""
    model, sharded = made(world)
    model.blocks[1].register_forward_hook(lambda _m, _a, output: Trap.apply(output))
    optimizer = OPTIMIZERS["Adam"]([param for param in model.parameters() if param.requires_grad])
    backward(model, sharded, world, 0)
    optimizer.step()
    optimizer.zero_grad()
    for ranks in ((0, 1), (1,)) if world is not None else ():
        Trap.armed = world is not None and world.rank in ranks
        try:
            backward(model, sharded, world, 9)
        except RuntimeError:
            assert Trap.armed
        Trap.armed = False
        if sharded is not None:
            sharded.hooks.abandon()
        assert all(param.grad is None for param in model.parameters())
    try:
        model(torch.zeros(1, dtype=torch.float64))
    except RuntimeError:
        backward(model, sharded, world, 1)
    optimizer.step()
    return values(model), gradients(model)


def moved_optimizer(world: World | None) -> object:
    """Steps before the model is sharded are kept."""
    found = []
    for name in ("Adam", "SGD"):
        model = Blocks()
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = OPTIMIZERS[name]([{"params": params[:3], "lr": 0.01}, {"params": params[3:]}])
        loss_of(model, *tokens_of(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        sharded = None
        if world is not None:
            sharded = Sharded(model, world)
            exchange([optimizer], sharded.shard.replaced)
        for number in range(1, 4):
            step(model, optimizer, sharded, world, number)
        found.append(values(model))
    return found


def names(world: World | None) -> object:
    model, sharded = made(world)
    before = list(model.state_dict())
    backward(model, sharded, world, 0)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    if world is not None:
        assert all(isinstance(value, DTensor) for key, value in state.items() if key != "scale")
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(state)
    return before, list(state), values(model)


def unfrozen(world: World | None) -> object:
    """A layer that is trained from the second step on, and one that is not any more."""
    model, sharded = made(world)
    backward(model, sharded, world, 0)
    model.zero_grad()
    model.frozen.requires_grad_(True)
    model.blocks[0].requires_grad_(False)
    backward(model, sharded, world, 1)
    return gradients(model)


BEHAVIOURS: tuple[Callable[[World | None], object], ...] = (
    two_backwards,
    checkpointing,
    no_reshard,
    evaluating,
    running_twice,
    branches,
    not_finite,
    exceptions,
    moved_optimizer,
    names,
    unfrozen,
)


def everything(world: World | None) -> dict[str, object]:
    return {each.__name__: each(world) for each in BEHAVIOURS}
