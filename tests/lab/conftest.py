"""Tests over several hosts on one machine. Skipped, with the reason, where a lab cannot be built."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lab import why_not

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.lab)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
