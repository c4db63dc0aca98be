"""The worker's end against a coordinator in the same process, as under a foreign launcher."""

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from gradwire.errors import LaunchError
from gradwire.launch.coordinator import Coordinator
from gradwire.launch.heartbeat import Heartbeat


class Embedded:
    def __init__(self, world_size, **options):
        self.said = []
        self.coordinator = Coordinator(token="t", world_size=world_size, report=self.said.append, **options)
        self.coordinator.start()
        self.hearts = []

    def heart(self, rank, *, token="t", reports=False):
        heart = Heartbeat(
            address=self.coordinator.address, token=token, rank=rank, world_size=2, host="here", reports=reports
        )
        self.hearts.append(heart)
        return heart


@pytest.fixture
def job():
    one = Embedded(2)
    yield one
    for heart in one.hearts:
        heart.close()
    one.coordinator.stop()


def test_a_failure_reaches_every_rank_with_its_step(job):
    hearts = [job.heart(rank) for rank in range(2)]
    called = threading.Event()
    hearts[0].on_stop(called.set)
    hearts[1].step = 7
    hearts[1].fail("Traceback (most recent call last):\nValueError: boom\n", victim=False)
    verdict = hearts[0].verdict(5)
    assert verdict is not None and verdict.headline.startswith("rank 1 on here failed at step 7: ValueError: boom")
    assert "Traceback" in verdict.detail
    assert called.wait(5)
    late = threading.Event()
    hearts[0].on_stop(late.set)
    assert late.is_set()


def test_leaving_waits_for_the_others(job):
    hearts = [job.heart(rank) for rank in range(2)]
    results = []
    thread = threading.Thread(target=lambda: results.append(hearts[0].leave(None)))
    thread.start()
    assert not results
    assert hearts[1].leave(None) is None
    thread.join(5)
    assert results == [None]
    assert job.coordinator.verdict is None


def test_a_rank_taken_twice_is_refused_within_a_second(job):
    job.heart(0)
    start = time.monotonic()
    with pytest.raises(LaunchError, match="rank 0 is taken"):
        job.heart(0)
    assert time.monotonic() - start < 1


def test_a_stranger_is_refused_within_a_second(job):
    start = time.monotonic()
    with pytest.raises(LaunchError, match="belongs to another job"):
        job.heart(0, token="other")
    assert time.monotonic() - start < 1


def test_nobody_listening_is_said_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(LaunchError, match="cannot be reached"):
        Heartbeat(address=address, token="t", rank=0, world_size=1, host="here")


def test_the_end_of_the_coordinator_stops_the_ranks(job):
    heart = job.heart(1)
    job.coordinator.stop()
    verdict = heart.verdict(5)
    assert verdict is not None and "the launcher (or rank 0, if another launcher is used) is gone" in verdict.headline


def test_a_lost_rank_is_named_without_a_launcher(job):
    heart, lost = job.heart(0), job.heart(1)
    lost.close()
    verdict = heart.verdict(2)
    assert verdict is not None and "rank 1 on here ended without a word" in verdict.headline


def test_a_forked_child_does_not_keep_a_rank_alive(job):
    heart, lost = job.heart(0), job.heart(1)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        lost._channel.forget()  # pyright: ignore[reportPrivateUsage] - closes our copy without a shutdown
        verdict = heart.verdict(3)
        assert verdict is not None and verdict.rank == 1
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(pid, 0)


def test_a_long_traceback_is_shortened(job):
    heart, other = job.heart(1), job.heart(0)
    heart.fail("x" * 2_000_000 + "\nValueError: boom\n")
    verdict = other.verdict(5)
    assert verdict is not None and "ValueError: boom" in verdict.headline and len(verdict.detail) < 110_000


FOREIGN = """
import os, sys, threading
from gradwire.errors import PeerError
from gradwire.launch.heartbeat import Heartbeat
from gradwire.launch.excepthook import install_excepthook
port, rank = int(sys.argv[1]), int(sys.argv[2])
heart = Heartbeat(address=("127.0.0.1", port), token="t", rank=rank, world_size=2, host="here", reports=True)
install_excepthook(heart)
print("ready", flush=True)
sys.stdin.readline()
if rank == 1:
    raise ValueError("boom")
stopped = threading.Event()
heart.on_stop(stopped.set)
stopped.wait(20)
if sys.argv[3] == "hangs":
    threading.Event().wait(20)
raise PeerError("a peer is gone")
"""


@pytest.mark.parametrize("victim", ["unwinds", "hangs"])
def test_under_a_foreign_launcher_the_culprit_prints_its_traceback_and_the_victim_one_line(job, victim):
    def start(rank):
        return subprocess.Popen(
            [sys.executable, "-c", FOREIGN, str(job.coordinator.address[1]), str(rank), victim],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    ranks = [start(rank) for rank in range(2)]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    printed = [rank.communicate("go\n", timeout=10)[1] for rank in reversed(ranks)][::-1]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "Traceback" in printed[1] and "ValueError: boom" in printed[1]
    (line,) = printed[0].splitlines()
    assert line.startswith("gradwire: rank 0 stops: rank 1 on here failed at step 0: ValueError: boom")
