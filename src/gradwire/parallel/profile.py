"""What each block of a model costs, measured: seconds, parameters, activations, and what would travel behind it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gradwire.core.balance import Unit
from gradwire.core.group import Group
from gradwire.parallel.blocks import Blocks, tensors_of
from gradwire.parallel.stage import Passage, Stage, awaiting, entered

_PROBE_SIZE = 256


def measure(model: nn.Module, blocks: Blocks, x: object, *, runs: int = 5) -> list[Unit]:
    """Each block's costs for the micro-batch ``x``: medians of ``runs`` forwards and backwards, after one to warm up.

    The model is as before afterwards: no gradients, the same buffers, the same random numbers to come. Memory: one block's
    activations at a time. Cost: runs + 1 forwards and backwards.
    """
    units: list[Unit] = []
    with _untouched(model), torch.enable_grad():
        received: list[object] = []
        for place, name in enumerate(blocks.names):
            stage = Stage(blocks, blocks.program(place, place + 1))
            params = [t for t in tensors_of(model, stage.program, blocks) if isinstance(t, nn.Parameter)]
            trial = _Trial(model, stage, x, received, [param for param in params if param.requires_grad])
            activation_bytes = trial.saved_bytes(params)
            times = [trial.timed() for _ in range(runs)]
            received = trial.sent
            units.append(
                Unit(
                    name=name,
                    forward_s=statistics.median(forward for forward, _ in times),
                    backward_s=statistics.median(backward for _, backward in times),
                    parameter_bytes=sum(param.nbytes for param in params),
                    activation_bytes=activation_bytes,
                    sent_bytes=sum(_nbytes(value) for value in received),
                )
            )
    return units


def probe_speeds(group: Group, device: torch.device) -> tuple[float, ...]:
    """How fast the ranks of ``group`` multiply matrices now, relative to the slowest: the best of some short runs each.

    They measure at the same time, as they will work.
    """
    left = torch.randn(_PROBE_SIZE, _PROBE_SIZE, device=device, generator=torch.Generator(device).manual_seed(0))
    group.barrier()
    best_s = min(_timed_product(left) for _ in range(20))
    all_s: list[float] = group.all_gather(torch.tensor([best_s], dtype=torch.float64, device=device)).flatten().tolist()
    return tuple(round(max(all_s) / each, 2) for each in all_s)


class _Trial:
    """One block, run again and again. sent: what it gave last."""

    def __init__(
        self, model: nn.Module, stage: Stage, x: object, received: Sequence[object], trained: Sequence[nn.Parameter]
    ) -> None:
        self._model, self._stage, self._x, self._received = model, stage, x, received
        self._trained = list(trained)
        self.sent: list[object] = []

    def saved_bytes(self, params: Sequence[Tensor]) -> int:
        """What autograd keeps of one forward, besides parameters; also warms up."""
        own = {param.untyped_storage().data_ptr() for param in params}
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            self.timed()
        return sum(kept.values())

    def timed(self) -> tuple[float, float]:
        """Seconds of a forward and of its backward."""
        passage = Passage()
        fresh = entered([_fresh(value) for value in self._received], passage)
        start_s = _now_s()
        values = self._stage.run(self._model, self._x, fresh)
        middle_s = _now_s()
        exits, wanted = awaiting(values), [*passage.entries, *self._trained]
        if exits and wanted:
            ones = [torch.ones_like(each) for each in exits]
            torch.autograd.grad(exits, wanted, ones, allow_unused=True)
        end_s = _now_s()
        self.sent = [_detached(value) for value in values]
        return middle_s - start_s, end_s - middle_s


def _detached(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return tuple(_detached(each) for each in value) if isinstance(value, tuple | list) else value


def _fresh(value: object) -> object:
    """A copy that a block may change in place."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return tuple(_fresh(each) for each in value) if isinstance(value, tuple | list) else value


def _nbytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(_nbytes(each) for each in value) if isinstance(value, tuple | list) else 0


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _timed_product(left: Tensor) -> float:
    start_s = _now_s()
    torch.mm(left, left)
    return _now_s() - start_s


@contextmanager
def _untouched(model: nn.Module) -> Generator[None]:
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng():
        yield
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
