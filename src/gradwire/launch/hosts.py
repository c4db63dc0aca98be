"""Launchers of several hosts agree on ranks, token and store address at `--rendezvous`; one host goes the same way."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.errors import LaunchError
from gradwire.launch.gathering import Assignment, Node
from gradwire.launch.proof import connect
from gradwire.launch.verdict import number_list
from gradwire.launch.wire import Channel, get_text

__all__ = ["Meeting", "derived_token", "join"]

PROGRESS_S, PROGRESS_EVERY_S = 5.0, 30.0
RETRY_S = 0.2


def derived_token(*, rendezvous: tuple[str, int], nodes: int, program: bytes, arguments: Sequence[str]) -> str:
    """The token of a job without GRADWIRE_TOKEN: equal on all its nodes, different for another job.

    It keeps accidents apart (two jobs, one port); whoever knows the script can compute it, so it is no secret.
    """
    facts = json.dumps([*rendezvous, nodes, hashlib.sha256(program).hexdigest(), *arguments])
    return hashlib.sha256(facts.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where and how long to wait for the others.

    address: node 0's coordinator. pause: waits some seconds, and raises if this launcher is told to end.
    missing: the node ranks that have not come; only node 0 knows. report: gets progress lines.
    """

    address: tuple[str, int]
    token: str
    timeout_s: float
    pause: Callable[[float], None]
    report: Callable[[str], None]
    missing: Callable[[], list[int]] | None = None


def join(node: Node, meeting: Meeting) -> tuple[Channel, Assignment]:
    """Join the job as `node`; returns when all nodes have. Raises LaunchError if refused or after the timeout."""
    patience = _Patience(meeting)
    channel = _reach(meeting, patience)
    try:
        channel.send(node.message())
        return channel, _await_start(channel, meeting, patience)
    except OSError as error:
        channel.close()
        raise LaunchError(
            f"node 0 at {_where(meeting)} went away before the start ({error}): start it again"
        ) from error
    except BaseException:
        channel.close()
        raise


class _Patience:
    """A deadline that says what is being waited for, after 5 s and then every 30 s."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._start = time.monotonic()
        self._next_line = self._start + PROGRESS_S

    def wait(self, what: str, cure: str) -> None:
        now = time.monotonic()
        if now - self._start > self._meeting.timeout_s:
            raise LaunchError(f"still {what} after {self._meeting.timeout_s:g} s (--join-timeout): {cure}")
        if now >= self._next_line:
            self._next_line = now + PROGRESS_EVERY_S
            self._meeting.report(f"{what} ({now - self._start:.0f} s of {self._meeting.timeout_s:g} s)")
        self._meeting.pause(RETRY_S)


def _where(meeting: Meeting) -> str:
    return f"{meeting.address[0]}:{meeting.address[1]}"


def _reach(meeting: Meeting, patience: _Patience) -> Channel:
    while True:
        try:
            return connect(meeting.address, meeting.token)
        except OSError as error:
            patience.wait(
                f"waiting for node 0 at {_where(meeting)} ({error.strerror or error})",
                "start node 0 there, correct --rendezvous, or open the port in its firewall",
            )


def _await_start(channel: Channel, meeting: Meeting, patience: _Patience) -> Assignment:
    while True:
        messages = channel.receive(0.0)
        if messages is None:
            raise LaunchError(f"node 0 at {_where(meeting)} went away before the start: see its output, start it again")
        for message in messages:
            if message["kind"] == "refused":
                raise LaunchError(f"{_where(meeting)} refuses this node: {get_text(message, 'reason')}")
            if message["kind"] == "start":
                return Assignment.parse(message)
        missing = meeting.missing() if meeting.missing else []
        others = number_list(missing).replace("rank", "node rank", 1) if missing else "the other nodes"
        command = f"gradwire run --node-rank {missing[0] if missing else 'K'} --rendezvous {_where(meeting)} ..."
        patience.wait(f"waiting for {others} to join at {_where(meeting)}", f"start each on its host: {command}")
