"""Nested dicts and lists of plain values and tensors, as JSON that refers to the tensors by name, and back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from gradwire.errors import UsageError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def to_json(value: object, name: str, tensors: MutableMapping[str, Tensor]) -> Json:
    """``value`` as JSON; its tensors go into ``tensors`` under ``name`` and their path.

    What JSON lacks is a dict of one key: ``{"$tensor": name}``, ``$array`` (NumPy's), ``$float`` (inf, nan), ``$tuple``,
    ``$dict`` (keys that are no text, as pairs), ``$counter``. Raises UsageError, naming the path, for anything else.

    >>> found = {}
    >>> to_json({"step": 3, "betas": (0.9, 0.99), "window": {0: torch.zeros(2)}}, "a", found)
    {'step': 3, 'betas': {'$tuple': [0.9, 0.99]}, 'window': {'$dict': [[0, {'$tensor': 'a.window.0'}]]}}
    >>> list(found)
    ['a.window.0']
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Tensor | np.ndarray):
        if name in tensors:
            raise UsageError(f"two tensors would be stored as {name}; rename one of the keys it is made of")
        tensors[name] = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        return {"$tensor" if isinstance(value, Tensor) else "$array": name}
    if isinstance(value, Mapping):
        return _mapping(cast("Mapping[object, object]", value), name, tensors)
    if isinstance(value, list | tuple):
        items = enumerate(cast("list[object]", value))
        listed: list[Json] = [to_json(item, f"{name}.{place}", tensors) for place, item in items]
        return listed if isinstance(value, list) else {"$tuple": listed}
    raise UsageError(
        f"{name} is a {type(value).__name__}; a checkpoint holds tensors, numbers, texts, None, and lists and dicts of them: "
        "leave it out of state_dict(), or turn it into those"
    )


def _mapping(value: Mapping[object, object], name: str, tensors: MutableMapping[str, Tensor]) -> Json:
    plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if plain and not isinstance(value, Counter):
        return {str(key): to_json(item, f"{name}.{key}", tensors) for key, item in value.items()}
    pairs: list[Json] = []
    for key, item in value.items():
        pairs.append([to_json(key, f"a key of {name}", {}), to_json(item, f"{name}.{key}", tensors)])
    return {"$counter" if isinstance(value, Counter) else "$dict": pairs}


def from_json(value: Json, tensor: Callable[[str], Tensor]) -> object:
    """What `to_json` was given. tensor: name -> the tensor.

    >>> from_json({"$dict": [[0, {"$tuple": [1, {"$tensor": "a"}]}]]}, lambda name: torch.zeros(2))
    {0: (1, tensor([0., 0.]))}
    """
    if isinstance(value, list):
        return [from_json(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (word := next(iter(value))).startswith("$"):
        return {key: from_json(item, tensor) for key, item in value.items()}
    inside = value[word]
    if word in ("$tensor", "$array"):
        found = tensor(str(inside))
        return found if word == "$tensor" else found.numpy()
    if word == "$float":
        return float(str(inside))
    parts = cast("list[object]", from_json(inside, tensor))
    if word == "$tuple":
        return tuple(parts)
    pairs = dict(cast("list[tuple[object, object]]", parts))
    return Counter(cast("dict[object, int]", pairs)) if word == "$counter" else pairs
