"""One process, plain PyTorch: the baseline for gradwire on one worker, and what no network at all would give."""

from __future__ import annotations

import os

from torch.utils.data import DataLoader

from benchmarks.measure import Record, parse, pin
from benchmarks.models import loss_of


def main() -> None:
    """Train and report. RANK only tells the core and the name of the report: each process trains by itself."""
    args = parse(__doc__)
    rank = int(os.environ.get("RANK", "0"))
    pin(rank)
    record = Record(variant="plain", rank=rank, size=1, args=args)
    workload = record.workload
    data = workload.dataset(record.num_samples, args.seed)
    train = DataLoader(data, batch_size=workload.samples_per_rank, shuffle=False)
    model = workload.model(args.seed)
    optimizer = workload.optimizer(model.parameters())
    schedule = record.schedule(optimizer)
    for x, y in train:
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        record.step_done(loss, model)
    record.report(model)


if __name__ == "__main__":
    main()
