"""The job's state machine, without I/O: what ranks and launchers say and clock ticks in, actions out.

A failure becomes a *suspicion* with a due time, so that a cause which is reported a moment after its victims still
comes first: a victim's report waits 0.5 s for a cause, a closed connection waits for the launcher's word on the exit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.launch.actions import Action, Beat, Done, Refuse, Release, Stop
from gradwire.launch.hang import Member, Waiting, about_step
from gradwire.launch.incidents import Incidents
from gradwire.launch.verdict import Exit, Verdict, at_step, last_line, stack_text

__all__ = ["Roster"]

VICTIM_WAIT_S, EXIT_WAIT_S, CODE_WAIT_S, LEAVE_WAIT_S = 0.5, 0.3, 0.2, 0.8
EXIT_WAIT_WITH_LAUNCHER_S = 2.0  # the launcher's word comes within milliseconds of the end of the process
MAYBE_VICTIM_SIGNALS = (6, 13, 15)  # abort, broken pipe, SIGTERM
KILLED, FAILED, VICTIM = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class _Suspicion:
    """weight: KILLED, FAILED or VICTIM; the lightest and then the earliest is the cause, once it is due.

    said: the rank named its failure itself, so that nothing more is to be learnt from how it ends.
    """

    weight: int
    at: float
    due: float
    verdict: Callable[[], Verdict]
    said: bool = False


class Roster:
    """All ranks of a job. Every method takes `now` (monotonic seconds) and returns what is to be done.

    hang_s: a longer wait (and than 3 usual steps) is reported; timeout_s: a longer one stops the job.
    launchers: a launcher on each host reports how processes end, so a closed connection waits for its word.
    """

    def __init__(
        self, world_size: int, *, hang_s: float = 5.0, timeout_s: float = 300.0, launchers: bool = True
    ) -> None:
        self.members = {rank: Member(rank=rank) for rank in range(world_size)}
        self.verdict: Verdict | None = None
        self.released = False
        self._done = False
        self._exit_wait_s = EXIT_WAIT_WITH_LAUNCHER_S if launchers else EXIT_WAIT_S
        self._suspicions: dict[int, _Suspicion] = {}
        self._exited: set[int] = set()
        self._incidents = Incidents(self.members, hang_s=hang_s, timeout_s=timeout_s)

    def hello(self, rank: int, host: str, pid: int, now: float) -> list[Action]:
        """A worker connects. A second one of the same rank, or one outside the world, is refused."""
        member = self.members.get(rank)
        if member is None:
            return [Refuse(reason=f"rank {rank} is outside this job of {len(self.members)} ranks")]
        if member.heard_at is not None:
            return [Refuse(reason=f"rank {rank} is taken by pid {member.pid} on {member.host}: start each rank once")]
        member.host, member.pid, member.heard_at = host, pid, now
        return []

    def placed(self, rank: int, host: str, pid: int) -> None:
        """A launcher has started the process of `rank`."""
        self.members[rank].host, self.members[rank].pid = host, pid

    def beat(self, rank: int, beat: Beat, now: float) -> list[Action]:
        """A rank says where it is."""
        member = self.members[rank]
        member.heard_at, member.step, member.step_s = now, beat.step, beat.step_s
        member.arrived, member.waiting = dict(beat.arrived), list(beat.waiting)
        member.stack = list(beat.stack) or member.stack
        member.suspended = False
        return self.tick(now)

    def fail(self, rank: int, text: str, now: float, *, victim: bool = False) -> list[Action]:
        """An exception ends a rank; `text` is its traceback. victim: it only met another rank's failure."""
        what = f"failed{at_step(self.members[rank].step)}: {last_line(text)}"
        weight, wait_s = (VICTIM, VICTIM_WAIT_S) if victim else (FAILED, 0.0)
        suspicion = _Suspicion(
            weight=weight,
            at=now,
            due=now + wait_s,
            said=True,
            verdict=lambda: self._verdict(rank, what, detail=text),
        )
        return self._suspect(rank, suspicion, now)

    def leave(self, rank: int, reason: str | None, now: float, *, exit_code: int = 0) -> list[Action]:
        """A rank ended by itself: its script came to its end, or `reason` says how else."""
        member = self.members[rank]
        if member.left_at is None:
            member.left_at, member.left_how, member.waiting = now, reason or "its script ended", []
            member.left_code = exit_code
        return self.tick(now)

    def lost(self, rank: int, now: float) -> list[Action]:
        """A worker's connection closed."""
        member = self._gone(rank)
        if rank in self._exited or member.left_at is not None:
            return self.tick(now)
        what = f"ended without a word{about_step(member, self.members)} (killed, os._exit, or its host is gone)"
        suspicion = _Suspicion(
            weight=FAILED,
            at=now,
            due=now + self._exit_wait_s,
            verdict=lambda: self._verdict(rank, what, detail=self._seen(rank)),
        )
        return self._suspect(rank, suspicion, now)

    def exited(self, rank: int, exit: Exit, now: float) -> list[Action]:
        """A launcher saw a worker process end."""
        member = self._gone(rank)
        self._exited.add(rank)
        known = self._suspicions.get(rank)
        if known is not None and known.said:
            return self.tick(now)
        self._suspicions.pop(rank, None)
        if exit.code == 0:
            return self.leave(rank, "exit code 0", now)
        killed = exit.code < 0 and -exit.code not in MAYBE_VICTIM_SIGNALS
        at = now if known is None else known.at
        what = exit.describe(about_step(member, self.members))
        weight, due = (KILLED, now) if killed else (FAILED, now + CODE_WAIT_S)
        suspicion = _Suspicion(weight=weight, at=at, due=due, verdict=lambda: self._ended(rank, what, exit))
        return self._suspect(rank, suspicion, now)

    def node_lost(self, ranks: Sequence[int], what: str, now: float, *, exit_code: int = 1) -> list[Action]:
        """The launcher of some ranks is gone; `what` says which and how. Ranks that have exited do not count."""
        rest = [rank for rank in ranks if rank not in self._exited]
        for rank in rest:
            self._gone(rank)
            self._suspicions.pop(rank, None)
        if not rest:
            return self.tick(now)
        member = self.members[rest[0]]
        verdict = Verdict(rank=rest[0], host=member.host, step=member.step, headline=what, exit_code=exit_code)
        return self._suspect(rest[0], _Suspicion(weight=KILLED, at=now, due=now, verdict=lambda: verdict), now)

    def suspended(self, rank: int, suspended: bool) -> None:
        """A launcher sees that the process is stopped (state T), or is not any more."""
        self.members[rank].suspended = suspended

    def stacks(self, rank: int, text: str, now: float) -> list[Action]:
        """A rank's answer to AskStack."""
        self.members[rank].heard_at = now
        self._incidents.answer(rank, text)
        return self.tick(now)

    def tick(self, now: float) -> list[Action]:
        """What the time alone, or the last news, calls for. Nothing after a verdict or the end of all processes."""
        if self.verdict is not None or self._done:
            return []
        self.verdict = self._conclude(now) or self._missed(now) or self._incidents.overdue(now)
        if self.verdict is not None:
            return [Stop(verdict=self.verdict)]
        return [*self._incidents.watch(now), *self._finish()]

    def _gone(self, rank: int) -> Member:
        member = self.members[rank]
        member.gone, member.waiting = True, []
        return member

    def _suspect(self, rank: int, suspicion: _Suspicion, now: float) -> list[Action]:
        known = self._suspicions.get(rank)
        if known is None or (suspicion.said and not known.said):  # what a rank says itself tells more
            self._suspicions[rank] = suspicion
        return self.tick(now)

    def _conclude(self, now: float) -> Verdict | None:
        if not self._suspicions:
            return None
        cause = min(self._suspicions.values(), key=lambda suspicion: (suspicion.weight, suspicion.at))
        return cause.verdict() if cause.due <= now else None

    def _missed(self, now: float) -> Verdict | None:
        """A rank left while another waits in a collective that it will never join."""
        for left in self.members.values():
            if left.left_at is None:
                continue
            for waiter in self.members.values():
                for waiting in waiter.waiting if waiter.alive else ():
                    settled = now - max(left.left_at, waiting.since) > LEAVE_WAIT_S
                    if settled and waiting.misses(left):
                        return self._left(left, waiter, waiting)
        return None

    def _finish(self) -> list[Action]:
        actions: list[Action] = []
        if not self.released and all(member.left_at is not None for member in self.members.values()):
            self.released = True
            actions.append(Release())
        if self.released and len(self._exited) == len(self.members) and not self._suspicions:
            self._done = True
            actions.append(Done())
        return actions

    def _verdict(self, rank: int, what: str, *, detail: str = "", cure: str = "", exit_code: int = 1) -> Verdict:
        member = self.members[rank]
        pid = "" if member.pid is None else f" (pid {member.pid})"
        return Verdict(
            rank=rank,
            host=member.host,
            step=member.step,
            headline=f"{member.who} {what}{pid}",
            cure=cure,
            detail=detail,
            exit_code=exit_code,
        )

    def _ended(self, rank: int, what: str, exit: Exit) -> Verdict:
        tail = "" if exit.shown or not exit.tail.strip() else f"last lines of rank {rank}'s stderr:\n{exit.tail}"
        return self._verdict(rank, what, detail=tail, cure=exit.cure(), exit_code=exit.exit_code())

    def _left(self, left: Member, waiter: Member, waiting: Waiting) -> Verdict:
        wait = f"{waiter.who} waits in {waiting.op} #{waiting.seq} of {waiting.group}"
        what = f"left{at_step(left.step)} ({left.left_how}) while {wait}"
        if left.left_code:
            return self._verdict(left.rank, what, exit_code=left.left_code)
        cure = "cure: let every rank take the same number of steps, or end the loop on all ranks together"
        return self._verdict(left.rank, what, cure=cure, detail=self._seen(waiter.rank))

    def _seen(self, rank: int) -> str:
        stack = self.members[rank].stack
        return f"rank {rank} was last seen at (most recent call last):\n{stack_text(stack)}" if stack else ""
