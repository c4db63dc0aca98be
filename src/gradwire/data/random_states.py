"""Torch's generators, noted and set back, so that a resumed epoch draws its order again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from gradwire.errors import DataError


class RandomStates:
    """The generators that a sampler draws from, so that a resumed epoch draws its order again.

    With generators of the sampler's own, torch's default generator is left as it is found. Without, the order
    comes from the default one: it is set back for the draw, and then to where it stood at ``state()``.
    """

    def __init__(self, generators: list[torch.Generator]) -> None:
        self._default = not generators
        self._generators = generators or [torch.default_generator]
        self._start: list[str] = []
        self._restored: Mapping[str, object] | None = None
        self._then: torch.Tensor | None = None

    def state(self, *, mid_epoch: bool) -> Mapping[str, object]:
        if self._restored is not None:
            return self._restored
        now = [_hex(generator.get_state()) for generator in self._generators]
        return {"start": self._start if mid_epoch else now, "now": now}

    def restore(self, state: Mapping[str, object]) -> None:
        for name in ("start", "now"):
            found = state.get(name)
            if not isinstance(found, list) or len(cast("list[object]", found)) != len(self._generators):
                raise DataError(
                    f"the state's {name!r} does not hold {len(self._generators)} generator states; "
                    "give the sampler its generator as when the state was taken"
                )
        self._restored = state

    def at_start(self) -> None:
        """An epoch begins: set the generators back if a state was restored; note where they stand."""
        if self._restored is not None:
            now = cast("list[str]", self._restored["now"])
            self._then = _tensor(now[0]) if self._default else torch.get_rng_state()
            for generator, start in zip(self._generators, cast("list[str]", self._restored["start"]), strict=True):
                generator.set_state(_tensor(start))
            if self._restored["start"] == now and self._default:
                self._then = None  # at the border of two epochs nothing was drawn yet
            self._restored = None
        self._start = [_hex(generator.get_state()) for generator in self._generators]

    def go_on(self) -> None:
        """The order is drawn up to where the state was taken."""
        if self._then is not None:
            torch.set_rng_state(self._then)
            self._then = None


def _hex(state: torch.Tensor) -> str:
    return bytes(state.numpy()).hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)


@runtime_checkable
class _Draws(Protocol):
    generator: object


def generators_of(loader: TorchDataLoader[Any]) -> list[torch.Generator]:
    """The generators of the loader, its batch sampler and its sampler, each once."""
    plain = cast("Any", loader)
    holders: list[object] = [plain, plain.batch_sampler, plain.sampler]
    held = [holder.generator for holder in holders if isinstance(holder, _Draws)]
    found = {id(generator): generator for generator in held if isinstance(generator, torch.Generator)}
    return list(found.values())
