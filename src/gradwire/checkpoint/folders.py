"""The folders of a directory of checkpoints: which are complete, how a new one gets its name at once or not at all."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from gradwire.checkpoint.manifest import Manifest, from_text
from gradwire.errors import CheckpointError

MANIFEST = "manifest.json"
LATEST = "latest"
_COMPLETE = re.compile(r"checkpoint-(\d+)")
_PARTIAL = re.compile(r"\.checkpoint-(\d+)\.partial")


def complete(directory: Path) -> list[Path]:
    """The checkpoints in a directory, newest first. Raises CheckpointError if it is no directory."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not there, or no folder; give the one that gw.save was given")
    return [path for _, path in reversed(_numbered(directory, _COMPLETE))]


def choose(directory: Path) -> Path:
    """``directory`` if it is a checkpoint itself, else the newest in it. Raises CheckpointError if there is none."""
    if (directory / MANIFEST).is_file() or _COMPLETE.fullmatch(directory.name):
        complete(directory)  # it must be a folder
        return directory
    found = complete(directory)
    if not found:
        raise CheckpointError(f"{directory} holds no complete checkpoint; give the folder that gw.save was given")
    return found[0]


def older(path: Path) -> list[Path]:
    """The checkpoints beside this one that were written before it, newest first."""
    number = _COMPLETE.fullmatch(path.name)
    if number is None:
        return []
    return [each for count, each in reversed(_numbered(path.parent, _COMPLETE)) if count < int(number.group(1))]


def read_manifest(path: Path) -> tuple[Manifest, bytes]:
    """A checkpoint's manifest, and its text. Raises CheckpointError if there is none, or it is damaged."""
    try:
        text = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} is not complete: {MANIFEST}: {error.strerror or error}") from None
    return from_text(text, str(path / MANIFEST)), text


def begin(directory: Path) -> int:
    """Make the folder that the next checkpoint is written into; what interrupted saves left is removed. Returns n."""
    directory.mkdir(parents=True, exist_ok=True)
    for _, left in _numbered(directory, _PARTIAL):
        shutil.rmtree(left)
    numbers = [count for count, _ in _numbered(directory, _COMPLETE)]
    number = max(numbers, default=0) + 1
    partial(directory, number).mkdir()
    return number


def partial(directory: Path, number: int) -> Path:
    """What a checkpoint is called while it is written."""
    return directory / f".checkpoint-{number}.partial"


def final(directory: Path, number: int) -> Path:
    """What it is called when it is complete."""
    return directory / f"checkpoint-{number}"


def commit(directory: Path, number: int, manifest: bytes) -> None:
    """Write the manifest, give the folder its name, point ``latest`` to it; each on the disk before the next."""
    folder = partial(directory, number)
    _write(folder / MANIFEST, manifest)
    sync_folder(folder)
    folder.rename(final(directory, number))
    sync_folder(directory)
    pointer = directory / f".{LATEST}.partial"
    pointer.unlink(missing_ok=True)
    try:
        _write(pointer, f"{final(directory, number).name}\n".encode())
        pointer.replace(directory / LATEST)
        sync_folder(directory)
    except OSError:  # the checkpoint is complete and found without it
        pointer.unlink(missing_ok=True)


def discard(directory: Path, number: int) -> None:
    """Nothing is left of a checkpoint that could not be completed."""
    shutil.rmtree(partial(directory, number), ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """What was made or renamed in it is on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _numbered(directory: Path, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
    matches = [(pattern.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted((int(match.group(1)), path) for match, path in matches if match and path.is_dir())
