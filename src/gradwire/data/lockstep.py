"""What ranks must agree on while reading: whose data is left (``Local``), and that all drew the same order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from typing import cast

import torch

from gradwire.core.group import Group
from gradwire.core.partition import Partition
from gradwire.data.turns import Turn
from gradwire.errors import DataError, MismatchError

BLOCK = 1024  # batches per comparison of orders: usually the whole epoch, and an endless sampler still works

NEVER = -1  # a rank's count of samples in a window when it never had any

Pair = tuple[Turn, object]


def agree(pairs: Iterator[Pair], group: Group, accumulate: int) -> Iterator[Pair]:
    """Windows of all ranks in lockstep: goes on while any rank has a sample, and fills in the global counts.

    pairs: this rank's turns with their data, ``accumulate`` a window, stand-ins once its samples are used up.
    One all_gather of 8 bytes a window. Raises DataError, on all ranks, naming a rank that has no sample at all.
    """
    while True:
        first = next(pairs, None)
        counts = _of_all(group, first[0].own if first else NEVER)
        if NEVER in counts:
            raise _no_sample(counts.index(NEVER))
        if first is None or not any(counts):
            return
        total = min(accumulate, max(counts))
        sizes = [Partition.even(count, accumulate).sizes for count in counts]
        for index in range(accumulate):
            pair = first if index == 0 else next(pairs)
            if index < total:
                yield _counted(pair, total, sum(of_rank[index] for of_rank in sizes), sum(counts))


def _no_sample(rank: int) -> DataError:
    return DataError(
        f"rank {rank} has no sample at all; under Local() every rank needs at least one: check that rank's files, "
        "or start without it"
    )


def _counted(pair: Pair, total: int, global_samples: int, window_samples: int) -> Pair:
    turn, data = pair
    micro = replace(turn.micro, total=total, global_samples=global_samples, window_samples=window_samples)
    return replace(turn, micro=micro), data


def agreed_order(batches: Iterator[list[int]], group: Group, epoch: int) -> Iterator[list[int]]:
    """``batches`` unchanged, once all ranks are known to have drawn the same.

    One all_gather of 8 bytes per 1024 batches. Raises MismatchError, on all ranks, naming the ranks that differ.
    """
    while True:
        block = list(islice(batches, BLOCK))
        digest = blake2b(repr(block).encode(), digest_size=8).digest()
        _compare(_of_all(group, int.from_bytes(digest, "big", signed=True)), epoch)
        yield from block
        if len(block) < BLOCK:
            return


def _of_all(group: Group, mine: int) -> list[int]:
    """Every rank's number (64 bits), in rank order."""
    return cast("list[int]", group.all_gather(torch.tensor([mine])).flatten().tolist())  # pyright: ignore


def _compare(digests: list[int], epoch: int) -> None:
    usual = max(digests, key=digests.count)
    odd = [rank for rank, digest in enumerate(digests) if digest != usual]
    if odd:
        raise MismatchError(
            f"ranks {digests.index(usual)} and {odd[0]} drew different samples for epoch {epoch} (orders "
            f"{usual & (2**64 - 1):016x} and {digests[odd[0]] & (2**64 - 1):016x}); samplers must draw alike "
            "on all ranks: seed all ranks alike before iterating: torch.manual_seed(0), or use gw.DataLoader"
        )
