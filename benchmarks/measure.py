"""What the three training scripts share: their command line, the pinned core, and what they report.

The scripts import ``benchmarks``, so start them from the root of the repository with ``PYTHONPATH=.``; the drivers
(`benchmarks.run` and the others) do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.models import loss_of
from benchmarks.workloads import WORKLOADS, Samples, Workload

NETWORK = Path("/proc/self/net/dev")  # of this process's network namespace
EVALUATION_BATCH = 64


def parse(description: str | None, more: Callable[[argparse.ArgumentParser], None] | None = None) -> argparse.Namespace:
    """The command line of a training script; ``more`` adds its own options.

    --started is the launcher's clock (monotonic, the same for all processes of a machine) when it began.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--steps", type=int, default=15, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the data")
    parser.add_argument("--evaluate-every", type=int, default=0, help="steps between evaluations; 0: never")
    parser.add_argument("--started", type=float, default=time.monotonic(), help="time.monotonic() at launch")
    parser.add_argument("--out", type=Path, help="folder for rank0.json, rank1.json, ...; default: print")
    parser.add_argument("--interface", default="lo", help="whose bytes are counted")
    if more is not None:
        more(parser)
    args = parser.parse_args()
    if args.warm_up < 1 or args.steps < 1:
        parser.error("--steps and --warm-up must be at least 1: the first step is always slower")
    if args.evaluate_every and WORKLOADS[args.model].validation is None:
        parser.error(f"--evaluate-every: the data of {args.model} is random, nothing can be learnt from it")
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


@torch.no_grad()
def evaluate(model: nn.Module, samples: Samples) -> float:
    """The mean loss over these samples; the model is back in training mode afterwards."""
    model.eval()
    total = 0.0
    for x, y in zip(*(each.split(EVALUATION_BATCH) for each in samples), strict=True):
        total += loss_of(model(x), y).item() * len(y)
    model.train()
    return total / len(samples[1])


def peak_bytes() -> int:
    """The most memory that this process held, what it shares with others (libraries, buckets) counted by its share."""
    kib = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    others_kib = int(kib["Rss:"]) - int(kib["Pss:"])
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - others_kib) * 1024


@dataclass(kw_only=True)
class Record:
    """One rank's measurements, taken step by step and printed as one line of JSON.

    Each rank evaluates its share of the held-out data, without a word to the others, so that no collective is in the way;
    the mean over the ranks is the loss. The time it takes is left out of every step.
    """

    variant: str
    rank: int
    size: int
    args: argparse.Namespace
    before_model_bytes: int = field(default_factory=resident_bytes)
    ends_s: list[float] = field(default_factory=list)
    bytes_at: list[int] = field(default_factory=list)
    processor_at_s: list[tuple[float, float]] = field(default_factory=list)  # this thread, all threads
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    loss: float = float("nan")
    _paused_s: float = 0.0
    _held_out: Samples | None = None

    @property
    def workload(self) -> Workload:
        """What is trained."""
        return WORKLOADS[self.args.model]

    @property
    def num_steps(self) -> int:
        """Measured ones and those before."""
        return self.args.steps + self.args.warm_up

    @property
    def num_samples(self) -> int:
        """Of all steps and ranks."""
        return self.num_steps * self.size * self.workload.samples_per_rank

    def schedule(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """The workload's learning rates over this run; call its ``step()`` after each of the optimizer's."""
        return LambdaLR(optimizer, lambda step: self.workload.schedule(step / self.num_steps))

    def step_done(self, loss: Tensor, model: nn.Module) -> None:
        """A step ended (the optimizer's part included) on this rank's mean loss."""
        self.loss = loss.item()
        self.ends_s.append(time.monotonic() - self._paused_s)
        self.bytes_at.append(sent_bytes(self.args.interface))
        self.processor_at_s.append((time.thread_time(), time.process_time()))
        step = len(self.ends_s)
        if self.args.evaluate_every and (step % self.args.evaluate_every == 0 or step == self.num_steps):
            self._evaluate(step, model)

    def _evaluate(self, step: int, model: nn.Module) -> None:
        start = time.monotonic()
        if self._held_out is None and self.workload.validation is not None:
            x, y = self.workload.validation()
            self._held_out = x[self.rank :: self.size], y[self.rank :: self.size]
        if self._held_out is not None:
            self.curve.append((step, self.ends_s[-1] - self.ends_s[0], evaluate(model, self._held_out)))
        self._paused_s += time.monotonic() - start

    def report(self, model: nn.Module) -> None:
        """Say everything, in one line of JSON."""
        warm = self.args.warm_up
        ends = self.ends_s[warm - 1 :]
        training_s, all_s = (
            (after - before) / self.args.steps
            for before, after in zip(self.processor_at_s[warm - 1], self.processor_at_s[-1], strict=True)
        )
        line = {
            "variant": self.variant,
            "model": self.args.model,
            "rank": self.rank,
            "seed": self.args.seed,
            "interface": self.args.interface,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "step_s": [stop - start for start, stop in itertools.pairwise(ends)],
            "training_thread_s": training_s,
            "other_threads_s": max(0.0, all_s - training_s),
            "loss": self.loss,
            "curve": self.curve,
            "first_step_s": self.ends_s[0] - self.args.started,
            "before_model_bytes": self.before_model_bytes,
            "peak_bytes": peak_bytes(),
            "sent_bytes_per_step": (self.bytes_at[-1] - self.bytes_at[warm - 1]) / self.args.steps,
            "torch": torch.__version__,
        }
        if self.args.out is None:
            print(json.dumps(line), flush=True)
        else:
            (self.args.out / f"rank{self.rank}.json").write_text(json.dumps(line))
