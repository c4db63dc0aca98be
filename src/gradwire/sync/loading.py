"""`Loading`: weights that the user loads into a model which is being trained already."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from gradwire.comm.dtensor import local_of
from gradwire.errors import UsageError


class Loading:
    """Notices that ``load_state_dict`` of the model, or of a part of it, has changed weights after ``gw.distribute``.

    The next exchange then opens with a digest of them, so that ranks which loaded different weights, or only some of which
    did, find out. Weights that are put back before training goes on (a test with averaged ones) were never away.
    alike: whether all ranks hold the same weights; where each holds rows of its own only who has loaded is told.
    on_load: told of the parameters that were loaded, when training goes on.
    """

    def __init__(self, modules: Iterable[nn.Module], *, alike: bool = True) -> None:
        self._alike = alike
        self.on_load: Callable[[Sequence[nn.Parameter]], None] | None = None
        self._before: dict[tuple[nn.Parameter, ...], int] = {}
        self._digest = ""
        self._removes: list[Callable[[], None]] = []
        for module in modules:
            if next(module.parameters(recurse=False), None) is not None:
                self._removes.append(module.register_load_state_dict_pre_hook(self._loads).remove)
                self._removes.append(module.register_load_state_dict_post_hook(self._loaded).remove)

    def close(self) -> None:
        """Look no longer."""
        for remove in self._removes:
            remove()
        self._before.clear()
        self.on_load = None

    def _loads(self, module: nn.Module, *_: object) -> None:
        params = tuple(module.parameters(recurse=False))
        if params not in self._before:
            self._before[params] = _crc(params)

    def _loaded(self, module: nn.Module, keys: object) -> None:
        if tuple(module.parameters(recurse=False)) not in self._before:
            raise UsageError(
                "load_state_dict(assign=True) replaces the parameters that gw.distribute and the optimizer hold, which then "
                "train nothing; load without assign=True, or before the optimizer is made and gw.distribute called"
            )

    def resumed(self) -> None:
        """This rank has gone on from a state that it kept: what it loaded may be its own."""
        self._before.clear()

    def take_up(self) -> None:
        """Training goes on."""
        changed = [params for params, crc in self._before.items() if _crc(params) != crc]
        self._before.clear()
        for params in changed:
            self._digest = f"{_crc(params, int(self._digest or '0', 16)):08x}" if self._alike else "rows"
            if self.on_load is not None:
                self.on_load(params)

    def take(self) -> str:
        """The digest of what has changed since the last exchange; empty if nothing has."""
        self.take_up()
        digest, self._digest = self._digest, ""
        return digest


def _crc(params: Sequence[nn.Parameter], crc: int = 0) -> int:
    for param in params:
        flat: Tensor = local_of(param).detach().contiguous().cpu().flatten()
        crc = zlib.crc32(flat.view(torch.uint8).numpy().data, crc)
    return crc
