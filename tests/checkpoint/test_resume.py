"""After save and load, training goes on to the bit, under every way of agreeing."""

from __future__ import annotations

from functools import partial

import pytest

from gradwire.testing import run_ranks
from tests.checkpoint import resuming

SYNCS = [
    "exact",
    "q4",
    "delayed",
    "local:every=3,exact_steps=0,lr=0.7,momentum=0.5",
    "local:every=3,exact_steps=0,late=1",
]


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one_and_other_worlds_go_on(tmp_path):
    whole, again = (
        run_ranks(2, partial(script, syncs=SYNCS, folder=str(tmp_path)), processes=True)
        for script in (resuming.uninterrupted, resuming.resumed)
    )
    for place, sync in enumerate(SYNCS):
        for rank in range(2):
            assert again[rank][place] == whole[rank][place], f"{sync} on rank {rank}"
    for size, syncs in ((1, SYNCS[:4]), (3, [SYNCS[1], SYNCS[3]])):
        script = partial(resuming.elsewhere, syncs=syncs, folder=str(tmp_path))
        assert run_ranks(size, script, processes=True) == [[True] * len(syncs)] * size
