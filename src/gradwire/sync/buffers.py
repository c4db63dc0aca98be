"""The buffer rule: BatchNorm's running statistics are averaged, any other buffer that changed follows rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import ref

import torch
from torch import Tensor, nn

from gradwire.core.group import Group

BROADCAST_BYTES = 32 << 20


class _Place:
    """A buffer's place; the tensor itself may be replaced by the model's code. Does not keep the module alive."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = ref(module)
        self._name = name
        self._last = module.get_buffer(name)

    @property
    def tensor(self) -> Tensor:
        module = self._module()
        if module is not None:
            self._last = module.get_buffer(self._name)
        return self._last


class BufferExchange:
    """Agrees on a model's buffers once a step, beside backward.

    ``collect`` and ``apply`` run on the training thread, ``exchange`` on the thread that has the group, between them.
    """

    def __init__(self, model: nn.Module, group: Group, *, skip_statistics: bool = False) -> None:
        self._group = group
        statistics, others = _places(model)
        self._statistics = [] if skip_statistics else statistics  # synchronised statistics are equal already
        self._others = others
        self._seen = [_stamp(place.tensor) for place in others]
        self._weighted: list[Tensor] = []
        self._changed: list[bool] = []
        self._news: list[Tensor] = []

    def collect(self, weight: float) -> None:
        """Note this rank's statistics, counting ``weight``, and which other buffers its forward changed."""
        tensors = [place.tensor for place in self._statistics]
        self._weighted = [tensor * weight if weight else torch.zeros_like(tensor) for tensor in tensors]
        self._changed = [_stamp(place.tensor) != seen for place, seen in zip(self._others, self._seen, strict=True)]
        self._news = [
            place.tensor.detach().clone() for place, new in zip(self._others, self._changed, strict=True) if new
        ]

    def exchange(self, weight: float) -> None:
        """Weighted mean of the statistics; rank 0's list of changed buffers, then those buffers."""
        if self._weighted:
            kind = self._weighted[0]
            flat = torch.cat([*(tensor.flatten() for tensor in self._weighted), kind.new_tensor([weight])])
            self._group.all_reduce(flat)
            whole = float(flat[-1])
            sizes = [tensor.numel() for tensor in self._weighted]
            self._weighted = list((flat[:-1] / whole).split(sizes)) if whole else []
        if self._others:
            device = self._others[0].tensor.device
            flags = self._group.broadcast(torch.tensor(self._changed, dtype=torch.uint8, device=device))
            self._changed = [bool(flag) for flag in flags.tolist()]
            self._news = [p.tensor.detach().clone() for p, new in zip(self._others, self._changed, strict=True) if new]
            broadcast_all(self._news, self._group)

    def agree(self, weight: float) -> None:
        """All of it at once, on this thread."""
        self.collect(weight)
        self.exchange(weight)
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Write what was agreed into the model."""
        for place, value in zip(self._statistics, self._weighted, strict=False):
            place.tensor.copy_(value.view_as(place.tensor))
        changed = [place for place, new in zip(self._others, self._changed, strict=True) if new]
        for place, value in zip(changed, self._news, strict=True):
            place.tensor.copy_(value)
        self._seen = [_stamp(place.tensor) for place in self._others]


def broadcast_all(tensors: list[Tensor], group: Group) -> None:
    """Overwrite ``tensors`` with rank 0's, in place, some 32 MiB at a time, whatever their dtypes."""
    for chunk in _chunks(tensors):
        flat = torch.cat([_as_bytes(tensor) for tensor in chunk])
        group.broadcast(flat)
        for tensor, part in zip(chunk, flat.split([tensor.nbytes for tensor in chunk]), strict=True):
            with torch.no_grad():
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _chunks(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        if chunk and (size + tensor.nbytes > BROADCAST_BYTES or tensor.device != chunk[0].device):
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    if chunk:
        yield chunk


def _places(model: nn.Module) -> tuple[list[_Place], list[_Place]]:
    """BatchNorm's float statistics, and every other buffer but BatchNorm's counters (all ranks count alike)."""
    statistics: list[_Place] = []
    others: list[_Place] = []
    for module in model.modules():
        norm = isinstance(module, nn.modules.batchnorm._BatchNorm)  # pyright: ignore[reportPrivateUsage]
        for name, _ in module.named_buffers(recurse=False):
            if not norm:
                others.append(_Place(module, name))
            elif name in ("running_mean", "running_var"):
                statistics.append(_Place(module, name))
    return statistics, others


def _stamp(tensor: Tensor) -> tuple[int, int]:
    """Changes when the buffer is written in place or replaced."""
    return id(tensor), tensor._version  # pyright: ignore[reportPrivateUsage]  # torch's documented in-place counter
