"""The lab itself: what it promises about wires, cuts, commands and cleaning up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.lab import Lab, LabError, clean
from benchmarks.lab.line import measure
from benchmarks.lab.tools import namespaces

ROOT = Path(__file__).parent.parent.parent
HOLDS_A_LAB = (
    "from benchmarks.lab import Lab; import signal\nwith Lab(hosts=1): print('up', flush=True); signal.pause()"
)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(hosts=2, rate_mbit=100) as opened:
        yield opened


def connects(lab: Lab, timeout_s: float) -> bool:
    """Whether a TCP connection from host 0 is answered (here: refused, since nobody listens) by host 1."""
    code = (
        "import socket, sys\n"
        f"try: socket.create_connection(('{lab.address(1)}', 9), timeout={timeout_s})\n"
        "except ConnectionRefusedError: sys.exit(0)\n"
        "except OSError: sys.exit(1)"
    )
    return lab.run({0: [sys.executable, "-c", code]}, timeout_s=30)[0].returncode == 0


def soon(condition: Callable[[], bool], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
    return True


def mine(pid: int) -> list[str]:
    return [name for name in namespaces() if name.startswith(f"gwlab-{pid}-")]


def test_a_wire_carries_nearly_its_rate_and_counts_it(lab: Lab) -> None:
    sent_before, _ = lab.bytes(0)
    rate = measure(lab, num_bytes=12_500_000) * 8 / 1e6
    sent = lab.bytes(0)[0] - sent_before
    assert 85 < rate < 100  # 95.6 measured on an idle machine: headers take the rest
    assert 12_500_000 < sent < 12_500_000 * 1.03


def test_a_cut_wire_carries_nothing_until_it_is_restored(lab: Lab) -> None:
    assert connects(lab, 5)
    lab.cut(1)
    assert not connects(lab, 0.5)
    lab.restore(1)
    assert soon(lambda: connects(lab, 1))
    assert 85 < measure(lab, num_bytes=6_000_000) * 8 / 1e6 < 100


def test_a_command_runs_on_its_host_and_its_own_core(lab: Lab) -> None:
    code = "import os, socket; print(sorted(os.sched_getaffinity(0)), sorted(n for _, n in socket.if_nameindex()))"
    cores = sorted(os.sched_getaffinity(0))
    ended = lab.run({host: [sys.executable, "-c", code] for host in (0, 1)}, timeout_s=30)
    for host, done in ended.items():
        assert done.stdout.strip() == f"[{cores[host % len(cores)]}] ['eth0', 'lo']", done.stderr


def test_a_command_that_does_not_end_is_killed_with_its_children_and_its_words_are_shown(lab: Lab) -> None:
    code = (
        "import subprocess, sys, signal; subprocess.Popen(['sleep', '600']); print('here', flush=True); signal.pause()"
    )
    with pytest.raises(LabError, match=r"hosts \[1\] were still running after 1 s(.|\n)*here"):
        lab.run({0: ["true"], 1: [sys.executable, "-c", code]}, timeout_s=1)
    assert subprocess.run(["ip", "netns", "pids", lab.namespace(1)], capture_output=True, check=True).stdout == b""


def test_exit_codes_and_output_come_back(lab: Lab) -> None:
    ended = lab.run({0: ["sh", "-c", "echo out; echo err >&2; exit 3"], 1: ["true"]}, timeout_s=10)
    assert (ended[0].returncode, ended[0].stdout, ended[0].stderr) == (3, "out\n", "err\n")
    assert ended[1].returncode == 0


def test_two_labs_at_once_do_not_meet() -> None:
    with Lab(hosts=2, rate_mbit=100) as first, Lab(hosts=2, rate_mbit=100) as second:
        first.cut(1)
        assert connects(second, 5)
        assert not connects(first, 0.5)


def test_nothing_is_left_after_closing() -> None:
    with Lab(hosts=3) as lab:
        assert len(mine(os.getpid())) == 4
        lab.start(0, ["sleep", "600"])
    assert mine(os.getpid()) == []


def test_nothing_is_left_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), Lab(hosts=1):
        _ = 1 / 0
    assert mine(os.getpid()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS_A_LAB], cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert mine(holder.pid)
        holder.send_signal(number)
        holder.wait(timeout=20)
    assert mine(holder.pid) == []


def test_clean_removes_what_a_killed_lab_left_and_nothing_else(lab: Lab) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDS_A_LAB], cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.kill()
        holder.wait(timeout=20)
    left = mine(holder.pid)
    assert left
    assert set(left) <= set(clean())
    assert mine(holder.pid) == []
    assert len(mine(os.getpid())) == 3


def test_wrong_hosts_are_refused_with_the_numbers(lab: Lab) -> None:
    with pytest.raises(LabError, match=r"host 2 is not one of this lab's 0\.\.1"):
        lab.cut(2)
    with pytest.raises(LabError, match="not 0"):
        Lab(hosts=0)
