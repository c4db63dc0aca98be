"""The state machine: causes before victims, hangs named once, everybody released together."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gradwire.launch.actions import AskStack, Beat, Done, Refuse, Release, Stop, Warn
from gradwire.launch.hang import Waiting
from gradwire.launch.roster import Roster
from gradwire.launch.verdict import Exit

GROUP = "data/gradients"


class Clocked:
    """A roster with a clock of its own; `run` lets time pass in ticks of 0.1 s."""

    def __init__(self, world_size, **options):
        self.roster = Roster(world_size, **options)
        self.now = 100.0
        self.actions = []
        self.silent = set()
        self.beats = {}
        for rank in range(world_size):
            self.do(self.roster.hello(rank, "host", 1000 + rank, self.now))

    def do(self, actions):
        self.actions += actions
        return actions

    def at(self, rank, *, step=12, seq=0, waits=False, step_s=0.1):
        self.beats[rank] = (step, seq, self.now if waits else None, step_s)
        self.beat(rank)

    def beat(self, rank):
        step, seq, since, step_s = self.beats[rank]
        waiting = [] if since is None else [Waiting(group=GROUP, op="all_reduce", seq=seq, since=since)]
        stack = [("train.py", 7, "train")]
        arrived = {GROUP: seq} if seq else {}
        self.do(
            self.roster.beat(
                rank, Beat(step=step, step_s=step_s, arrived=arrived, waiting=waiting, stack=stack), self.now
            )
        )

    def run(self, seconds):
        for turn in range(round(seconds * 10)):
            self.now += 0.1
            for rank in self.beats:
                if turn % 5 == 0 and rank not in self.silent:
                    self.beat(rank)
            self.do(self.roster.tick(self.now))

    def of(self, kind):
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def headline(self):
        stops = self.of(Stop)
        assert len(stops) == 1
        return stops[0].verdict.headline


def test_an_exception_is_named_at_once_with_its_step():
    job = Clocked(2)
    job.at(1)
    job.do(job.roster.fail(1, "Traceback (most recent call last):\n  File x\nValueError: boom\n", job.now))
    assert job.headline == "rank 1 on host failed at step 12: ValueError: boom (pid 1001)"
    assert job.of(Stop)[0].verdict.exit_code == 1


@pytest.mark.parametrize("order", list(itertools.permutations(["victim", "lost", "exited"])))
def test_a_kill_comes_before_its_victims_in_any_order(order):
    job = Clocked(3)
    for rank in range(3):
        job.at(rank)
    happen = {
        "victim": lambda: job.roster.fail(0, "gradwire.errors.PeerError: reset\n", job.now, victim=True),
        "lost": lambda: job.roster.lost(1, job.now),
        "exited": lambda: job.roster.exited(1, Exit(code=-9), job.now),
    }
    for name in order:
        job.do(happen[name]())
        job.run(0.2)
    assert job.headline == "rank 1 on host was killed by SIGKILL at about step 12 (pid 1001)"


def test_a_killed_plain_worker_comes_before_a_peer_that_fails_on_it():
    job = Clocked(2)
    job.do(job.roster.exited(0, Exit(code=1, tail="Traceback (most recent call last):\nRuntimeError: reset"), job.now))
    job.run(0.1)
    job.do(job.roster.exited(1, Exit(code=-9, note="out of memory (limit 1 MiB)"), job.now))
    assert "rank 1" in job.headline and "SIGKILL" in job.headline and "out of memory" in job.headline
    assert "cure" in job.of(Stop)[0].verdict.cure


def test_a_victim_alone_is_named_after_half_a_second():
    job = Clocked(2)
    job.do(job.roster.fail(0, "PeerError: the network is gone\n", job.now, victim=True))
    job.run(0.4)
    assert not job.of(Stop)
    job.run(0.3)
    assert "rank 0 on host failed: PeerError: the network is gone" in job.headline


def test_an_exit_code_is_kept():
    job = Clocked(2)
    job.do(job.roster.exited(1, Exit(code=3), job.now))
    job.run(0.5)
    assert job.of(Stop)[0].verdict.exit_code == 3
    assert "exited with code 3" in job.headline


@pytest.mark.parametrize(("launchers", "within_s"), [(False, 0.5), (True, 2.2)])
def test_a_closed_connection_is_named_without_the_exit_too(launchers, within_s):
    job = Clocked(2, launchers=launchers)
    job.do(job.roster.lost(1, job.now))
    assert not job.of(Stop)
    job.run(within_s)
    assert "rank 1 on host ended without a word" in job.headline


@pytest.mark.parametrize("way", ["leave", "exit", "os._exit"])
def test_a_rank_that_leaves_while_another_waits_is_named_within_two_seconds(way):
    job = Clocked(2)
    job.at(0, seq=57, waits=True)
    job.at(1, seq=56)
    del job.beats[1]
    if way == "leave":
        job.do(job.roster.leave(1, "sys.exit(0)", job.now))
    else:
        job.do(job.roster.lost(1, job.now) if way == "os._exit" else [])
        job.do(job.roster.exited(1, Exit(code=0), job.now))
    job.run(2.0)
    how = "sys.exit(0)" if way == "leave" else "exit code 0"
    wait = "rank 0 on host waits in all_reduce #57 of data/gradients"
    assert job.headline == f"rank 1 on host left at step 12 ({how}) while {wait} (pid 1001)"


def test_a_rank_that_leaves_after_its_last_collective_ends_nothing():
    job = Clocked(2)
    job.at(0, seq=57)
    job.at(1, seq=57)
    del job.beats[1]
    job.do(job.roster.leave(1, None, job.now))
    job.run(30)
    assert not job.of(Stop) and not job.of(Warn)
    del job.beats[0]
    job.do(job.roster.leave(0, None, job.now))
    assert job.of(Release) == [Release()]
    for rank in range(2):
        job.do(job.roster.lost(rank, job.now))
        job.do(job.roster.exited(rank, Exit(code=0), job.now))
    job.run(3)
    assert job.of(Done) == [Done()] and not job.of(Stop)


def test_a_failure_after_leaving_still_counts():
    job = Clocked(1)
    job.do(job.roster.leave(0, None, job.now))
    job.do(job.roster.exited(0, Exit(code=3), job.now))
    job.run(0.5)
    assert "exited with code 3" in job.headline and not job.of(Done)


def test_a_second_rank_of_the_same_number_is_refused():
    job = Clocked(2)
    (refusal,) = job.roster.hello(1, "other", 5, job.now)
    assert isinstance(refusal, Refuse) and "rank 1 is taken by pid 1001 on host" in refusal.reason
    (refusal,) = job.roster.hello(2, "other", 5, job.now)
    assert "outside this job of 2 ranks" in refusal.reason


def test_a_hang_is_reported_once_with_the_missing_ranks_stack_and_taken_back():
    job = Clocked(3)
    job.at(0, seq=57, waits=True)
    job.at(2, seq=57, waits=True)
    job.at(1, seq=56)
    job.run(4.9)
    assert not job.of(Warn)
    job.run(0.3)
    assert job.of(AskStack) == [AskStack(rank=1)]
    job.do(job.roster.stacks(1, '    File "train.py", line 9, in slow', job.now))
    job.run(4.0)
    (warning,) = job.of(Warn)
    first = warning.text.splitlines()[0]
    assert first.startswith(
        "rank 1 on host is missing from all_reduce #57 of data/gradients at step 12; rank 0 on host"
    )
    assert "line 9, in slow" in warning.text
    for rank in range(3):
        job.at(rank, seq=57)
    job.run(1.0)
    assert len(job.of(Warn)) == 2
    assert job.of(Warn)[1].text.startswith("rank 1 on host is back after 9.")
    assert not job.of(Stop)


def test_a_suspended_process_is_called_so():
    job = Clocked(2)
    job.at(0, seq=57, waits=True)
    job.at(1, seq=56)
    job.silent.add(1)
    job.roster.suspended(1, True)
    job.run(7)
    (warning,) = job.of(Warn)
    assert "is missing from all_reduce #57" in warning.text
    assert "process is stopped (SIGSTOP)" in warning.text and "last seen" in warning.text
    assert 'File "train.py", line 7, in train' in warning.text
    job.silent.clear()
    job.at(1, seq=57)
    job.at(0, seq=57)
    job.run(1)
    assert "is back after" in job.of(Warn)[1].text


def test_a_rank_that_is_silent_while_nobody_waits_is_named():
    job = Clocked(2)
    job.at(0, seq=1)
    job.at(1, seq=1)
    job.silent.add(1)
    job.run(7)
    (warning,) = job.of(Warn)
    assert warning.text.startswith("rank 1 on host has not been heard of for")


def test_slow_steps_raise_the_limit():
    job = Clocked(2)
    job.at(0, seq=57, waits=True, step_s=4.0)
    job.at(1, seq=56)
    job.run(11.5)
    assert not job.of(Warn)
    job.run(2)
    assert len(job.of(Warn)) == 1


@pytest.mark.parametrize(
    ("hosts", "words"), [(1, "do all take the same path"), (2, "link between ranks 0 and 1 is cut")]
)
def test_a_collective_that_everybody_entered_and_nobody_leaves_names_the_likely_cause(hosts, words):
    job = Clocked(2, timeout_s=20)
    job.roster.placed(1, f"host{hosts}" if hosts > 1 else "host", 1001)
    job.at(0, seq=3, waits=True)
    job.at(1, seq=3, waits=True)
    job.run(7)
    (warning,) = job.of(Warn)
    assert "every rank has entered all_reduce #3" in warning.text and words in warning.text
    assert ("cut or very slow" in warning.text) is (hosts > 1)
    job.run(15)
    (stop,) = job.of(Stop)
    assert ("same path" in stop.verdict.cure) is (hosts == 1)


def test_a_stopped_ranks_step_is_the_jobs_latest_and_called_so():
    job = Clocked(2)
    job.at(1, seq=56, step=40)
    job.silent.add(1)
    job.roster.suspended(1, True)
    job.at(0, seq=57, step=49, waits=True)
    job.run(7)
    (warning,) = job.of(Warn)
    assert "is missing from all_reduce #57 of data/gradients at about step 49; rank 0" in warning.text
    assert "waits there at step 49" in warning.text


def test_who_waits_elsewhere_is_not_the_culprit():
    job = Clocked(3)
    job.at(0, seq=5, waits=True)
    job.at(2, seq=4)
    wait = Waiting(group="data/loader", op="broadcast", seq=2, since=job.now)
    for _ in range(13):
        job.run(0.5)
        beat = Beat(step=12, arrived={GROUP: 4, "data/loader": 2}, waiting=[wait])
        job.do(job.roster.beat(1, beat, job.now))
    (warning,) = job.of(Warn)
    assert warning.text.startswith("rank 2 on host is missing from")


def in_group(job, rank, *, arrived, ranks, waits=True):
    """``rank`` waits in collective 3 of a group of some ranks."""
    wait = Waiting(group="tensor[0,1]/main", op="all_reduce", seq=3, since=100.0, ranks=frozenset(ranks))
    beat = Beat(step=12, arrived={"tensor[0,1]/main": arrived}, waiting=[wait] if waits else [])
    job.do(job.roster.beat(rank, beat, job.now))


def test_only_ranks_of_a_group_are_missing_from_it():
    job = Clocked(4)
    job.at(2)
    job.at(3)
    for _ in range(13):
        job.run(0.5)
        in_group(job, 0, arrived=3, ranks=[0, 1])
        in_group(job, 1, arrived=2, ranks=[0, 1], waits=False)
    (warning,) = job.of(Warn)
    assert warning.text.startswith("rank 1 on host is missing from all_reduce #3 of tensor[0,1]/main")


def test_a_group_of_some_ranks_that_does_not_end_names_them():
    job = Clocked(4)
    job.at(1)
    job.at(3)
    for _ in range(13):
        job.run(0.5)
        for rank in (0, 2):
            in_group(job, rank, arrived=3, ranks=[0, 2])
    (warning,) = job.of(Warn)
    assert warning.text.startswith("ranks 0 and 2 have entered all_reduce #3")


def test_a_rank_may_leave_while_a_group_that_it_is_not_in_works():
    job = Clocked(3)
    job.do(job.roster.leave(2, None, job.now))
    for _ in range(6):
        job.run(0.5)
        in_group(job, 0, arrived=3, ranks=[0, 1])
        in_group(job, 1, arrived=3, ranks=[0, 1])
    assert not job.of(Stop)


def test_a_rank_that_leaves_its_group_is_named():
    job = Clocked(3)
    in_group(job, 1, arrived=2, ranks=[0, 1], waits=False)
    job.do(job.roster.leave(1, None, job.now))
    for _ in range(4):
        job.run(0.5)
        in_group(job, 0, arrived=3, ranks=[0, 1])
    assert job.headline.startswith("rank 1 on host left at step 12 (its script ended) while rank 0 on host waits in")


def test_a_hang_beyond_the_timeout_stops_the_job():
    job = Clocked(2, timeout_s=10.0)
    job.at(0, seq=57, waits=True)
    job.at(1, seq=56)
    job.run(11)
    assert "rank 1 on host is missing from all_reduce #57" in job.headline
    assert "timeout 10 s" in job.headline and "--timeout" in job.of(Stop)[0].verdict.cure


def test_the_loss_of_a_launcher_is_the_loss_of_its_ranks():
    job = Clocked(4)
    for rank in (2, 3):
        job.do(job.roster.lost(rank, job.now))
    job.do(job.roster.node_lost([2, 3], "ranks 2 to 3 on b are gone", job.now))
    assert job.headline == "ranks 2 to 3 on b are gone"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["beat", "wait", "fail", "victim", "leave", "lost", "exit0", "exit3", "kill", "stacks", "tick"]
        ),
        st.integers(0, 2),
        st.floats(0, 3),
        st.integers(0, 3),
    ),
    max_size=40,
)


@given(EVENTS)
@example([("lost", 1, 0.0, 0), ("fail", 1, 0.0, 0), ("leave", 0, 0.0, 0), ("leave", 2, 0.0, 0), ("exit0", 1, 0.0, 0)])
def test_whatever_happens_there_is_one_verdict_and_silence_after_it(events):
    job = Clocked(3, timeout_s=8.0)
    first_fault = None
    for kind, rank, wait_s, seq in events:
        job.now += wait_s
        roster, now = job.roster, job.now
        waiting = [Waiting(group=GROUP, op="all_reduce", seq=seq, since=now - wait_s)] if kind == "wait" else []
        act = {
            "beat": lambda: roster.beat(rank, Beat(step=seq, arrived={GROUP: seq}), now),
            "wait": lambda: roster.beat(rank, Beat(step=seq, arrived={GROUP: seq}, waiting=waiting), now),
            "fail": lambda: roster.fail(rank, "E: x", now),
            "victim": lambda: roster.fail(rank, "PeerError: x", now, victim=True),
            "leave": lambda: roster.leave(rank, None, now),
            "lost": lambda: roster.lost(rank, now),
            "exit0": lambda: roster.exited(rank, Exit(code=0), now),
            "exit3": lambda: roster.exited(rank, Exit(code=3), now),
            "kill": lambda: roster.exited(rank, Exit(code=-9), now),
            "stacks": lambda: roster.stacks(rank, "x", now),
            "tick": lambda: roster.tick(now),
        }[kind]
        decided = job.roster.verdict is not None
        actions = job.do(act())
        assert not (decided and actions)
        if kind in ("fail", "victim", "exit3", "kill") and not job.of(Done):
            first_fault = first_fault or kind
    job.silent = set(range(3))
    job.run(20)
    assert len(job.of(Stop)) <= 1 and len(job.of(Release)) <= 1 and len(job.of(Done)) <= 1
    assert not (job.of(Done) and job.of(Stop))
    if first_fault:
        assert job.of(Stop)
    if job.roster.verdict:
        assert 0 <= job.roster.verdict.rank < 3


@given(st.permutations(range(4)), st.lists(st.floats(0, 5), min_size=4, max_size=4))
def test_everybody_is_released_when_the_last_one_leaves_and_not_before(order, waits):
    job = Clocked(4)
    for rank, wait_s in zip(order, waits, strict=True):
        assert not job.of(Release)
        job.now += wait_s
        job.do(job.roster.leave(rank, None, job.now))
    assert len(job.of(Release)) == 1 and not job.of(Stop)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=4), st.floats(6, 20))
def test_only_ranks_that_are_behind_are_blamed_for_a_hang(seqs, seconds):
    job = Clocked(len(seqs))
    top = max(seqs)
    for rank, seq in enumerate(seqs):
        job.at(rank, seq=seq, waits=seq == top and top > 0)
    job.run(seconds + 1.5)
    behind = {rank for rank, seq in enumerate(seqs) if seq < top}
    assert {action.rank for action in job.of(AskStack)} == behind
    assert len(job.of(Warn)) == (1 if top > 0 and (behind or len(seqs) > 1) else 0)
