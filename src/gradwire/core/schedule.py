"""The order of work in a pipeline, as data: made, checked, simulated, printed. Pure: whoever interprets it is elsewhere.

Stage s is on rank ``s % num_ranks``. The orders are those of GPipe (Huang et al. 2019), PipeDream's 1F1B (Narayanan et al.
2021, also interleaved) and ZB-H1 (Qi et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from gradwire.core.pipeline import SCHEDULES, Schedule
from gradwire.errors import UsageError

Kind = Literal["forward", "backward", "input", "weight"]
Seconds: TypeAlias = "float | Sequence[float]"
_LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}


@dataclass(frozen=True)
class Action:
    """One piece of work. ``input`` and ``weight`` are a backward in two parts: the gradient that travels on, and the rest."""

    kind: Kind
    stage: int
    microbatch: int

    @property
    def returns(self) -> bool:
        """Whether it gives the gradient that the stage before waits for."""
        return self.kind in ("backward", "input")

    def needs(self, num_stages: int, kinds: Mapping[tuple[int, int], Kind]) -> Iterator[Action]:
        """What must have ended before. kinds: of the action that returns the gradient, by (stage, micro-batch)."""
        if self.kind == "forward" and self.stage > 0:
            yield Action("forward", self.stage - 1, self.microbatch)
        if self.returns:
            yield Action("forward", self.stage, self.microbatch)
            after = (self.stage + 1, self.microbatch)
            if self.stage + 1 < num_stages:
                yield Action(kinds.get(after, "backward"), *after)
        if self.kind == "weight":
            yield Action("input", self.stage, self.microbatch)


Order: TypeAlias = tuple[tuple[Action, ...], ...]


def make(schedule: Schedule, *, num_ranks: int, stages_per_rank: int = 1, num_microbatches: int) -> Order:
    """What each rank does, in order.

    num_microbatches: any number from 1. Raises UsageError for numbers below 1 and for several stages a rank where the
    schedule has one.

    >>> for actions in make("1f1b", num_ranks=2, num_microbatches=2):
    ...     print(*(f"{action.kind}-{action.microbatch}" for action in actions))
    forward-0 forward-1 backward-0 backward-1
    forward-0 backward-0 forward-1 backward-1
    """
    if schedule not in SCHEDULES:
        raise UsageError(f"schedule={schedule!r}; allowed: {', '.join(SCHEDULES)}")
    given = {"num_ranks": num_ranks, "stages_per_rank": stages_per_rank, "num_microbatches": num_microbatches}
    if low := [f"{name}={value}" for name, value in given.items() if value < 1]:
        raise UsageError(f"a schedule needs {low[0]} to be at least 1")
    if stages_per_rank > 1 and schedule != "interleaved":
        raise UsageError(f"schedule {schedule} has one stage a rank, not {stages_per_rank}; use interleaved")
    return tuple(
        tuple(_rank_order(schedule, rank, num_ranks, stages_per_rank, num_microbatches)) for rank in range(num_ranks)
    )


def _rank_order(schedule: Schedule, rank: int, num_ranks: int, per_rank: int, m: int) -> Iterator[Action]:
    if schedule == "gpipe":
        yield from (Action("forward", rank, j) for j in range(m))
        yield from (Action("backward", rank, j) for j in range(m))
    elif schedule == "1f1b":
        yield from _one_each(rank, m, ahead=min(m, num_ranks - rank))
    elif schedule == "zero-bubble":
        yield from _zero_bubble(rank, m, ahead=min(m, num_ranks - rank))
    else:  # made for whole rounds of micro-batches; leaving some out keeps the order of the others
        made = _interleaved(rank, num_ranks, per_rank, -(-m // num_ranks) * num_ranks)
        yield from (action for action in made if action.microbatch < m)


def _one_each(stage: int, m: int, *, ahead: int) -> Iterator[Action]:
    yield from (Action("forward", stage, j) for j in range(ahead))
    for j in range(m):
        yield Action("backward", stage, j)
        if ahead + j < m:
            yield Action("forward", stage, ahead + j)


def _zero_bubble(stage: int, m: int, *, ahead: int) -> Iterator[Action]:
    """Later stages, which have gradients first, put off more weights' gradients: into the gap at the end."""
    yield from (Action("forward", stage, j) for j in range(ahead))
    for j in range(m):
        yield Action("input", stage, j)
        if j >= stage:
            yield Action("weight", stage, j - stage)
        if ahead + j < m:
            yield Action("forward", stage, ahead + j)
    yield from (Action("weight", stage, j) for j in range(max(0, m - stage), m))


def _interleaved(rank: int, num_ranks: int, per_rank: int, m: int) -> Iterator[Action]:
    """m: a multiple of num_ranks. A rank works on ``num_ranks`` micro-batches of one stage, then of its next one."""
    total = m * per_rank
    ahead = min((per_rank - 1) * num_ranks + 2 * (num_ranks - 1 - rank), total)

    def nth(kind: Kind, step: int) -> Action:
        turn, place = divmod(step, num_ranks)
        round_, local = divmod(turn, per_rank)
        local = local if kind == "forward" else per_rank - 1 - local
        return Action(kind, local * num_ranks + rank, round_ * num_ranks + place)

    yield from (nth("forward", step) for step in range(ahead))
    for step in range(total):
        if ahead + step < total:
            yield nth("forward", ahead + step)
        yield nth("backward", step)


def validate(order: Order, *, num_stages: int, num_microbatches: int) -> None:
    """Raise UsageError unless every micro-batch goes through every stage once, on its rank, and nobody waits for ever."""
    wanted = {(stage, j) for stage in range(num_stages) for j in range(num_microbatches)}
    whole: tuple[tuple[Kind, ...], ...] = (("forward", "backward"), ("forward", "input", "weight"))
    found: dict[tuple[int, int], list[Kind]] = {}
    for rank, actions in enumerate(order):
        for action in actions:
            if action.stage % len(order) != rank:
                raise UsageError(
                    f"{_name(action)} is on rank {rank}, but its stage on rank {action.stage % len(order)}"
                )
            found.setdefault((action.stage, action.microbatch), []).append(action.kind)
    if missing := sorted(wanted - set(found)) or sorted(set(found) - wanted):
        raise UsageError(f"stage {missing[0][0]} and micro-batch {missing[0][1]}: left out, or not asked for")
    for (stage, j), kinds in found.items():
        if tuple(kinds) not in whole:
            raise UsageError(f"stage {stage} does {', '.join(kinds)} for micro-batch {j}; it must be forward, backward")
    simulate(order)


def kinds_of(order: Order) -> dict[tuple[int, int], Kind]:
    """Which action gives the gradient for the stage before, by (stage, micro-batch)."""
    return {(a.stage, a.microbatch): a.kind for actions in order for a in actions if a.returns}


def live_microbatches(actions: Sequence[Action]) -> int:
    """The most (stage, micro-batch) pairs of one rank whose activations it holds at once.

    >>> [live_microbatches(actions) for actions in make("1f1b", num_ranks=3, num_microbatches=8)]
    [3, 2, 1]
    """
    last = {(a.stage, a.microbatch): place for place, a in enumerate(actions)}
    live = most = 0
    for place, action in enumerate(actions):
        live += action.kind == "forward"
        most = max(most, live)
        live -= last[action.stage, action.microbatch] == place
    return most


@dataclass(frozen=True)
class Timeline:
    """When each action of each rank begins and ends, in seconds from the first."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]

    @cached_property
    def total_s(self) -> float:
        """From the first begin to the last end."""
        return max((end for spans in self.spans for _, _, end in spans), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they have nothing to do."""
        busy_s = sum(end - start for spans in self.spans for _, start, end in spans)
        return 1 - busy_s / (len(self.spans) * self.total_s) if self.total_s else 0.0


def simulate(
    order: Order,
    forward_s: Seconds = 1.0,
    backward_s: Seconds = 2.0,
    *,
    weight_s: Seconds | None = None,
    send_s: float = 0.0,
) -> Timeline:
    """When everything happens if each rank does its actions in order and receives by waiting, while sends never block.

    forward_s, backward_s: of a micro-batch, one number or one for each stage. weight_s: how much of backward_s the weights'
    gradients are, where they are put off; None: half. send_s: from the end of an action until another rank has its result.
    Raises UsageError if ranks wait for each other for ever. Cost: actions x ranks.

    >>> round(simulate(make("gpipe", num_ranks=4, num_microbatches=12)).bubble, 3)  # (p - 1) / (m + p - 1)
    0.2
    """
    num_stages = 1 + max((a.stage for actions in order for a in actions), default=0)
    forward, backward = _each(forward_s, num_stages), _each(backward_s, num_stages)
    weight = [each / 2 for each in backward] if weight_s is None else _each(weight_s, num_stages)
    kinds = kinds_of(order)

    def seconds(action: Action) -> float:
        s = action.stage
        return {"forward": forward[s], "backward": backward[s], "input": backward[s] - weight[s], "weight": weight[s]}[
            action.kind
        ]

    ended: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in order]
    waiting = True
    while waiting:
        waiting = False
        for rank, actions in enumerate(order):
            while len(spans[rank]) < len(actions):
                action = actions[len(spans[rank])]
                needs = list(action.needs(num_stages, kinds))
                if any(need not in ended for need in needs):
                    break
                ready = [ended[need] + (send_s if need.stage % len(order) != rank else 0.0) for need in needs]
                start = max([spans[rank][-1][2] if spans[rank] else 0.0, *ready])
                ended[action] = start + seconds(action)
                spans[rank].append((action, start, ended[action]))
                waiting = True
    for rank, actions in enumerate(order):
        if len(spans[rank]) < len(actions):
            raise UsageError(
                f"the schedule never ends: rank {rank} waits for ever in {_name(actions[len(spans[rank])])}"
            )
    return Timeline(tuple(tuple(each) for each in spans))


def grid(timeline: Timeline, *, cell_s: float | None = None) -> str:
    """A picture of it: a row a rank, a column ``cell_s`` seconds (None: the shortest action, at most 60 columns).

    F3: forward of micro-batch 3, B backward, I and W its two parts; with several stages a rank F3/1 is on its second.

    >>> print(grid(simulate(make("gpipe", num_ranks=2, num_microbatches=2), 1, 1)))
    rank 0  F0 F1 .  .  B0 B1
    rank 1  .  F0 F1 B0 B1 .
    """
    spans = [span for row in timeline.spans for span in row]
    shortest = min((end - start for _, start, end in spans if end > start), default=1.0)
    cell_s = cell_s or max(shortest, timeline.total_s / 60)
    num_ranks, columns = len(timeline.spans), round(timeline.total_s / cell_s)
    several = any(action.stage >= num_ranks for action, _, _ in spans)
    rows: list[list[str]] = []
    for row in timeline.spans:
        cells = ["."] * columns
        for action, start, end in row:
            first = min(round(start / cell_s), columns - 1)
            cells[first:] = ["-" if first < at < round(end / cell_s) else cells[at] for at in range(first, columns)]
            local = f"/{action.stage // num_ranks}" if several else ""
            cells[first] = f"{_LETTERS[action.kind]}{action.microbatch}{local}"
        rows.append(cells)
    width = max((len(cell) for cells in rows for cell in cells), default=1)
    return "\n".join(
        f"rank {rank}  {' '.join(cell.ljust(width) for cell in cells)}".rstrip() for rank, cells in enumerate(rows)
    )


def _each(value: Seconds, num_stages: int) -> list[float]:
    if isinstance(value, int | float):
        return [float(value)] * num_stages
    if len(value) != num_stages:
        raise UsageError(f"{len(value)} durations for {num_stages} stages; give one number, or one for each stage")
    return [float(each) for each in value]


def _name(action: Action) -> str:
    return f"{action.kind} of micro-batch {action.microbatch} in stage {action.stage}"
