"""Reading: a checkpoint is opened by all ranks together, verified once, and read where each rank needs it."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from gradwire.checkpoint import folders
from gradwire.checkpoint.files import DTYPES, Slices, find_damage
from gradwire.checkpoint.layout import laid_out, wanted
from gradwire.checkpoint.manifest import Manifest, Piece
from gradwire.checkpoint.pieces import Box, share_out
from gradwire.checkpoint.together import Together
from gradwire.errors import CheckpointError, MismatchError


def choose(together: Together, directory: Path) -> Path:
    """The checkpoint that rank 0 finds; on every rank in the directory that it was given."""
    name = together.do(lambda: folders.choose(directory).name if together.world.rank == 0 else "")[0]
    return directory if name == directory.name else directory / str(name)


def open_manifest(together: Together, path: Path) -> Manifest:
    """Read by every rank; all must see the same one."""
    found: list[Manifest] = []

    def read() -> str:
        manifest, text = folders.read_manifest(path)
        found.append(manifest)
        return f"{zlib.crc32(text):08x}"

    seen = together.do(read)
    if len(set(seen)) > 1:
        other = next(rank for rank, each in enumerate(seen) if each != seen[0])
        raise MismatchError(
            f"{together.verb}: {path} is another one on rank {other} than on rank 0; use a shared folder"
        )
    return found[0]


def verify(together: Together, path: Path, manifest: Manifest) -> None:
    """Read every byte once, shared out over the ranks. Raises CheckpointError on all ranks, naming file and tensor."""
    world = together.world
    together.do(lambda: require_whole(path, manifest, rank=world.rank, size=world.size))


def require_whole(path: Path, manifest: Manifest, *, rank: int = 0, size: int = 1, section: str = "") -> None:
    """Raise CheckpointError if this rank's share of the files' bytes (all tensors, or one section's) is damaged."""
    chosen = [(name, piece) for name, piece in manifest.pieces() if name.startswith(f"{section}/" if section else "")]
    sizes = {
        (piece.file, name): piece.box.numel * DTYPES[manifest.tensors[name].dtype].itemsize for name, piece in chosen
    }
    mine = share_out(sizes, dict.fromkeys(sizes, range(size)))
    problems: list[str] = []
    for number, (file, about) in enumerate(sorted(manifest.files.items())):
        pieces = {name: piece for name, piece in chosen if piece.file == file and mine[file, name] == rank}
        with_header = number % size == rank
        if (pieces or with_header) and (problem := find_damage(path / file, about, pieces, with_header=with_header)):
            problems.append(problem)
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}")


@contextmanager
def offering_older(together: Together, path: Path) -> Generator[None]:
    """A CheckpointError inside also says which older checkpoint beside this one is whole."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_older(together, path)}") from error


def _older(together: Together, path: Path) -> str:
    names = together.do(lambda: [each.name for each in folders.older(path)] if together.world.rank == 0 else None)[0]
    for name in names if isinstance(names, list) else []:
        candidate = path.parent / str(name)
        try:
            verify(together, candidate, open_manifest(together, candidate))
        except CheckpointError:
            continue
        return f"the one before it is whole: gw.load({str(candidate)!r}, ...)"
    return "there is no older one beside it that is whole"


@dataclass(frozen=True)
class Reader:
    """A checkpoint that was verified: reads of it what this rank needs."""

    manifest: Manifest
    slices: Slices
    rank: int
    world_size: int
    mesh: str

    def read(self, name: str, like: Tensor) -> Tensor:
        return laid_out(self._box(name, wanted(name, like)), like)

    def whole(self, name: str) -> Tensor:
        return self._box(name, Box.whole(self.manifest.stored(name).shape))

    def _box(self, name: str, box: Box) -> Tensor:
        stored = self.manifest.stored(name)
        key, dtype = self.manifest.aliases.get(name, name), DTYPES[stored.dtype]
        result = torch.empty(box.length, dtype=dtype)
        for piece in self._pieces(stored.pieces):
            part = piece.box.meet(box)
            if part is not None:
                found = self.slices.read(piece.file, key, dtype, part.within(piece.box))
                if part == box:
                    return found
                result[part.within(box)] = found
        return result

    def _pieces(self, pieces: tuple[Piece, ...]) -> list[Piece]:
        """One for each part of the tensor: where copies differed, this rank's own in the world that saved it, else the first."""
        same_world = (self.world_size, self.mesh) == (self.manifest.world_size, self.manifest.mesh)
        chosen: list[Piece] = []
        for _, copies in groupby(sorted(pieces, key=lambda piece: piece.box.offset), key=lambda piece: piece.box):
            listed = sorted(copies, key=lambda piece: piece.ranks or ())
            own = [piece for piece in listed if piece.ranks and same_world and self.rank in piece.ranks]
            chosen.append((own or listed)[0])
        return chosen


def export_metadata(manifest: Manifest) -> Mapping[str, str]:
    """What is said in the header of an exported file."""
    return {"format": "pt", "gradwire": manifest.gradwire, "step": str(manifest.step), "plan": manifest.plan}
