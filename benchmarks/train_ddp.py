"""PyTorch's own DistributedDataParallel on Gloo: the baseline. Ranks come from torchrun's variables."""

from __future__ import annotations

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from benchmarks.measure import SEED, Record, optimizer_for, parse, pin
from benchmarks.models import loss_of


def _parts(steps: int, samples: int, rank: int, size: int) -> list[list[int]]:
    """Per step the rank's consecutive part of the global batch: what gradwire's even split gives it.

    DistributedSampler deals the samples in turn; BatchNorm, which sees one rank's part, would then see another one.
    """
    starts = [(step * size + rank) * samples for step in range(steps)]
    return [list(range(start, start + samples)) for start in starts]


def main() -> None:
    """Train and report."""
    args = parse(__doc__)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    pin(rank)
    record = Record(variant="ddp", rank=rank, args=args)
    workload = record.workload
    data = workload.dataset(record.num_steps * size * workload.samples_per_rank, SEED)
    train = DataLoader(data, batch_sampler=_parts(record.num_steps, workload.samples_per_rank, rank, size))
    model = workload.model(SEED)
    parallel = (
        DistributedDataParallel(model)
        if args.bucket_cap_mb is None
        else DistributedDataParallel(model, bucket_cap_mb=args.bucket_cap_mb)
    )
    optimizer = optimizer_for(model)
    for x, y in train:
        loss = loss_of(parallel(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record.step_done(loss)
    record.report(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
