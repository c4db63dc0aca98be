"""`TracedGroup`: stamps every collective and turns a broken one into an error that names the culprit."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from gradwire.core.group import Group, Op
from gradwire.errors import GradwireError, LaunchError, PeerError, UsageError
from gradwire.launch.verdict import Verdict

VERDICT_WAIT_S = 3.0


class Watch(Protocol):
    """Who is told where this rank is, and knows who failed (the heartbeat)."""

    def arrive(self, group: str, op: str, seq: int, ranks: tuple[int, ...] | None = None) -> None:
        """Collective ``seq`` of ``group`` begins on this rank. ranks: the group's, of the job; None: all."""
        ...

    def complete(self, group: str) -> None:
        """It ended."""
        ...

    def forget(self, group: str) -> None:
        """This rank has closed the group."""
        ...

    def verdict(self, wait_s: float) -> Verdict | None:
        """The coordinator's word on who failed, waited for at most ``wait_s``."""
        ...


class Unstamped:
    """Tells nobody: for ranks that nobody watches (threads, a world of one)."""

    def arrive(self, group: str, op: str, seq: int, ranks: tuple[int, ...] | None = None) -> None:
        return

    def complete(self, group: str) -> None:
        return

    def forget(self, group: str) -> None:
        return

    def verdict(self, wait_s: float) -> Verdict | None:
        return None


def blame(error: RuntimeError, watch: Watch, here: str) -> GradwireError:
    """The error that names who failed, for a rank that only met a broken connection. here: what this rank was doing."""
    if os.strerror(errno.EMFILE) in str(error):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return LaunchError(
            f"{here} when its process had no file descriptor left, of the {limit} it may have; start the job after "
            f"'ulimit -n {max(4 * limit, 65536)}', and close files and connections that are not needed any more"
        )
    verdict = watch.verdict(VERDICT_WAIT_S)
    if verdict is None:
        return PeerError(f"{here} when its connection broke, and nobody said why: {str(error).splitlines()[0]}")
    return PeerError(f"{verdict.headline} ({here})")


class TracedGroup:
    """Wraps a group; adds two attribute writes to a collective. ranks: its ranks in the job, None for all of them."""

    def __init__(self, inner: Group, watch: Watch, *, where: str, ranks: tuple[int, ...] | None = None) -> None:
        self._inner: Group | None = inner
        self._watch = watch
        self._where = where
        self._seq = 0
        self._ranks = ranks
        self.name = inner.name
        self.rank = inner.rank
        self.size = inner.size
        self.levels = inner.levels
        self.sums_in_rank_order = inner.sums_in_rank_order

    def close(self) -> None:
        """Let go of the connections and the memory, whoever still holds this object; no collective may be on its way."""
        levels, self.levels = self.levels, None
        for level in () if levels is None else (levels.inside, levels.between):
            if isinstance(level, TracedGroup):
                level.close()
        self._inner = None
        self._watch.forget(self.name)

    def _stamped(self, op: str) -> AbstractContextManager[None]:
        self._seq += 1
        return self._inside(op, self._seq)

    @contextmanager
    def _inside(self, op: str, seq: int) -> Generator[None]:
        self._watch.arrive(self.name, op, seq, self._ranks)
        try:
            yield
        except RuntimeError as error:  # what Gloo and NCCL raise for every broken connection
            raise blame(error, self._watch, f"{self._where} was in {op} #{seq} of {self.name}") from error
        finally:
            self._watch.complete(self.name)

    @property
    def _live(self) -> Group:
        if self._inner is None:
            raise UsageError(f"{self.name} is closed: its model was given to gw.distribute again, or is gone")
        return self._inner

    def new_zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with self._stamped("new_zeros"):  # memory that ranks share is made together
            return self._live.new_zeros(numel, dtype, device)

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> Tensor:
        with self._stamped("all_reduce"):
            return self._live.all_reduce(tensor, op)

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        with self._stamped("all_reduce"):
            pending = self._live.begin_all_reduce(tensor)
        seq = self._seq

        def wait() -> Tensor:
            with self._inside("all_reduce", seq):
                return pending()

        return wait

    def all_gather(self, tensor: Tensor) -> Tensor:
        with self._stamped("all_gather"):
            return self._live.all_gather(tensor)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        with self._stamped("reduce_scatter"):
            return self._live.reduce_scatter(tensor)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        with self._stamped("broadcast"):
            return self._live.broadcast(tensor, src)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        with self._stamped("all_to_all"):
            return self._live.all_to_all(tensor)

    def send(self, tensor: Tensor, dst: int) -> None:
        with self._stamped("send"):
            self._live.send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        with self._stamped("recv"):
            return self._live.recv(tensor, src)

    def barrier(self) -> None:
        with self._stamped("barrier"):
            self._live.barrier()
