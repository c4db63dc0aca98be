"""A damaged, incomplete or unfitting checkpoint is refused by name; what interrupts a save leaves the earlier ones."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.checkpoint.api import export, inspect, load, save
from gradwire.comm.world import World
from gradwire.errors import CheckpointError, MismatchError, UsageError
from gradwire.testing import RankError, run_ranks


def model(hidden: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, 2))


def adam(of: nn.Module) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(of.parameters())
    for param in of.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """Two checkpoints of one model."""
    folder = tmp_path_factory.mktemp("good")
    with gw.init():
        made = model()
        optimizer = adam(made)
        save(folder, made, optimizer, epoch=1)
        save(folder, made, optimizer, epoch=2)
    return folder


@pytest.fixture
def copied(good, tmp_path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "c"))


def newest(folder: Path) -> Path:
    return folder / "checkpoint-2"


def place_of(path: Path, name: str) -> tuple[int, int]:
    """Where a tensor's bytes begin and end in a safetensors file."""
    data = path.read_bytes()
    count = int.from_bytes(data[:8], "little")
    start, end = json.loads(data[8 : 8 + count])[name]["data_offsets"]
    return 8 + count + start, 8 + count + end


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def flip_in(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = newest(folder) / "rank-0.safetensors"
        flip(file, place_of(file, name)[0] + 5)

    return change


def rewrite(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """Another manifest, with the right checksum."""

    def write(folder: Path) -> None:
        path = newest(folder) / "manifest.json"
        table = json.loads(path.read_text())
        del table["crc32"]
        change(table)
        rest = json.dumps(table).encode()[1:]
        path.write_bytes(f'{{"crc32": "{zlib.crc32(rest):08x}",\n'.encode() + rest)

    return write


def truncate(folder: Path) -> None:
    os.truncate(newest(folder) / "rank-0.safetensors", 3000)


WHOLE = r"the one before it is whole: gw.load\('.*checkpoint-1'"
DAMAGED = {
    "a flipped bit in a weight": (
        flip_in("model/0.weight"),
        rf"rank-0.safetensors is damaged in tensor model/0.weight; {WHOLE}",
    ),
    "a flipped bit in a moment": (
        flip_in("optimizer.0/1.bias.exp_avg"),
        r"damaged in tensor optimizer.0/1.bias.exp_avg",
    ),
    "a flipped bit in a generator": (flip_in("rng/0.torch"), r"damaged in tensor rng/0.torch"),
    "a flipped bit in a header": (lambda f: flip(newest(f) / "rank-0.safetensors", 20), rf"in its header; {WHOLE}"),
    "a header's length": (lambda f: flip(newest(f) / "rank-0.safetensors", 7, 6), r"damaged in its header"),
    "a truncated file": (truncate, rf"rank-0.safetensors has 3000 bytes instead of \d+; {WHOLE}"),
    "a missing file": (
        lambda f: (newest(f) / "rank-0.safetensors").unlink(),
        rf"rank-0.safetensors is missing; {WHOLE}",
    ),
    "no manifest": (
        lambda f: (newest(f) / "manifest.json").unlink(),
        rf"is not complete: manifest.json: No such .*{WHOLE}",
    ),
    "a flipped bit in the manifest": (
        lambda f: flip(newest(f) / "manifest.json", 300),
        rf"manifest.json is damaged or was changed.*{WHOLE}",
    ),
    "a newer format": (
        rewrite(lambda t: t.update(format=2, gradwire="9.0")),
        r"format 2, this gradwire reads 1; it was written by gradwire 9.0: install that",
    ),
    "a manifest of other things": (
        rewrite(lambda t: t.pop("tensors")),
        r"is not what gradwire writes: KeyError: 'tensors'",
    ),
    "a file outside the folder": (
        rewrite(lambda t: t["files"].update({"../x": {"num_bytes": 1, "header_crc32": ""}})),
        r"'../x' is not a name of one of its files",
    ),
    "a part outside its tensor": (
        rewrite(lambda t: t["tensors"]["model/0.bias"].update(shape=[3])),
        r"tensor model/0.bias: a part at \(0,\) of \(4,\) is not inside \(3,\)",
    ),
    "a part that is missing": (
        rewrite(lambda t: t["tensors"]["model/0.bias"].update(shape=[5])),
        r"model/0.bias: 1 of 5 entries are missing",
    ),
    "both damaged": (
        lambda f: [os.truncate(f / f"checkpoint-{n}" / "rank-0.safetensors", 9) for n in (1, 2)],
        r"has 9 bytes.*there is no older one beside it that is whole",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_refused_by_name_and_changes_nothing(name, copied):
    change, words = DAMAGED[name]
    change(copied)
    made = model()
    before = {key: value.clone() for key, value in made.state_dict().items()}
    with gw.init(), pytest.raises(CheckpointError, match=words):
        load(copied, made, torch.optim.Adam(made.parameters()))
    assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items())


def test_all_ranks_hear_of_damage_that_one_finds(copied):
    flip_in("model/0.weight")(copied)

    def body(world: World) -> str:
        try:
            load(copied, model())
        except CheckpointError as error:
            return str(error)
        return ""

    texts = run_ranks(3, body)
    assert len(set(texts)) == 1
    assert "damaged in tensor model/0.weight" in texts[0]
    assert "the one before it is whole" in texts[0]


def test_whatever_bit_is_flipped_it_is_noticed(copied):
    """Files and manifest alike; the same 150 places each time."""
    chance = random.Random(0)
    files = [newest(copied) / name for name in ("rank-0.safetensors", "manifest.json")]
    with gw.init():
        for _ in range(150):
            file = chance.choice(files)
            place, bit = chance.randrange(file.stat().st_size), chance.randrange(8)
            flip(file, place, bit)
            with pytest.raises(CheckpointError):
                load(newest(copied), model())
            flip(file, place, bit)
        load(newest(copied), model())


class Shy(nn.Module):
    def get_extra_state(self):
        return object()


def two(of: nn.Module, together: bool = False) -> torch.optim.Adam:
    params = list(of.parameters())
    return torch.optim.Adam([{"params": params[:1]}, {"params": params[1:]}])


def frozen(of: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(list(of.parameters())[:-1])


def loading(of: nn.Module, optimizer: object = None, **extra: object) -> Callable[[Path], object]:
    return lambda folder: load(folder, of, optimizer, **extra)  # type: ignore[arg-type]


def with_optimizer(make: Callable[[nn.Module], object]) -> Callable[[Path], object]:
    made = model()
    return loading(made, make(made))


TIED = nn.ModuleList([nn.Linear(2, 2)])
STRANGER = nn.Linear(2, 2)
UNFIT = {
    "no such folder": (lambda f: load(f / "nowhere", model()), CheckpointError, r"nowhere is not there, or no folder"),
    "no checkpoint in it": (
        lambda f: load(newest(f).parent.parent, model()),
        CheckpointError,
        r"holds no complete checkpoint",
    ),
    "no such checkpoint": (lambda f: load(f / "checkpoint-9", model()), CheckpointError, r"checkpoint-9 is not there"),
    "another shape": (
        loading(model(5)),
        UsageError,
        r"0.weight is \(4, 3\) in the checkpoint and \(5, 3\) in the model; make the model with the sizes",
    ),
    "another dtype": (
        loading(model().double()),
        UsageError,
        r"0.weight is float32 in the checkpoint and float64 in the model; load into a model of float32 and convert",
    ),
    "a name it lacks": (
        loading(nn.Sequential(*model(), nn.Linear(2, 2))),
        UsageError,
        r"the checkpoint has no 2.weight, 2.bias; give the model that was saved",
    ),
    "a name too many": (
        loading(nn.Sequential(model()[0])),
        UsageError,
        r"model of the checkpoint also has 1.bias, 1.weight, which is not here",
    ),
    "another optimizer": (
        with_optimizer(lambda m: torch.optim.SGD(m.parameters())),
        UsageError,
        r"optimizer.0 was saved as Adam, and is SGD here; make that one",
    ),
    "other groups": (
        with_optimizer(two),
        UsageError,
        r"had 0.bias in param group 0, together with others than in group 1 here",
    ),
    "an optimizer of fewer": (with_optimizer(frozen), UsageError, r"optimizer.0 of the checkpoint also has 1.bias"),
    "a second optimizer": (
        with_optimizer(lambda m: [torch.optim.Adam(m.parameters())] * 2),
        UsageError,
        r"the checkpoint has no optimizer.1; it has extra.epoch, model, optimizer.0, rng: leave it out",
    ),
    "a plain value given to load": (
        loading(model(), epoch=3),
        UsageError,
        r"epoch must have state_dict and load_state_dict",
    ),
    "a value that was a scheduler": (
        loading(model(), epoch=torch.amp.GradScaler("cpu")),
        UsageError,
        r"extra.epoch was saved as a value, and is a state here",
    ),
    "no module": (lambda f: save(f, {"w": 1}), UsageError, r"model must be a torch.nn.Module, not dict"),
    "no optimizer": (
        lambda f: save(f, model(), "adam"),
        UsageError,
        r"must be a torch optimizer or a list of them, not str",
    ),
    "no loader": (
        lambda f: save(f, model(), loader=[1, 2]),
        UsageError,
        r"loader must have state_dict and load_state_dict",
    ),
    "a stranger's parameter": (
        lambda f: save(f, model(), torch.optim.SGD(STRANGER.parameters())),
        UsageError,
        r"SGD \(param group 0\) steps a parameter of shape \(2, 2\) that has no name; give the model that holds it too",
    ),
    "an object no file holds": (
        lambda f: save(f, model(), thing=object()),
        UsageError,
        r"extra.thing/value is a object; a checkpoint holds tensors, numbers",
    ),
    "such an object deep inside": (
        lambda f: save(f, model(), thing={"a": [1, {2, 3}]}),
        UsageError,
        r"extra.thing/value.a.1 is a set",
    ),
    "an extra state no file holds": (lambda f: save(f, Shy()), UsageError, r"model.extra/_extra_state is a object"),
    "the meta device": (lambda f: save(f, model().to("meta")), UsageError, r"model/0.weight is on the meta device"),
    "a sparse tensor": (lambda f: save(f, rows=torch.eye(2).to_sparse()), UsageError, r"rows/value is sparse_coo"),
    "a path that is a file": (lambda f: save(newest(f) / "manifest.json", model()), CheckpointError, r"File exists"),
    "not writable": (
        lambda f: save("/proc/gradwire", model()),
        CheckpointError,
        r"No such file or directory: '/proc/gradwire'",
    ),
    "export without a model": (
        lambda f: (save(f / "x", epoch=1), export(f / "x", f / "y")),
        UsageError,
        r"holds no model",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_refused_with_the_cure_and_leaves_no_litter(name, copied):
    action, kind, words = UNFIT[name]
    with gw.init(), pytest.raises(kind, match=words):
        action(copied)
    assert sorted(path.name for path in copied.iterdir() if path.name != "x") == [
        "checkpoint-1",
        "checkpoint-2",
        "latest",
    ]


def test_ranks_that_save_different_things_are_told(tmp_path):
    def told(action: Callable[[World], object]) -> str:
        def body(world: World) -> str:
            try:
                action(world)
            except gw.GradwireError as error:
                return f"{type(error).__name__}: {error}"
            return ""

        texts = run_ranks(2, body)
        assert len(set(texts)) == 1
        return texts[0]

    def at_another_step(world: World) -> None:
        world.step = 7 + world.rank
        save(tmp_path, model())

    assert "rank 0 has made 7 steps, rank 1 8; save at the same step" in told(at_another_step)
    assert "epoch is 0 on rank 0 and 1 on rank 1" in told(lambda world: save(tmp_path, epoch=world.rank))
    assert "mean is another tensor on some" in told(lambda world: save(tmp_path, mean=torch.tensor([world.rank])))
    assert "model/0.weight is float32 (4, 3) on rank 0 and float32 (5, 3) on rank 1" in told(
        lambda world: save(tmp_path, model(4 + world.rank))
    )
    assert "rank 1 and rank 0 don't both save extra.epoch" in told(
        lambda world: save(tmp_path, **({"epoch": 1} if world.rank else {}))
    )
    assert "MismatchError: gw.save: rank 1 steps 0.weight with lr=2.0, another rank with 1.0" in told(
        lambda world: save(tmp_path, made := model(), torch.optim.SGD(made.parameters(), lr=1.0 + world.rank))
    )
    assert "UsageError: gw.save: rank 1: model/0.weight is on the meta device" in told(
        lambda world: save(tmp_path, model().to("meta" if world.rank else "cpu"))
    )
    assert "CheckpointError: gw.save: rank 1: " in told(
        lambda world: save(tmp_path if world.rank == 0 else "/proc/x", model())
    )
    assert list(tmp_path.iterdir()) == []


def test_a_state_of_each_ranks_own_needs_as_many_ranks_again(tmp_path):
    class Meter:
        value: object = None

        def state_dict(self) -> dict[str, object]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, object]) -> None:
            self.value = state["value"]

    def write(world: World) -> None:
        meter = Meter()
        meter.value = torch.tensor([world.rank]) if world.rank else "none"
        save(tmp_path, meter=meter)

    def read(world: World) -> str:
        meter = Meter()
        load(tmp_path, meter=meter)
        return str(meter.value)

    run_ranks(2, write)
    assert run_ranks(2, read) == ["none", "tensor([1])"]
    with pytest.raises(RankError, match=r"extra.meter differed between the 2 ranks that saved it; go on with as many"):
        run_ranks(3, read)


def test_a_rank_that_does_not_save_is_waited_for_no_longer_than_the_timeout(tmp_path):
    def body(world: World) -> None:
        if world.rank == 0:
            try:
                save(tmp_path, model())
            finally:
                over.set()
        else:
            over.wait(10.0)

    over = threading.Event()
    with pytest.raises(RankError, match="PeerError"):
        run_ranks(2, body, timeout_s=0.5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_litter(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", disk], check=True)
    try:

        def body(world: World) -> str:
            save(disk, nn.Linear(100, 100), epoch=1)
            try:
                save(disk, nn.Linear(1000, 1000))
            except CheckpointError as error:
                return str(error)
            return ""

        texts = run_ranks(2, body)
        assert "No space left on device" in texts[0]
        assert texts[0] == texts[1]
        assert sorted(path.name for path in disk.iterdir()) == ["checkpoint-1", "latest"]
        with gw.init():
            assert load(disk, nn.Linear(100, 100)) == {"epoch": 1}
    finally:
        subprocess.run(["umount", disk], check=True)


SAVING = """
import sys, torch, gradwire as gw
from gradwire.checkpoint.api import save
model = torch.nn.Linear(300, 300)
with gw.init():
    count = 0
    while True:
        torch.nn.init.constant_(model.weight, count)
        save(sys.argv[1], model, count=count)
        print(count, flush=True)
        count += 1
"""


def test_a_save_that_is_killed_leaves_the_newest_complete_one(tmp_path):
    with subprocess.Popen([sys.executable, "-c", SAVING, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(5):
            said = int(process.stdout.readline())
        deadline_s = time.monotonic() + 10.0
        while not list(tmp_path.glob(".checkpoint-*.partial")):  # in the middle of the next one
            assert time.monotonic() < deadline_s
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
    made = nn.Linear(300, 300)
    with gw.init():
        count = load(tmp_path, made)["count"]
        assert count in (said, *(int(each) + more for each in [said, *rest] for more in (0, 1)))
        assert made.weight.unique().tolist() == [count]
        save(tmp_path, made)
    assert not list(tmp_path.glob(".checkpoint*"))


def test_inspect_tells_what_is_in_one(good):
    text = inspect(good)
    for words in (
        "checkpoint-2: step 0", "1 ranks, data=1", "extra.epoch (value): 2", "0.weight: float32 (4, 3) in rank-0",
        "optimizer.0 (optimizer)", "1.bias.exp_avg_sq: float32 (2,)", "rng (rank, for each rank)",
    ):  # fmt: skip
        assert words in text, words
    assert (good / "latest").read_text() == "checkpoint-2\n"
    with gw.init():
        assert load(good / "checkpoint-1", model()) == {"epoch": 1}


def test_errors_are_gradwires():
    assert issubclass(CheckpointError, gw.GradwireError) and issubclass(MismatchError, gw.GradwireError)
