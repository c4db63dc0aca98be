"""Who is missing from which collective: a pure function of what the ranks last said."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from gradwire.launch.verdict import Frame, at_step, number_list, who

__all__ = ["Hang", "Member", "Waiting", "about_step", "find_hangs"]

STALE_S = 1.0  # five beats


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A collective that a rank has entered and not left. since: the roster's clock, seconds.

    ranks: those of the group, whose name is theirs alone; None: all of the job.
    """

    group: str
    op: str
    seq: int
    since: float
    ranks: frozenset[int] | None = None

    def misses(self, member: Member) -> bool:
        """The rank belongs to the group and has not come to the collective yet."""
        belongs = self.ranks is None or member.rank in self.ranks
        return belongs and member.arrived.get(self.group, 0) < self.seq


@dataclass(kw_only=True)
class Member:
    """What is known of one rank. `heard_at` is None until it says hello; `left_at` is set once it has ended well."""

    rank: int
    host: str = ""
    pid: int | None = None
    step: int | None = None
    step_s: float = 0.0
    arrived: dict[str, int] = field(default_factory=dict[str, int])
    waiting: list[Waiting] = field(default_factory=list[Waiting])
    stack: list[Frame] = field(default_factory=list[Frame])
    heard_at: float | None = None
    left_at: float | None = None
    left_how: str = ""
    left_code: int = 0
    gone: bool = False
    suspended: bool = False

    @property
    def who(self) -> str:
        """`rank 1 on HOST`."""
        return who(self.rank, self.host)

    @property
    def alive(self) -> bool:
        """Neither gone nor left."""
        return not self.gone and self.left_at is None

    def at_step(self, members: Mapping[int, Member], now: float) -> str:
        """` at step 12`; ` at about step 12` where its last beat is old."""
        stale = self.suspended or (self.heard_at is not None and now - self.heard_at > STALE_S)
        return about_step(self, members) if stale else at_step(self.step)


@dataclass(frozen=True, kw_only=True)
class Hang:
    """One wait that lasts too long.

    culprits: the ranks that do not come (empty: all have come and the collective does not end).
    waiter, waiting: who waits in what; None for a rank that is silent while nobody waits. since: seconds on the clock.
    """

    culprits: tuple[int, ...]
    since: float
    waiter: int | None = None
    waiting: Waiting | None = None

    def headline(self, members: Mapping[int, Member], now: float) -> str:
        """One line: who, where, what they miss, and for how long."""
        if self.waiting is None:
            silent = members[self.culprits[0]]
            return f"{silent.who} has not been heard of for {now - self.since:.1f} s{silent.at_step(members, now)}"
        what = f"{self.waiting.op} #{self.waiting.seq} of {self.waiting.group}"
        waiter = members[self.waiter if self.waiter is not None else 0]
        if not self.culprits:
            everybody = (
                "every rank has" if self.waiting.ranks is None else f"{number_list(list(self.waiting.ranks))} have"
            )
            return (
                f"{everybody} entered {what}{waiter.at_step(members, now)} but it has not ended for "
                f"{now - self.since:.1f} s: {_stuck(self._concerned(members))}"
            )
        names = ", ".join(members[rank].who for rank in self.culprits)
        verb = "is" if len(self.culprits) == 1 else "are"
        step = members[self.culprits[0]].at_step(members, now)
        waited = f"{waiter.who} waits there{waiter.at_step(members, now)} since {now - self.waiting.since:.1f} s"
        return f"{names} {verb} missing from {what}{step}; {waited}"

    def cure(self, members: Mapping[int, Member]) -> str:
        """What to do once the job has ended for it."""
        if self.culprits:
            return "cure: see where the missing rank is; if so long a wait is meant, raise --timeout"
        if _one_host(self._concerned(members)):
            return "cure: let all ranks take the same path through the program: the same models, batches and gw calls"
        return "cure: see whether the hosts reach one another (firewall, cables, MTU)"

    def _concerned(self, members: Mapping[int, Member]) -> Mapping[int, Member]:
        """The ranks of the group."""
        ranks = None if self.waiting is None else self.waiting.ranks
        return members if ranks is None else {rank: each for rank, each in members.items() if rank in ranks}


def about_step(member: Member, members: Mapping[int, Member]) -> str:
    """Where a rank is that cannot say so: its last beat may be old, so the job's latest step counts too."""
    if member.step is None:
        return ""
    return f" at about step {max(other.step or 0 for other in members.values())}"


def _one_host(members: Mapping[int, Member]) -> bool:
    return len({member.host for member in members.values()}) == 1


def _stuck(members: Mapping[int, Member]) -> str:
    if _one_host(members):
        return (
            "the ranks are on one host (or hosts of one name), so their collectives do not match, or one of them is stuck "
            "inside it; do all take the same path through the program?"
        )
    return f"a link between {number_list(list(members))} is cut or very slow"


def find_hangs(members: dict[int, Member], now: float, *, hang_s: float, silent_s: float) -> list[Hang]:
    """All waits above max(hang_s, 3 usual steps) and all ranks silent for `silent_s`; longest first, one a culprit."""
    limit_s = max(hang_s, 3 * max((member.step_s for member in members.values()), default=0.0))
    found = [*_waits(members, now, limit_s), *_silences(members, now, silent_s)]
    named: set[int] = set()
    hangs: list[Hang] = []
    for hang in sorted(found, key=lambda hang: (hang.waiting is None, not hang.culprits, hang.since)):
        if not hang.culprits or not named.issuperset(hang.culprits):
            hangs.append(hang)
            named.update(hang.culprits)
    return hangs


def _waits(members: dict[int, Member], now: float, limit_s: float) -> Iterator[Hang]:
    oldest: dict[tuple[str, int], tuple[int, Waiting]] = {}
    for member in members.values():
        for waiting in member.waiting if member.alive else ():
            key = (waiting.group, waiting.seq)
            if key not in oldest or waiting.since < oldest[key][1].since:
                oldest[key] = (member.rank, waiting)
    for rank, waiting in oldest.values():
        if now - waiting.since > limit_s:
            missing = [m for m in members.values() if m.alive and waiting.misses(m)]
            # A rank that itself waits elsewhere is held up by somebody: name those who wait for nobody, if any.
            culprits = [m for m in missing if not m.waiting] or missing
            if culprits or _all_inside(members.values(), waiting):
                yield Hang(culprits=tuple(m.rank for m in culprits), since=waiting.since, waiter=rank, waiting=waiting)


def _all_inside(members: Collection[Member], waiting: Waiting) -> bool:
    """Two or more ranks are in the collective still: one alone may just not have said yet that it came out."""
    inside = [m for m in members if any((w.group, w.seq) == (waiting.group, waiting.seq) for w in m.waiting)]
    return len(inside) > 1


def _silences(members: dict[int, Member], now: float, silent_s: float) -> Iterator[Hang]:
    for member in members.values():
        if member.alive and member.heard_at is not None and now - member.heard_at > silent_s:
            waits = ((m, w) for m in members.values() if m.alive for w in m.waiting)
            missed = [(m, w) for m, w in waits if w.misses(member)]
            waiter, waiting = min(missed, key=lambda pair: pair[1].since, default=(None, None))
            rank = None if waiter is None else waiter.rank
            yield Hang(culprits=(member.rank,), since=member.heard_at, waiter=rank, waiting=waiting)
