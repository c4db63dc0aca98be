"""The public testing kit: ranks as threads or processes, broken groups, and one conformance check per contract."""

from __future__ import annotations

from gradwire.testing.checks import check_group
from gradwire.testing.compressors import check_compressor
from gradwire.testing.faulty import FaultyGroup, InjectedFault, SlowGroup
from gradwire.testing.ranks import RankError, run_ranks
from gradwire.testing.reducers import check_reducer
from gradwire.testing.source import ListSource

__all__ = [
    "FaultyGroup",
    "InjectedFault",
    "ListSource",
    "RankError",
    "SlowGroup",
    "check_compressor",
    "check_group",
    "check_reducer",
    "run_ranks",
]
