"""All ranks do a thing, or all ranks hear which rank could not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from gradwire import errors
from gradwire.checkpoint.trees import Json
from gradwire.comm.text import all_gather_text
from gradwire.comm.world import World
from gradwire.core.mesh import AXES
from gradwire.errors import CheckpointError, GradwireError, PeerError


@dataclass(frozen=True)
class Together:
    """The ranks of a world at one call. verb: its name, for errors."""

    world: World
    verb: str

    def do(self, action: Callable[[], Json]) -> list[Json]:
        """Every rank's result, in rank order. If ``action`` raises on any rank, all raise, naming the ranks that failed.

        The error has the kind that they raised if it is one of gradwire's, else it is a CheckpointError.
        """
        result: Json = None
        problem: Exception | None = None
        try:
            result = action()
        except PeerError:
            raise
        except Exception as error:  # whatever it is, the other ranks wait
            problem = error
        told = json.dumps({"result": result, "kind": _kind(problem), "problem": _words(problem)})
        group = self.world.group(*AXES, channel="checkpoint")
        replies = [
            cast("dict[str, Json]", json.loads(text)) for text in all_gather_text(group, told, self.world.device)
        ]
        failed = {rank: str(reply["problem"]) for rank, reply in enumerate(replies) if reply["problem"]}
        if failed:
            kinds = {str(replies[rank]["kind"]) for rank in failed}
            kind = kinds.pop() if len(kinds) == 1 else ""
            raise (getattr(errors, kind) if kind in errors.__all__ else CheckpointError)(
                f"{self.verb}: {self._told(failed)}"
            ) from problem
        return [reply["result"] for reply in replies]

    def _told(self, failed: dict[int, str]) -> str:
        if len(failed) == self.world.size and len(set(failed.values())) == 1:
            return failed[0]
        return "; ".join(f"rank {rank}: {words}" for rank, words in failed.items())


def _kind(problem: Exception | None) -> str:
    name = type(problem).__name__
    return name if isinstance(problem, GradwireError) and name in errors.__all__ else CheckpointError.__name__


def _words(problem: Exception | None) -> str:
    if problem is None:
        return ""
    known = isinstance(problem, GradwireError | OSError)
    return str(problem) if known else f"{type(problem).__name__}: {problem}"
