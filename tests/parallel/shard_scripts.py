"""What ranks do in test_full_shard*.py: importable, since they are processes. All return plain numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from gradwire.comm.world import World
from gradwire.core.group import Group, Op
from gradwire.errors import GradwireError
from gradwire.parallel.full_shard import FullShard
from gradwire.parallel.moved import exchange
from gradwire.sync.row_steps import refuse_optimizers

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
    "NAdam": partial(torch.optim.NAdam, lr=0.05),
    "RAdam": partial(torch.optim.RAdam, lr=0.05),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "Adamax": partial(torch.optim.Adamax, lr=0.05),
    "ASGD": partial(torch.optim.ASGD, lr=0.05),
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
    for rank in range(2) if world is None else (world.rank,):  # two ranks
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


# --- meshes ----------------------------------------------------------------------------------------------------------


def beside_data(world: World) -> object:
    """{"data": 2, "shard": 2}: what is left in ``.grad`` is the sum over the shard ranks of this data rank."""
    model = Blocks()
    sharded = Sharded(model, world)
    place, row = world.mesh.coordinate(world.rank)["shard"], world.mesh.coordinate(world.rank)["data"]
    x, y = tokens_of(row)
    sharded.weight = 0.5
    loss_of(model, x[place::2], y[place::2]).backward()
    return row, gradients(model)


def beside_data_alone(row: int) -> object:
    model = Blocks()
    loss_of(model, *tokens_of(row)).backward()
    return row, gradients(model)


class Wide(nn.Module):
    """Two blocks of two layers that tensor parallel cuts by columns and rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def over_tensor(world: World | None) -> Values:
    """{"shard": 2, "tensor": 2}: three steps of Adam made before sharding."""
    model, sharded = Wide(), None
    if world is not None:
        for block in model.blocks:
            parallelize_module(block, world.torch_mesh()["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for number in range(3):
        if world is not None and number == 1:
            sharded = FullShard(model, world, reshard_after_forward=True, bucket_bytes=UNIT_BYTES)
            exchange([optimizer], sharded.replaced)
        optimizer.zero_grad()
        part = x if sharded is None or world is None else x[world.mesh.coordinate(world.rank)["shard"] :: 2]
        model(part).square().sum().backward()
        optimizer.step()
    return values(model)


# --- bytes, memory, refusals -----------------------------------------------------------------------------------------


class Counted:
    """A `Group` that counts the bytes its rank sends, by what each collective has to send at least."""

    def __init__(self, inner: Group, sent: list[int]) -> None:
        self._inner, self._sent = inner, sent
        self.name, self.rank, self.size = inner.name, inner.rank, inner.size

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._sent.append(tensor.nbytes * (self.size - 1))
        return self._inner.all_gather(tensor)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        self._sent.append(tensor.nbytes // self.size * (self.size - 1))
        return self._inner.reduce_scatter(tensor)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        self._sent.append(2 * tensor.nbytes * (self.size - 1) // self.size)
        return self._inner.all_reduce(tensor, op)


def stack(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())))


def bytes_of_a_step(world: World) -> dict[str, float]:
    """Bytes sent in a step over (n-1)/n of the parameters' bytes, and the collectives begun."""
    found: dict[str, float] = {}
    opened = world.group
    for reshard in (True, False):
        sent: list[int] = []
        world.group = lambda *axes, channel="main", sent=sent: Counted(opened(*axes, channel=channel), sent)
        model = stack(6, 96)
        whole_bytes = sum(param.nbytes for param in model.parameters())
        FullShard(model, world, reshard_after_forward=reshard, bucket_bytes=20_000)
        world.group = opened
        for _ in range(3):
            sent.clear()
            model(torch.ones(2, 96)).sum().backward()
        found["reshard" if reshard else "keep"] = sum(sent) / (whole_bytes * (world.size - 1) / world.size)
    return found


def parameter_bytes() -> int:
    """Of the memory behind all parameters and their gradients that live in this process, whole ones and rows."""
    gc.collect()
    params = [each for each in gc.get_objects() if issubclass(type(each), nn.Parameter | DTensor)]
    tensors = [*params, *(param.grad for param in params if param.is_leaf and param.grad is not None)]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}.values())


def whole_ones_are_freed(world: World) -> tuple[float, float]:
    """Bytes of parameters over the model's whole bytes: after sharding with an optimizer moved, and after a backward."""
    before = parameter_bytes()
    model = stack(6, 256)
    whole_bytes = parameter_bytes() - before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shard = FullShard(model, world, reshard_after_forward=True, bucket_bytes=100_000)
    exchange([optimizer], shard.replaced)
    sharded = parameter_bytes() - before
    model(torch.ones(2, 256)).sum().backward()
    return sharded / whole_bytes, (parameter_bytes() - before) / whole_bytes


def refused(world: World) -> dict[str, str]:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    model = stack(2, 4)
    optimizers = {
        kind.__name__: kind(model.parameters(), lr=0.1) for kind in (torch.optim.LBFGS, torch.optim.Adafactor)
    }
    shard = FullShard(model, world, reshard_after_forward=True)
    tries: dict[str, Callable[[], object]] = {
        "sparse": lambda: FullShard(nn.Sequential(nn.Embedding(3, 2, sparse=True)), world, reshard_after_forward=True),
        "mixed": lambda: FullShard(mixed, world, reshard_after_forward=True),
        "empty": lambda: FullShard(nn.ReLU(), world, reshard_after_forward=True),
        "twice": lambda: FullShard(model, world, reshard_after_forward=True),
        "hooks": lambda: shard.hooks([], before=print, after=print, scale=lambda: 1.0),
        **{name: partial(refuse_optimizers, [each], "parameters") for name, each in optimizers.items()},
    }
    return {name: _refusal(each) for name, each in tries.items()}


def _refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


class Swapped(nn.Module):
    """Two layers, in an order of each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, *, order: tuple[int, ...]) -> Tensor:
        for place in order:
            x = self.blocks[place](x)
        return x


def different_orders(world: World) -> str:
    """Units of one size, so that no collective notices: an error on every rank, before an optimizer could step."""
    model = Swapped()
    FullShard(model, world, reshard_after_forward=True, bucket_bytes=60)
    out = model(torch.ones(1, 4), order=(0, 1) if world.rank else (1, 0))
    return _refusal(out.sum().backward)


def odds_and_ends(world: World) -> dict[str, object]:
    return {each.__name__: each(world) for each in (bytes_of_a_step, whole_ones_are_freed, refused, different_orders)}
