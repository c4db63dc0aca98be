"""What the three training scripts share: their command line, the pinned core, and what they report.

The scripts import ``benchmarks``, so start them from the root of the repository with ``PYTHONPATH=.``; the driver
(`benchmarks.run`) does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.models import WORKLOADS, Workload

SEED = 0
NETWORK = Path("/proc/self/net/dev")  # of this process's network namespace


def parse(description: str | None) -> argparse.Namespace:
    """The command line of a training script.

    --started is the launcher's clock (monotonic, the same for all processes of a machine) when it began.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--steps", type=int, default=15, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--started", type=float, default=time.monotonic(), help="time.monotonic() at launch")
    parser.add_argument("--out", type=Path, help="folder for rank0.json, rank1.json, ...; default: print")
    parser.add_argument("--interface", default="lo", help="whose bytes are counted")
    parser.add_argument("--bucket-cap-mb", type=float, help="DDP only; default: DDP's own")
    parser.add_argument("--bucket-bytes", type=int, help="gradwire only; default: measured")
    args = parser.parse_args()
    if args.warm_up < 1 or args.steps < 1:
        parser.error("--steps and --warm-up must be at least 1: the first step is always slower")
    return args


def pin(rank: int) -> None:
    """Put every thread of this process on core ``rank`` (modulo the cores), and let torch compute with one thread."""
    core = rank % (os.cpu_count() or 1)
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
    torch.set_num_threads(1)


def sent_bytes(interface: str) -> int:
    """Bytes that ``interface`` has sent, headers included, as this network namespace counts them."""
    for line in NETWORK.read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"no interface {interface!r} in {NETWORK}")


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@dataclass(kw_only=True)
class Record:
    """One rank's measurements, taken step by step and printed as one line of JSON."""

    variant: str
    rank: int
    args: argparse.Namespace
    before_model_bytes: int = field(default_factory=resident_bytes)
    ends_s: list[float] = field(default_factory=list)
    bytes_at: list[int] = field(default_factory=list)
    loss: float = float("nan")

    @property
    def workload(self) -> Workload:
        """What is trained."""
        return WORKLOADS[self.args.model]

    @property
    def num_steps(self) -> int:
        """Measured ones and those before."""
        return self.args.steps + self.args.warm_up

    def step_done(self, loss: Tensor) -> None:
        """A step ended (the optimizer's part included) on this rank's mean loss."""
        self.ends_s.append(time.monotonic())
        self.bytes_at.append(sent_bytes(self.args.interface))
        self.loss = loss.item()

    def report(self, model: nn.Module) -> None:
        """Say everything, in one line of JSON."""
        warm = self.args.warm_up
        ends = self.ends_s[warm - 1 :]
        line = {
            "variant": self.variant,
            "model": self.args.model,
            "rank": self.rank,
            "interface": self.args.interface,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "step_s": [stop - start for start, stop in itertools.pairwise(ends)],
            "loss": self.loss,
            "first_step_s": self.ends_s[0] - self.args.started,
            "before_model_bytes": self.before_model_bytes,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "sent_bytes_per_step": (self.bytes_at[-1] - self.bytes_at[warm - 1]) / self.args.steps,
            "torch": torch.__version__,
        }
        if self.args.out is None:
            print(json.dumps(line), flush=True)
        else:
            (self.args.out / f"rank{self.rank}.json").write_text(json.dumps(line))


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every script: plain SGD with momentum, so that its time is small."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
