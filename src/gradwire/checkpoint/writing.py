"""Writing: what all ranks hold becomes one plan of who writes what, then files, then a folder with a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeAlias, cast

import torch
from torch import Tensor

from gradwire.checkpoint import folders
from gradwire.checkpoint.files import DTYPES, Entry, crc32_of, require_storable, spelled, write_file
from gradwire.checkpoint.layout import held
from gradwire.checkpoint.manifest import File, Manifest, Piece, Section, Stored, to_text
from gradwire.checkpoint.models import merge_models
from gradwire.checkpoint.optimizers import merge_optimizers
from gradwire.checkpoint.parts import Held, Part
from gradwire.checkpoint.pieces import Box, gaps, share_out
from gradwire.checkpoint.together import Together
from gradwire.checkpoint.trees import Json
from gradwire.comm.world import World
from gradwire.errors import CheckpointError, MismatchError

Claim: TypeAlias = tuple[str, str, tuple[int, ...], Box, str]  # name, dtype, global shape, this rank's part, its CRC-32


def collect(claims: Sequence[Sequence[Claim]]) -> dict[str, Stored]:
    """Who writes what of which tensor. claims: of each rank. Pure: the same on all ranks.

    A part that several ranks hold is written by one of them, if their bytes are the same; else each kind of bytes once, with
    the ranks that held it. Raises MismatchError naming a tensor and two ranks if their shapes or dtypes differ, or if the
    parts are not the whole.
    """
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    holders: dict[tuple[str, Box, str], list[int]] = {}
    copies: dict[tuple[str, Box], int] = {}
    for rank, claimed in enumerate(claims):
        for name, dtype, shape, box, crc32 in claimed:
            was_dtype, was_shape, was_rank = tensors.setdefault(name, (dtype, shape, rank))
            if (was_dtype, was_shape) != (dtype, shape):
                raise MismatchError(
                    f"{name} is {was_dtype} {was_shape} on rank {was_rank} and {dtype} {shape} on rank {rank}; "
                    "make it the same on all ranks"
                )
            if box.numel:
                ranks = holders.setdefault((name, box, crc32), [])
                copies[name, box] = copies.get((name, box), 0) + (not ranks)
                ranks.append(rank)
    num_bytes = {key: key[1].numel * DTYPES[tensors[key[0]][0]].itemsize for key in holders}
    writers = share_out(num_bytes, holders)
    pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
    for (name, box, crc32), ranks in holders.items():
        file = file_name(writers[name, box, crc32])
        own = tuple(ranks) if copies[name, box] > 1 else None
        pieces[name].append(Piece(file=file, box=box, crc32=crc32, ranks=own))
    for name, (_, shape, _) in tensors.items():
        if problem := gaps(shape, list(dict.fromkeys(piece.box for piece in pieces[name]))):
            raise MismatchError(f"{name}: {problem}; all ranks that hold a part of it must save")
    return {
        name: Stored(dtype=dtype, shape=shape, pieces=tuple(pieces[name]))
        for name, (dtype, shape, _) in tensors.items()
    }


def merge(kinds: Mapping[str, str], abouts: Sequence[Mapping[str, Json]]) -> dict[str, Section]:
    """What all ranks say of each section, together. Raises MismatchError if they don't save the same things."""
    for rank, about in enumerate(abouts):
        if about.keys() != abouts[0].keys():
            differ = ", ".join(sorted(about.keys() ^ abouts[0].keys()))
            raise MismatchError(f"rank {rank} and rank 0 don't both save {differ}; give the same on all ranks")
    return {section: _merged(section, kind, [about[section] for about in abouts]) for section, kind in kinds.items()}


def _merged(section: str, kind: str, abouts: list[Json]) -> Section:
    if kind == "model":
        return Section(kind=kind, about=merge_models(abouts))
    if kind == "optimizer":
        return Section(kind=kind, about=merge_optimizers(abouts))
    if kind != "rank" and all(about == abouts[0] for about in abouts):
        return Section(kind=kind, about=abouts[0])
    if kind == "value":
        rank = next(rank for rank, about in enumerate(abouts) if about != abouts[0])
        raise _differs(section, f"{abouts[0]} on rank 0 and {abouts[rank]} on rank {rank}")
    return Section(kind=kind, about=None, ranks=tuple(abouts))


def _differs(section: str, words: str) -> MismatchError:
    name = section.removeprefix("extra.")
    return MismatchError(f"{name} is {words}; save the same value on all ranks, their gw.sum for example")


def file_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank}.safetensors"


@dataclass
class Writing:
    """One save. parts: the objects, in the order in which they are asked for what they hold."""

    world: World
    directory: Path
    parts: Sequence[Part]
    _number: int = field(default=0, init=False)  # of the folder that is not complete yet
    _tensors: dict[str, Tensor] = field(default_factory=dict, init=False)

    def run(self) -> Path:
        """Write it; every rank calls it. Returns the new folder. On any error nothing is left of it, on all ranks."""
        try:
            return self._run(Together(self.world, "gw.save"))
        except BaseException:
            if self._number and self.world.rank == 0:
                folders.discard(self.directory, self._number)
            raise

    def _run(self, together: Together) -> Path:
        told = [cast("dict[str, Json]", reply) for reply in together.do(self._prepare)]
        number = self._number = cast("int", told[0]["number"])
        manifest = self._manifest(told)
        wrote = together.do(lambda: self._write(manifest))
        files = {file_name(rank): File(*cast("tuple[int, str]", each)) for rank, each in enumerate(wrote) if each}
        manifest = replace(manifest, files=files)
        together.do(lambda: folders.commit(self.directory, number, to_text(manifest)) if self.world.rank == 0 else None)
        self._number = 0
        return folders.final(self.directory, number)

    def _prepare(self) -> Json:
        """What this rank holds. Rank 0 makes the folder."""
        if self.world.rank == 0:
            self._number = folders.begin(self.directory)
        abouts: dict[str, Json] = {}
        aliases: dict[str, str] = {}
        for part in self.parts:
            holding: Held = part.hold()
            abouts[part.section] = holding.about
            aliases |= holding.aliases
            self._tensors |= holding.tensors
        claims: list[Json] = [_claim(name, tensor) for name, tensor in self._tensors.items()]
        return {
            "number": self._number,
            "step": self.world.step,
            "kinds": {part.section: part.kind for part in self.parts},
            "abouts": abouts,
            "aliases": cast("Json", aliases),
            "claims": claims,
        }

    def _manifest(self, told: Sequence[Mapping[str, Json]]) -> Manifest:
        """Without the files, which are not written yet."""
        for rank, each in enumerate(told):
            if each["step"] != told[0]["step"]:
                raise MismatchError(
                    f"gw.save: rank 0 has made {told[0]['step']} steps, rank {rank} {each['step']}; save at the same step"
                )
        try:
            sections = merge(
                cast("dict[str, str]", told[0]["kinds"]), [cast("dict[str, Json]", each["abouts"]) for each in told]
            )
            tensors = collect([[_claimed(row) for row in cast("list[list[Json]]", each["claims"])] for each in told])
            values = {section for section, about in sections.items() if about.kind == "value"}
            for name, stored in tensors.items():
                if name.partition("/")[0] in values and any(piece.ranks for piece in stored.pieces):
                    raise _differs(name.partition("/")[0], "another tensor on some ranks than on others")
        except MismatchError as error:
            raise MismatchError(f"gw.save: {error}") from None
        return Manifest(
            gradwire=_version(),
            torch=torch.__version__,
            world_size=self.world.size,
            mesh=self.world.mesh.words(),
            plan=self.world.plan.words(),
            step=self.world.step,
            files={},
            tensors=tensors,
            aliases={
                alias: name
                for each in told
                for alias, name in cast("dict[str, str]", each["aliases"]).items()
                if alias not in tensors
            },
            sections=sections,
        )

    def _write(self, manifest: Manifest) -> Json:
        folder, mine = folders.partial(self.directory, self._number), file_name(self.world.rank)
        if not folder.is_dir():
            raise CheckpointError(
                f"{self.directory} on {self.world.host} is not the folder that rank 0 sees; save to one that all hosts share"
            )
        names = [name for name, piece in manifest.pieces() if piece.file == mine]
        if not names:
            return None
        entries = {name: self._entry(name) for name in names}
        file = write_file(folder / mine, entries)
        return [file.num_bytes, file.header_crc32]

    def _entry(self, name: str) -> Entry:
        box, local = held(name, self._tensors[name])
        return Entry(local.dtype, box.length, fetch_of(local))


def fetch_of(tensor: Tensor) -> Callable[[], Tensor]:
    """The tensor, when it is asked for."""
    return lambda: tensor


def _claim(name: str, tensor: Tensor) -> Json:
    require_storable(name, tensor)
    box, local = held(name, tensor)
    shape = cast("list[Json]", list(tensor.shape))
    crc32 = crc32_of(local) if box.numel else ""
    return [name, spelled(tensor.dtype), shape, cast("Json", list(box.offset)), cast("Json", list(box.length)), crc32]


def _claimed(row: list[Json]) -> Claim:
    name, dtype, shape, offset, length, crc32 = row
    sizes = [tuple(cast("list[int]", each)) for each in (shape, offset, length)]
    return str(name), str(dtype), sizes[0], Box(sizes[1], sizes[2]), str(crc32)


def _version() -> str:
    try:
        return version("gradwire")
    except PackageNotFoundError:  # run from its sources
        return "unknown"
