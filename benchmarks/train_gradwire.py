"""The same training by gradwire, on however many workers the launcher started."""

from __future__ import annotations

import argparse

import gradwire as gw
from benchmarks.measure import Record, parse, pin
from benchmarks.models import loss_of


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sync", default="exact", help="as Plan(sync=...) takes it: q4, local:every=8,codec=q4, ...")
    parser.add_argument("--bucket-bytes", type=int, help="default: measured")


def main() -> None:
    """Train and report."""
    args = parse(__doc__, _options)
    plan = gw.Plan(sync=args.sync, bucket_bytes=args.bucket_bytes)
    with gw.init() as world:
        pin(world.rank)
        record = Record(variant="gradwire", rank=world.rank, size=world.size, args=args)
        workload = record.workload
        data = workload.dataset(record.num_samples, args.seed)
        train = gw.DataLoader(data, batch_size=world.size * workload.samples_per_rank, shuffle=False)
        model = workload.model(args.seed)
        optimizer = workload.optimizer(model.parameters())
        schedule = record.schedule(optimizer)
        gw.distribute(model, optimizer, train, plan=plan)
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
