"""The random generators of a process: Python's, NumPy's, torch's, and those of its CUDA device."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gradwire.errors import UsageError


def note() -> dict[str, object]:
    """Where they stand: plain values and tensors."""
    version, words, gauss = random.getstate()
    states: dict[str, object] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),  # the global one is what users' code draws from
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_back(states: Mapping[str, object]) -> None:
    """Set them to where they stood at `note`. Raises UsageError for a state that is not one."""
    try:
        python = cast("Mapping[str, Any]", states["python"])
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        np.random.set_state(cast("Any", states["numpy"]))
        torch.set_rng_state(cast("Tensor", states["torch"]))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(cast("Tensor", states["cuda"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"the random generators' states do not fit here ({error}); load with the same versions"
        ) from error
