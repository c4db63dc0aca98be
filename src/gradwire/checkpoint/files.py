"""One safetensors file: written tensor by tensor, with checksums; looked through for damage; read in slices."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, Self, cast

import torch
from safetensors import safe_open
from torch import Tensor

from gradwire.checkpoint.manifest import File, Piece
from gradwire.checkpoint.pieces import Box
from gradwire.errors import CheckpointError, UsageError

_CHUNK_BYTES = 1 << 22
_MAPPED_BYTES = 1 << 25  # what was read of a mapped file counts as this process's memory until the file is closed
WORDS: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex128: "F64",
}  # fmt: skip
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in WORDS}


def spelled(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> bfloat16."""
    return str(dtype).removeprefix("torch.")


def require_storable(name: str, tensor: Tensor) -> None:
    """Raise UsageError, naming it, for a tensor that no file can hold."""
    if tensor.is_meta:
        raise UsageError(f"{name} is on the meta device and has no values; make the model on a real one before saving")
    if tensor.layout != torch.strided:
        raise UsageError(f"{name} is {str(tensor.layout).removeprefix('torch.')}; a checkpoint holds dense tensors")
    if tensor.dtype not in WORDS:
        raise UsageError(f"{name} is {spelled(tensor.dtype)}; a checkpoint holds {', '.join(DTYPES)}")


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes in C order, whatever its strides; without a copy where it is contiguous and on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    flat = plain.as_strided((plain.numel(),), (1,))  # not reshape: with one entry or none it keeps odd strides
    return flat.view(torch.uint8).numpy().data


def crc32_of(tensor: Tensor) -> str:
    """Of its bytes in C order."""
    return f"{zlib.crc32(bytes_of(tensor)):08x}"


@dataclass(frozen=True)
class Entry:
    """A tensor that is to be written: its dtype and shape, and how to have it when its turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], Tensor]


def write_file(path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> File:
    """Write a safetensors file, one tensor in memory at a time, and sync it to the disk.

    Wide dtypes come first, so that every tensor is aligned to its own size.
    """
    order = sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        shape, dtype = list(entries[name].shape), entries[name].dtype
        start, end = end, end + Box.whole(shape).numel * dtype.itemsize
        shape += [2] if dtype == torch.complex128 else []
        header[name] = {"dtype": WORDS[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    with path.open("xb") as file:
        file.write(head)
        for name in order:
            file.write(bytes_of(entries[name].fetch()))
        file.flush()
        os.fsync(file.fileno())
    return File(num_bytes=len(head) + end, header_crc32=f"{zlib.crc32(head):08x}")


def find_damage(path: Path, file: File, pieces: Mapping[str, Piece], *, with_header: bool) -> str:
    """What is wrong with the file, or with these tensors' pieces in it; empty if nothing is.

    Reads what it checks once, 4 MB at a time. with_header: also the header; the size is looked at always.
    """
    try:
        with path.open("rb") as opened:
            size = opened.seek(0, os.SEEK_END)
            if size != file.num_bytes:
                return f"{path.name} has {size} bytes instead of {file.num_bytes}"
            head = _head(opened)
            if with_header or pieces:  # nothing in a header is believed before its checksum
                if head is None or f"{zlib.crc32(head):08x}" != file.header_crc32:
                    return f"{path.name} is damaged in its header"
                places = {name: row["data_offsets"] for name, row in json.loads(head[8:]).items()}
                for name, piece in pieces.items():
                    start, end = places[name]
                    if _crc(opened, len(head) + start, end - start) != piece.crc32:
                        return f"{path.name} is damaged in tensor {name}"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    return ""


def _head(opened: BinaryIO) -> bytes | None:
    size = opened.seek(0, os.SEEK_END)
    opened.seek(0)
    length = opened.read(8)
    count = int.from_bytes(length, "little")
    return length + opened.read(count) if count <= size else None


def _crc(opened: BinaryIO, start: int, count: int) -> str:
    opened.seek(start)
    crc = 0
    while count and (chunk := opened.read(min(count, _CHUNK_BYTES))):
        crc, count = zlib.crc32(chunk, crc), count - len(chunk)
    return f"{crc:08x}"


class _Slices(Protocol):
    def __getitem__(self, index: object) -> Tensor: ...


class _Opened(Protocol):
    def get_slice(self, name: str) -> _Slices: ...


class Slices:
    """The files of one folder, read in slices. A context manager: at its end they are closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _Opened] = {}
        self._mapped_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()

    def read(self, file: str, name: str, dtype: torch.dtype, part: tuple[slice, ...]) -> Tensor:
        """``tensor[part]`` of the file's tensor ``name``; reads no more than that."""
        pair = dtype == torch.complex128
        index = (*part, slice(0, 2)) if pair else part
        try:
            if file not in self._files:
                self._files[file] = cast("_Opened", safe_open(self._folder / file, framework="pt"))
            found = self._files[file].get_slice(name)[index or ...].clone(memory_format=torch.contiguous_format)
        except Exception as error:  # safetensors raises several kinds
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        self._mapped_bytes += found.nbytes
        if self._mapped_bytes > _MAPPED_BYTES:
            self._files.clear()
            self._mapped_bytes = 0
        return torch.view_as_complex(found) if pair else found
