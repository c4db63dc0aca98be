"""The training script that the fault tests break, and how it is run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SOURCES = str(Path(__file__).parents[2] / "src")

TRAIN = """
import os, sys, time
import torch
import gradwire as gw
from torch.utils.data import Dataset

class Numbers(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        return torch.full((4,), index / 4000), torch.tensor([index / 4000])

STEP = 30
def fault(world, step):
    if step != STEP or world.rank != 1:
        return
    {fault}

{prelude}
with gw.init() as world:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    {model}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = gw.DataLoader(Numbers(), 32, num_workers={num_workers})
    gw.distribute(model, optimizer, train{distribute})
    step = 0
    for epoch in range({epochs}):
        for x, y in train:
            step += 1
            if step == STEP:
                print("AT STEP", os.getpid(), flush=True)
            fault(world, step)
            loss = torch.nn.functional.mse_loss(model(x), y)
            {loss}
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print("DONE", world.rank, step, flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    code: int
    out: str
    err: str
    seconds_after_step: float

    @property
    def first_line(self) -> str:
        return next(iter(self.err.splitlines()), "")


def write_script(
    folder: Path,
    *,
    fault: str = "pass",
    model: str = "pass",
    loss: str = "pass",
    distribute: str = "",
    prelude: str = "",
    num_workers: int = 0,
    epochs: int = 1,
) -> Path:
    path = folder / "train.py"
    path.write_text(
        TRAIN.format(
            fault=fault,
            model=model,
            loss=loss,
            distribute=distribute,
            prelude=prelude,
            num_workers=num_workers,
            epochs=epochs,
        )
    )
    return path


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWIRE_", "RANK", "WORLD"))}
    return {**kept, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", **more}


def start(*args: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """`gradwire ARGS` in a session of its own, so that the test's Ctrl-C is its own."""
    command = [sys.executable, "-m", "gradwire", *map(str, args)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env or environment(),
        start_new_session=True,
    )


def read_line(file: int) -> str:
    """A byte at a time: what a buffer took beyond the line would be lost to ``communicate``."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(file, 1)):
        line += byte
    return line.decode()


def wait_for_step(process: subprocess.Popen[str], count: int = 1) -> list[int]:
    """Until ``count`` ranks are at the step of the fault: their pids."""
    assert process.stdout is not None
    pids: list[int] = []
    while len(pids) < count:
        line = read_line(process.stdout.fileno())
        assert line, f"ended before the step: {process.stderr.read() if process.stderr else ''}"
        if "AT STEP" in line:
            pids.append(int(line.split()[-1]))
    return pids


def finish(process: subprocess.Popen[str], *, timeout_s: float = 60.0, since: float | None = None) -> Ended:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"did not end within {timeout_s} s; stderr:\n{err}") from None
    return Ended(process.returncode, out, err, time.monotonic() - (since or time.monotonic()))


def run(*args: str | Path, timeout_s: float = 60.0, env: dict[str, str] | None = None) -> Ended:
    """Run to the end; ``seconds_after_step`` counts from when rank 0 reached the step of the fault."""
    process = start(*args, env=env)
    wait_for_step(process)
    return finish(process, timeout_s=timeout_s, since=time.monotonic())


def descendants(pid: int) -> set[int]:
    """Every live process below ``pid``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found


def alive(pids: set[int]) -> set[int]:
    """Those of ``pids`` that still run (zombies do not)."""
    living: set[int] = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            living.add(pid)
    return living


def gone_within(pids: set[int], seconds: float) -> set[int]:
    """Wait until none of ``pids`` is alive; returns those left after ``seconds``."""
    deadline_s = time.monotonic() + seconds
    while (left := alive(pids)) and time.monotonic() < deadline_s:
        os.sched_yield()
    return left
