"""`save`, `load`, `export`, `inspect`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import cast

from torch import nn
from torch.optim import Optimizer

from gradwire.checkpoint import folders, reading
from gradwire.checkpoint.files import DTYPES, Entry, Slices, write_file
from gradwire.checkpoint.manifest import Manifest
from gradwire.checkpoint.models import ModelPart
from gradwire.checkpoint.objects import (
    ChancePart,
    Stateful,
    StatefulByRank,
    StatePart,
    TrainingPart,
    ValuePart,
    require_stateful,
)
from gradwire.checkpoint.optimizers import OptimizerPart, names_of
from gradwire.checkpoint.parts import Part, few
from gradwire.checkpoint.reading import Reader
from gradwire.checkpoint.together import Together
from gradwire.checkpoint.trees import Json, from_json
from gradwire.checkpoint.writing import Writing
from gradwire.comm.world import World, current
from gradwire.errors import UsageError

Folder = str | PathLike[str]
Optimizers = Optimizer | Sequence[Optimizer]


def save(
    directory: Folder,
    model: nn.Module | None = None,
    optimizer: Optimizers | None = None,
    loader: Stateful | None = None,
    training: StatefulByRank | None = None,
    **extra: object,
) -> Path:
    """Write a checkpoint into a new folder ``directory/checkpoint-<n>``; every rank calls it, at the same step.

    directory: on a file system that all hosts share; made if it is not there. optimizer: one, or a list. training: what
    ``gw.distribute`` returned. extra: more modules and optimizers, schedulers, scalers and whatever has ``state_dict``, or lists
    of them; and plain values (numbers, texts, lists, dicts, tensors), the same on all ranks, which `load` returns.
    The random generators of every rank are saved too.

    Every rank writes what it holds; what several hold, one of them writes. The new folder gets its name when all is on the
    disk: a crash leaves the earlier checkpoints as they are. Returns the new folder. Call it between ``optimizer.step()`` and the
    next backward.

    Raises UsageError for what cannot be stored, MismatchError if ranks save different things, CheckpointError if a rank
    cannot write; on all ranks, naming those that failed, and nothing is left of the attempt. Cost: each byte a rank holds is
    read for its checksum (about 2 GB/s), and written by one rank.

    >>> import tempfile, torch
    >>> import gradwire as gw
    >>> with gw.init(), tempfile.TemporaryDirectory() as folder:
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.Adam(model.parameters())
    ...     _ = save(folder, model, optimizer, epoch=3)
    ...     load(folder, model, optimizer)
    {'epoch': 3}
    """
    world = current()
    given = _given("gw.save", world, model, optimizer, loader, training, extra)
    return Writing(world, Path(directory), [*given, ChancePart("rng", world.rank)]).run()


def load(
    directory: Folder,
    model: nn.Module | None = None,
    optimizer: Optimizers | None = None,
    loader: Stateful | None = None,
    training: StatefulByRank | None = None,
    **extra: object,
) -> dict[str, object]:
    """Go on from the newest checkpoint in ``directory``, or from ``directory`` if it is one itself. Every rank calls it.

    The arguments are those of `save`; give the objects that shall take their state, under the same names, after
    ``gw.distribute``. The world may have another size and another plan: each rank reads the parts that it needs. Nothing is
    changed before every byte was verified and every name and shape found to fit. Returns the plain values that were saved.

    In a world of the same size every rank goes on with its own random generators, and (also on the same mesh) with its own copy
    of what differed between ranks. In another one the generators stay as they are, copies are the lowest rank's, and
    ``training`` gets the states of all.

    Raises CheckpointError if there is none, or if it is damaged: naming file and tensor, and the newest older one that is whole;
    UsageError for a model or optimizer that does not fit, naming the parameter.
    """
    world, directory = current(), Path(directory)
    together = Together(world, "gw.load")
    parts = _for_loading(world, model, optimizer, loader, training, extra)
    path = reading.choose(together, directory)
    with reading.offering_older(together, path):
        manifest = reading.open_manifest(together, path)
    _check(together, parts, manifest)
    with reading.offering_older(together, path):
        reading.verify(together, path, manifest)
    with Slices(path) as slices:
        source = Reader(manifest, slices, world.rank, world.size, world.mesh.words())
        together.do(partial(_give, parts, source))
        rest = _values(source)
    left = manifest.sections.keys() - {part.section for part in parts} - {f"extra.{name}" for name in rest}
    if left:
        world.log(f"gradwire: {path} also holds {', '.join(sorted(left))}; gw.load was not asked for it")
    return rest


def export(directory: Folder, file: Folder) -> None:
    """Write the model of a checkpoint into one safetensors file, whole and under the user's names. Needs no world.

    directory: as for `load`. Tied weights are written under each of their names; complex128 as pairs of float64. Memory: about
    one tensor. Raises CheckpointError for a damaged checkpoint or one without a model; the file appears when it is complete.
    """
    path = folders.choose(Path(directory))
    manifest, _ = folders.read_manifest(path)
    if "model" not in manifest.sections:
        raise UsageError(f"export: {path} holds no model; it has {', '.join(sorted(manifest.sections))}")
    reading.require_whole(path, manifest, section="model")
    target = Path(file)
    temporary = target.with_name(f".{target.name}.partial")
    temporary.unlink(missing_ok=True)
    with Slices(path) as slices:
        source = Reader(manifest, slices, rank=0, world_size=0, mesh="")
        entries: dict[str, Entry] = {}
        for name in sorted(manifest.names("model")):
            stored = manifest.stored(f"model/{name}")
            entries[name] = Entry(DTYPES[stored.dtype], stored.shape, partial(source.whole, f"model/{name}"))
        try:
            write_file(temporary, entries, reading.export_metadata(manifest))
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    folders.sync_folder(target.absolute().parent)


def inspect(directory: Folder) -> str:
    """What is in a checkpoint (as `load` finds it), for people. Reads the manifest only, needs no world."""
    path = folders.choose(Path(directory))
    manifest, _ = folders.read_manifest(path)
    total = sum(file.num_bytes for file in manifest.files.values())
    lines = [
        f"{path}: step {manifest.step}, {total:,} bytes in {len(manifest.files)} files",
        f"written by gradwire {manifest.gradwire}, torch {manifest.torch}, {manifest.world_size} ranks, {manifest.mesh}",
        f"plan: {manifest.plan}",
    ]
    for name, section in sorted(manifest.sections.items()):
        note = "" if section.ranks is None else ", for each rank"
        value = f": {section.about}" if section.kind == "value" else ""
        lines += ["", f"{name} ({section.kind}{note}){value}", *_tensor_lines(manifest, name)]
    return "\n".join(lines)


def _tensor_lines(manifest: Manifest, section: str) -> Iterator[str]:
    for name in sorted(manifest.names(section)):
        full = f"{section}/{name}"
        if full in manifest.aliases:
            yield f"  {name}: the same as {manifest.aliases[full].removeprefix(f'{section}/')}"
            continue
        stored = manifest.stored(full)
        files = sorted({piece.file.removesuffix(".safetensors") for piece in stored.pieces})
        differ = ", the ranks' copies differ" if any(piece.ranks for piece in stored.pieces) else ""
        yield f"  {name}: {stored.dtype} {stored.shape} in {few(files, 4) or 'no file'}{differ}"


def _given(
    verb: str,
    world: World,
    model: object,
    optimizer: object,
    loader: object,
    training: object,
    extra: Mapping[str, object],
) -> list[Part]:
    """The parts, in the order in which they are saved: ``training`` may move the parameters when it is asked."""
    if model is not None and not isinstance(model, nn.Module):
        raise UsageError(f"{verb}: model must be a torch.nn.Module, not {type(model).__name__}")
    optimizers = cast("list[object]", list(optimizer)) if isinstance(optimizer, list | tuple) else [optimizer]
    parts: list[Part] = []
    if training is not None:
        parts.append(
            TrainingPart(
                "training", cast("StatefulByRank", require_stateful(f"{verb}: training", training)), world.rank
            )
        )
    items = dict(_flat(extra))
    names = names_of({"": model} if model is not None else {})
    names = (
        names_of({name.removeprefix("extra."): each for name, each in items.items() if isinstance(each, nn.Module)})
        | names
    )
    if model is not None:
        parts.append(ModelPart("model", model))
    for number, each in enumerate(optimizers if optimizer is not None else []):
        if not isinstance(each, Optimizer):
            raise UsageError(
                f"{verb}: optimizer must be a torch optimizer or a list of them, not {type(each).__name__}"
            )
        parts.append(OptimizerPart(f"optimizer.{number}", each, names))
    if loader is not None:
        parts.append(StatePart("loader", require_stateful(f"{verb}: loader", loader), world.size))
    return parts + [_part(section, value, names, world.size) for section, value in items.items()]


def _flat(extra: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Lists of objects with a state become one entry each."""
    for name, value in extra.items():
        listed = cast("list[object]", list(value)) if isinstance(value, list | tuple) else []
        if listed and all(isinstance(each, Stateful) for each in listed):
            yield from ((f"extra.{name}.{number}", each) for number, each in enumerate(listed))
        else:
            yield f"extra.{name}", value


def _part(section: str, value: object, names: Mapping[int, str], world_size: int) -> Part:
    if isinstance(value, nn.Module):
        return ModelPart(section, value)
    if isinstance(value, Optimizer):
        return OptimizerPart(section, value, names)
    return StatePart(section, value, world_size) if isinstance(value, Stateful) else ValuePart(section, value)


def _for_loading(
    world: World, model: object, optimizer: object, loader: object, training: object, extra: Mapping[str, object]
) -> list[Part]:
    """The parts, in the order in which they get their state.

    First what may still refuse it, which then leaves the weights as they were; last what builds on others or draws at random.
    """
    parts = _given("gw.load", world, model, optimizer, loader, training, extra)
    for part in parts:
        if isinstance(part, ValuePart):
            require_stateful(f"gw.load: {part.section.removeprefix('extra.')}", part.value)
    first = [part for part in parts if isinstance(part, StatePart)]
    last = [part for part in parts if isinstance(part, TrainingPart)]
    weights = [part for part in parts if isinstance(part, ModelPart | OptimizerPart)]
    return [*first, *weights, *last, ChancePart("rng", world.rank)]


def _check(together: Together, parts: Sequence[Part], manifest: Manifest) -> None:
    """Every name and shape fits, and no name is left over."""
    wanted = together.do(lambda: {part.section: cast("Json", part.check(manifest)) for part in parts})
    for part in parts:
        needed = {name for each in wanted for name in cast("dict[str, list[str]]", each)[part.section]}
        if left := sorted(part.offered(manifest) - needed):
            raise UsageError(
                f"gw.load: {part.section} of the checkpoint also has {few(left)}, which is not here; give what was saved"
            )


def _give(parts: Sequence[Part], source: Reader) -> None:
    for part in parts:
        part.give(source)


def _values(source: Reader) -> dict[str, object]:
    """The plain values that were saved, by name."""
    return {
        section.removeprefix("extra."): from_json(about.about, source.whole)
        for section, about in source.manifest.sections.items()
        if about.kind == "value"
    }
