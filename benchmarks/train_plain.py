"""One process, plain PyTorch: the baseline for gradwire on one worker."""

from __future__ import annotations

from torch.utils.data import DataLoader

from benchmarks.measure import SEED, Record, optimizer_for, parse, pin
from benchmarks.models import loss_of


def main() -> None:
    """Train and report."""
    args = parse(__doc__)
    pin(0)
    record = Record(variant="plain", rank=0, args=args)
    workload = record.workload
    data = workload.dataset(record.num_steps * workload.samples_per_rank, SEED)
    train = DataLoader(data, batch_size=workload.samples_per_rank, shuffle=False)
    model = workload.model(SEED)
    optimizer = optimizer_for(model)
    for x, y in train:
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record.step_done(loss)
    record.report(model)


if __name__ == "__main__":
    main()
