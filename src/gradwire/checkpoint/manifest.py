"""`Manifest`: what is in a checkpoint, as data; its text, and the checks of a text that was read. Pure."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import cast

from gradwire.checkpoint.pieces import Box, gaps
from gradwire.checkpoint.trees import Json
from gradwire.errors import CheckpointError

FORMAT = 1
_FILE = re.compile(r"rank-\d{1,9}\.safetensors")
_HEAD = re.compile(rb'\{"crc32": "([0-9a-f]{8})",\n')


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a tensor in a file. ranks: those that held just these bytes, where the ranks' copies differed; else None."""

    file: str
    box: Box
    crc32: str
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor: dtype as torch spells it (``bfloat16``), global shape, and where its parts are."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class File:
    """A file's size, and the CRC-32 of its header: the eight bytes of its length and the header itself."""

    num_bytes: int
    header_crc32: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """What one saved object is beside its tensors.

    kind: ``model``, ``optimizer``, ``state`` (of an object with ``state_dict``), ``value``, or ``rank`` (each rank has its own).
    about: what all ranks said; None where they did not say the same. ranks: then what each one said.
    """

    kind: str
    about: Json
    ranks: tuple[Json, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All of it. tensors: by ``section/name``. aliases: further names of a tensor -> the one that it is stored under."""

    gradwire: str
    torch: str
    world_size: int
    mesh: str
    plan: str
    step: int
    files: Mapping[str, File]
    tensors: Mapping[str, Stored]
    aliases: Mapping[str, str]
    sections: Mapping[str, Section]
    format: int = field(default=FORMAT)

    def names(self, section: str) -> set[str]:
        """The names of all tensors of a section, aliases included."""
        prefix = f"{section}/"
        return {name.removeprefix(prefix) for name in (*self.tensors, *self.aliases) if name.startswith(prefix)}

    def stored(self, name: str) -> Stored:
        """The tensor of that name or alias. KeyError if there is none."""
        return self.tensors[self.aliases.get(name, name)]

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """(tensor's name, piece) of all of them."""
        return ((name, piece) for name, stored in self.tensors.items() for piece in stored.pieces)


def to_text(manifest: Manifest) -> bytes:
    """The manifest as JSON, one tensor, file or section a line; its first line is the CRC-32 of the rest."""
    lines: list[str] = []
    for name, value in asdict(manifest).items():
        if name in ("files", "tensors", "aliases", "sections"):
            rows = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
            lines.append(f'"{name}": {{\n  ' + ",\n  ".join(rows) + "\n}")
        else:
            lines.append(f'"{name}": {json.dumps(value)}')
    rest = (",\n".join(lines) + "\n}\n").encode()
    return f'{{"crc32": "{zlib.crc32(rest):08x}",\n'.encode() + rest


def from_text(text: bytes, where: str) -> Manifest:
    """Read it back. Raises CheckpointError, beginning with ``where``, if it is damaged, newer, or makes no sense."""
    head = _HEAD.match(text)
    if head is None or f"{zlib.crc32(text[head.end() :]):08x}".encode() != head.group(1):
        raise CheckpointError(f"{where} is damaged or was changed: it does not have its checksum")
    table = json.loads(text)
    if table.get("format") != FORMAT:
        raise CheckpointError(
            f"{where} has format {table.get('format')}, this gradwire reads {FORMAT}; it was written by gradwire "
            f"{table.get('gradwire')}: install that or a newer one"
        )
    try:
        manifest = _manifest(table)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where} is not what gradwire writes: {type(error).__name__}: {error}") from None
    if problem := next(_problems(manifest), None):
        raise CheckpointError(f"{where}: {problem}")
    return manifest


def _manifest(table: Mapping[str, Json]) -> Manifest:
    return Manifest(
        gradwire=str(table["gradwire"]),
        torch=str(table["torch"]),
        mesh=str(table["mesh"]),
        plan=str(table["plan"]),
        world_size=_count(table["world_size"]),
        step=_count(table["step"]),
        files={
            name: File(num_bytes=_count(row["num_bytes"]), header_crc32=str(row["header_crc32"]))
            for name, row in _rows(table, "files")
        },
        tensors={name: _stored(row) for name, row in _rows(table, "tensors")},
        aliases={name: str(to) for name, to in cast("dict[str, Json]", table["aliases"]).items()},
        sections={
            name: Section(
                kind=str(row["kind"]),
                about=row["about"],
                ranks=None if row["ranks"] is None else tuple(cast("list[Json]", row["ranks"])),
            )
            for name, row in _rows(table, "sections")
        },
    )


def _rows(table: Mapping[str, Json], name: str) -> list[tuple[str, dict[str, Json]]]:
    return [(key, cast("dict[str, Json]", row)) for key, row in cast("dict[str, Json]", table[name]).items()]


def _stored(row: dict[str, Json]) -> Stored:
    pieces = [_piece(each) for each in cast("list[dict[str, Json]]", row["pieces"])]
    return Stored(dtype=str(row["dtype"]), shape=_counts(row["shape"]), pieces=tuple(pieces))


def _piece(row: dict[str, Json]) -> Piece:
    box = cast("dict[str, Json]", row["box"])
    return Piece(
        file=str(row["file"]),
        box=Box(_counts(box["offset"]), _counts(box["length"])),
        crc32=str(row["crc32"]),
        ranks=None if row["ranks"] is None else _counts(row["ranks"]),
    )


def _counts(value: Json) -> tuple[int, ...]:
    return tuple(_count(each) for each in cast("list[Json]", value))


def _count(value: Json) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _problems(manifest: Manifest) -> Iterator[str]:
    for name in manifest.files:
        if not _FILE.fullmatch(name):
            yield f"{name!r} is not a name of one of its files"
    for name, piece in manifest.pieces():
        if piece.file not in manifest.files:
            yield f"tensor {name} lies in {piece.file!r}, which is not one of its files"
    for name, stored in manifest.tensors.items():
        boxes = list(dict.fromkeys(piece.box for piece in stored.pieces))
        if any(len(box.offset) != len(stored.shape) or len(box.length) != len(stored.shape) for box in boxes):
            yield f"tensor {name} has parts of other dimensions"
        elif problem := gaps(stored.shape, boxes):
            yield f"tensor {name}: {problem}"
    for alias, name in manifest.aliases.items():
        if name not in manifest.tensors:
            yield f"{alias} is another name of {name}, which is not there"
