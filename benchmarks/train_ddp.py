"""PyTorch's own DistributedDataParallel on Gloo: the baseline. Ranks come from torchrun's variables."""

from __future__ import annotations

import argparse

import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.baselines import Hook, wrap
from benchmarks.measure import Record, parse, pin
from benchmarks.models import loss_of


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hook", type=Hook.parse, default=Hook(name="none"), help=Hook.ALLOWED)
    parser.add_argument("--bucket-cap-mb", type=float, help="default: DDP's own")


def _parts(steps: int, samples: int, rank: int, size: int) -> list[list[int]]:
    """Per step the rank's consecutive part of the global batch: what gradwire's even split gives it.

    DistributedSampler deals the samples in turn; BatchNorm, which sees one rank's part, would then see another one.
    """
    starts = [(step * size + rank) * samples for step in range(steps)]
    return [list(range(start, start + samples)) for start in starts]


def main() -> None:
    """Train and report."""
    args = parse(__doc__, _options)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    pin(rank)
    record = Record(variant="ddp", rank=rank, size=size, args=args)
    workload = record.workload
    data = workload.dataset(record.num_samples, args.seed)
    train = DataLoader(data, batch_sampler=_parts(record.num_steps, workload.samples_per_rank, rank, size))
    model = workload.model(args.seed)
    inner = workload.optimizer(model.parameters())
    schedule = record.schedule(inner)
    parallel, optimizer = wrap(model, inner, args.hook, bucket_cap_mb=args.bucket_cap_mb)
    for step, (x, y) in enumerate(train):
        if args.hook.keeps(step):
            with parallel.no_sync():
                loss = loss_of(parallel(x), y)
                (loss * args.hook.share).backward()
        else:
            loss = loss_of(parallel(x), y)
            (loss * args.hook.share).backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        record.step_done(loss, model)
    record.report(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
