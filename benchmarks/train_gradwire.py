"""The same training by gradwire, on however many workers the launcher started."""

from __future__ import annotations

import gradwire as gw
from benchmarks.measure import SEED, Record, optimizer_for, parse, pin
from benchmarks.models import loss_of


def main() -> None:
    """Train and report."""
    args = parse(__doc__)
    with gw.init() as world:
        pin(world.rank)
        record = Record(variant="gradwire", rank=world.rank, args=args)
        workload = record.workload
        data = workload.dataset(record.num_steps * world.size * workload.samples_per_rank, SEED)
        train = gw.DataLoader(data, batch_size=world.size * workload.samples_per_rank, shuffle=False)
        model = workload.model(SEED)
        optimizer = optimizer_for(model)
        plan = None if args.bucket_bytes is None else gw.Plan(bucket_bytes=args.bucket_bytes)
        gw.distribute(model, optimizer, train, plan=plan)
        for x, y in train:
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            record.step_done(loss)
        record.report(model)


if __name__ == "__main__":
    main()
