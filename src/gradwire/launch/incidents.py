"""Hangs over time: each is asked about, reported once, and taken back when its rank is back."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.launch.actions import Action, AskStack, Warn
from gradwire.launch.hang import Hang, Member, find_hangs
from gradwire.launch.verdict import Verdict, stack_text

__all__ = ["Incidents"]

STACK_WAIT_S = 1.0
SILENT_S = 5.0


@dataclass(kw_only=True)
class _Incident:
    hang: Hang
    asked_at: float
    reported: bool = False


class Incidents:
    """The open hangs of a roster's `members`; no I/O.

    hang_s: a longer wait (and than 3 usual steps) is reported; timeout_s: a longer one is a verdict.
    """

    def __init__(self, members: dict[int, Member], *, hang_s: float, timeout_s: float) -> None:
        self._members = members
        self._hang_s, self._timeout_s = min(hang_s, timeout_s), timeout_s
        self._open: list[_Incident] = []
        self._stacks: dict[int, str] = {}

    def answer(self, rank: int, text: str) -> None:
        """The stacks that `rank` was asked for."""
        self._stacks[rank] = text

    def watch(self, now: float) -> list[Action]:
        """Open, report and close incidents."""
        hangs = self._hangs(now)
        actions = self._close(hangs, now)
        for hang in hangs:
            if not any(_same(incident.hang, hang) for incident in self._open):
                self._open.append(_Incident(hang=hang, asked_at=now))
                for rank in hang.culprits:
                    self._stacks.pop(rank, None)
                    actions.extend([AskStack(rank=rank)] if self._members[rank].heard_at is not None else [])
        return actions + self._report(now)

    def overdue(self, now: float) -> Verdict | None:
        """The verdict on a hang that has lasted longer than the timeout."""
        for hang in self._hangs(now):
            if now - hang.since > self._timeout_s:
                member = self._members[hang.culprits[0] if hang.culprits else hang.waiter or 0]
                return Verdict(
                    rank=member.rank,
                    host=member.host,
                    step=member.step,
                    headline=f"{hang.headline(self._members, now)} (timeout {self._timeout_s:g} s)",
                    cure=hang.cure(self._members),
                    detail="\n".join(self._where(rank, now) for rank in hang.culprits),
                )
        return None

    def _hangs(self, now: float) -> list[Hang]:
        return find_hangs(self._members, now, hang_s=self._hang_s, silent_s=max(SILENT_S, self._hang_s))

    def _close(self, hangs: list[Hang], now: float) -> list[Action]:
        over = [incident for incident in self._open if not any(_same(incident.hang, hang) for hang in hangs)]
        self._open = [incident for incident in self._open if incident not in over]
        return [Warn(text=self._back(incident.hang, now)) for incident in over if incident.reported]

    def _report(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for incident in self._open:
            answered = all(rank in self._stacks for rank in incident.hang.culprits)
            if not incident.reported and (answered or now - incident.asked_at >= STACK_WAIT_S):
                incident.reported = True
                wheres = [self._where(rank, now) for rank in incident.hang.culprits]
                actions.append(Warn(text="\n".join([incident.hang.headline(self._members, now), *wheres])))
        return actions

    def _where(self, rank: int, now: float) -> str:
        member = self._members[rank]
        if member.heard_at is None:
            return f"rank {rank} has not called gradwire.init() yet"
        if rank in self._stacks and not member.suspended:
            return f"rank {rank} (pid {member.pid}) is at (most recent call last):\n{self._stacks[rank]}"
        state = "process is stopped (SIGSTOP), kill -CONT resumes it; " if member.suspended else "no answer; "
        seen = f"last seen {now - member.heard_at:.1f} s ago at (most recent call last):\n{stack_text(member.stack)}"
        return f"rank {rank} (pid {member.pid}): {state}{seen}"

    def _back(self, hang: Hang, now: float) -> str:
        if not hang.culprits and hang.waiting is not None:
            return f"{hang.waiting.op} #{hang.waiting.seq} of {hang.waiting.group} ended after {now - hang.since:.1f} s"
        names = ", ".join(self._members[rank].who for rank in hang.culprits)
        return f"{names} {'is' if len(hang.culprits) == 1 else 'are'} back after {now - hang.since:.1f} s"


def _same(one: Hang, other: Hang) -> bool:
    if one.culprits or other.culprits:
        return bool(set(one.culprits) & set(other.culprits))
    return (one.waiting and one.waiting.group) == (other.waiting and other.waiting.group)
