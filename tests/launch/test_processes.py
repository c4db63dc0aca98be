"""What /proc and cgroups tell."""

import os
import signal
import subprocess

import pytest
from launching import wait_until  # pyright: ignore[reportMissingImports]

from gradwire.launch.processes import MemoryKills, is_suspended
from gradwire.launch.verdict import Exit, last_line, number_list


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("inside_container", [False, True])
def test_a_memory_kill_is_counted_and_the_limit_named(tmp_path, version, inside_container):
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    proc.write_text("4:cpu,memory:/job/one\n" if version == 1 else "0::/job/one\n")
    mount = root / "memory" if version == 1 else root
    folder = mount if inside_container else mount / "job" / "one"
    folder.mkdir(parents=True)
    counter = folder / ("memory.oom_control" if version == 1 else "memory.events")
    limit = folder if inside_container or version == 1 else folder.parent
    (limit / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(f"{512 << 20}\n")
    counter.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    kills = MemoryKills.read(proc=proc, root=root)
    assert kills.note() == ""
    counter.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
    assert kills.note() == "out of memory (the memory limit of its cgroup is 512 MiB)"


def test_without_cgroups_nothing_is_claimed(tmp_path):
    assert MemoryKills.read(proc=tmp_path / "none", root=tmp_path).note() == ""


def test_a_stopped_process_is_seen():
    process = subprocess.Popen(["sleep", "30"])
    try:
        assert not is_suspended(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: is_suspended(process.pid), "the stop")
    finally:
        process.kill()
        process.wait(5)
    assert not is_suspended(process.pid)


def test_ends_are_described():
    assert (
        Exit(code=-9, note="out of memory").describe(" at step 2") == "was killed by SIGKILL at step 2: out of memory"
    )
    assert Exit(code=-70).describe("") == "was killed by signal 70"
    assert Exit(code=1, tail="Traceback (most recent call last):\n  x\nE: y\n").describe("") == "failed: E: y"
    assert Exit(code=1, tail="no trace").describe("") == "exited with code 1"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Traceback (most recent call last):\n  File\nValueError: boom\n", "ValueError: boom"),
        ("Traceback (most recent call last):\n  File\na.b.Error: one\ntwo: (three)\n", "a.b.Error: one"),
        ("", "an exception without text"),
    ],
)
def test_the_exceptions_line_is_found(text, line):
    assert last_line(text) == line


def test_ranks_are_listed_in_words():
    assert [number_list(ranks) for ranks in ([1], [2, 0], [2, 0, 1])] == ["rank 1", "ranks 0 and 2", "ranks 0, 1 and 2"]
