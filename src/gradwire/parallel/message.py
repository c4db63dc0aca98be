"""Messages between stages: any values with any shapes, so that uneven micro-batches travel as they are."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.compress.cast import Cast
from gradwire.compress.quantize import Quantize
from gradwire.core.compressor import Compressor
from gradwire.core.group import Group
from gradwire.core.pipeline import Activations
from gradwire.errors import UsageError

_HEAD = 64  # words of the first message: 512 bytes hold the shapes of a dozen tensors
_NONE, _BOOL, _INT, _FLOAT, _TENSOR, _TUPLE, _LIST = range(7)
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def codec_of(activations: Activations) -> Compressor | None:
    """What floating-point tensors travel as; None: as they are."""
    codecs: dict[Activations, Compressor | None] = {
        "exact": None,
        "bf16": Cast(torch.bfloat16),
        "q8": Quantize(bits=8),
        "q4": Quantize(bits=4),
    }
    return codecs[activations]


@dataclass
class Message:
    """words: what is sent, kinds and shapes first. tensors: what follows them, as bytes."""

    words: list[int]
    tensors: list[Tensor]


def pack(values: Sequence[object], names: Sequence[str], codec: Compressor | None) -> Message:
    """Ready to be sent: copies are made only where a codec or an uneven layout needs one.

    names: of the values, for errors. Raises UsageError for a value that is neither a plain tensor, number, bool, None nor a
    tuple or list of those.
    """
    message = Message([len(values)], [])
    for name, value in zip(names, values, strict=True):
        _pack(value, name, message, codec)
    return message


def _pack(value: object, name: str, to: Message, codec: Compressor | None) -> None:
    if value is None:
        to.words.append(_NONE)
    elif isinstance(value, bool | int):
        to.words += [_BOOL if isinstance(value, bool) else _INT, int(value)]
    elif isinstance(value, float):
        to.words += [_FLOAT, *struct.unpack("q", struct.pack("d", value))]
    elif isinstance(value, tuple | list):
        to.words += [_TUPLE if isinstance(value, tuple) else _LIST, len(value)]
        for each in value:
            _pack(each, name, to, codec)
    elif isinstance(value, Tensor) and type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        coded = codec is not None and value.is_floating_point() and value.numel() > 0
        shape = [int(size) for size in value.shape]
        to.words += [_TENSOR, _DTYPES.index(value.dtype), int(value.requires_grad), int(coded), len(shape), *shape]
        plain = value.detach()
        if coded and codec is not None:
            row = plain.reshape(1, -1).to(torch.float32)
            to.tensors.append(codec.encode(row, None, key=0)[0].reshape(-1))
        elif value.numel():
            to.tensors.append(plain.contiguous().view(-1).view(torch.uint8))
    else:
        raise UsageError(
            f"{name}, a {type(value).__name__}, would have to travel from one stage to the next; what travels is tensors, "
            "numbers, None, and tuples of them. Cut elsewhere (pipeline.cuts), or make it inside the blocks that use it"
        )


def send(message: Message, group: Group, dst: int, device: torch.device) -> None:
    """Send it to rank ``dst`` of ``group``; returns when it is taken."""
    words = [len(message.words), *message.words]
    words += [0] * (_HEAD - len(words))
    group.send(torch.tensor(words[:_HEAD], dtype=torch.int64, device=device), dst)
    if len(words) > _HEAD:
        group.send(torch.tensor(words[_HEAD:], dtype=torch.int64, device=device), dst)
    for tensor in message.tensors:
        group.send(tensor, dst)


def receive(group: Group, src: int, device: torch.device, codec: Compressor | None) -> list[object]:
    """The values that rank ``src`` sends; tensors that required a gradient there are leaves that require one here."""
    head = group.recv(torch.zeros(_HEAD, dtype=torch.int64, device=device), src).tolist()
    words: list[int] = head[1:]
    if head[0] > len(words):
        rest = torch.zeros(head[0] - len(words), dtype=torch.int64, device=device)
        words += group.recv(rest, src).tolist()
    ahead = iter(words)
    return [_unpack(ahead, group, src, device, codec) for _ in range(next(ahead))]


def _unpack(words: Iterator[int], group: Group, src: int, device: torch.device, codec: Compressor | None) -> object:
    kind = next(words)
    if kind == _NONE:
        return None
    if kind == _FLOAT:
        return struct.unpack("d", struct.pack("q", next(words)))[0]
    if kind in (_BOOL, _INT):
        return bool(next(words)) if kind == _BOOL else next(words)
    if kind == _TENSOR:
        return _unpack_tensor(words, group, src, device, codec)
    items = [_unpack(words, group, src, device, codec) for _ in range(next(words))]
    return tuple(items) if kind == _TUPLE else items


def _unpack_tensor(
    words: Iterator[int], group: Group, src: int, device: torch.device, codec: Compressor | None
) -> Tensor:
    dtype, needs_grad, coded = _DTYPES[next(words)], bool(next(words)), bool(next(words))
    value = torch.empty([next(words) for _ in range(next(words))], dtype=dtype, device=device)
    if coded and codec is not None:
        row = torch.empty(codec.wire_bytes(value.numel()), dtype=torch.uint8, device=device)
        decoded = codec.decode(group.recv(row, src).view(1, -1), value.numel(), key=0)
        value = decoded.view(value.shape).to(dtype)
    elif value.numel():
        group.recv(value.view(-1).view(torch.uint8), src)
    return value.requires_grad_(needs_grad)
