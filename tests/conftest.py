"""One torch thread: ranks are threads here, and two cores are shared by all of them."""

from __future__ import annotations

import signal

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_is_heard() -> None:
    """A shell's background job inherits an ignored SIGINT, and so would the launchers that tests interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
