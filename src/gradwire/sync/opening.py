"""`Opening`: the few numbers with which every exchange begins, so that ranks who disagree find out instead of mixing up."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from gradwire.comm.text import all_gather_text
from gradwire.core.group import Group
from gradwire.core.microbatch import Microbatch
from gradwire.errors import MismatchError, UsageError


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What one rank brings. Its buckets hold sum(count x gradient) / unit.

    count: of the whole window. unit: the total N, or with ``explicit`` counts (``gw.weight``) this rank's first one.
    microbatch: where the loop is; None without a loader. loaded: a digest of weights that the user has loaded since the
    last exchange; empty if there were none.
    """

    count: float
    unit: float
    explicit: bool
    microbatch: Microbatch | None
    loaded: str = ""

    @property
    def place(self) -> int:
        """A number below 2^20 that differs, almost surely, for another epoch, batch or micro-batch, or other loaded weights."""
        return zlib.crc32(f"{self.where} {self.loaded}".encode()) & 0xFFFFF

    @property
    def where(self) -> str:
        """For people."""
        micro = self.microbatch
        return "no loader" if micro is None else f"epoch {micro.epoch} batch {micro.step} micro-batch {micro.index}"


def agree_on_weights(opening: Opening, group: Group, device: torch.device) -> float | None:
    """One 40-byte all-reduce; returns what buckets are to be multiplied by, or None if they hold n_r/N g already.

    Raises, on all ranks, MismatchError if the ranks are at different batches or have loaded different weights, UsageError if
    only some called gw.weight.
    """
    known = not opening.explicit and opening.count > 0
    place = opening.place
    mine = torch.tensor(
        [opening.explicit, known, opening.count, place, place * place], dtype=torch.float64, device=device
    )
    num_explicit, num_known, count, places, squares = group.all_reduce(mine).tolist()
    if places * places != group.size * squares:  # equal only if all places are: Cauchy and Schwarz, exact below 2^53
        raise MismatchError(_difference(opening, group, device))
    if num_explicit and num_known:
        raise UsageError("gw.weight was called on some ranks only; call it on all, before each backward")
    if not num_explicit:
        return None
    return opening.unit / count if count else 0.0


def _difference(opening: Opening, group: Group, device: torch.device) -> str:
    """What differs between the ranks, and the cure; all of them call it."""
    wheres = all_gather_text(group, opening.where, device)
    other = next((rank for rank, where in enumerate(wheres) if where != wheres[0]), None)
    if other is not None:
        return (
            f"ranks train on different batches: rank 0 is at {wheres[0]}, rank {other} at {wheres[other]}; "
            "leave the loop (break, continue) on all ranks together"
        )
    loaded = all_gather_text(group, opening.loaded, device)
    other = next(rank for rank, digest in enumerate(loaded) if digest != loaded[0])
    without = next((rank for rank, digest in enumerate(loaded) if not digest), None)
    what = (
        f"ranks 0 and {other} have other weights" if without is None else f"rank {without}'s weights have not changed"
    )
    return (
        f"after load_state_dict {what}, so the ranks would train different models; load the same on all ranks, or before "
        "gw.distribute; each rank's own, after local steps, together with training.load_state_dict"
    )
