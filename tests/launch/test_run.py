"""`gradwire run` with real processes: how a job ends, and what is said."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from launching import is_alive, wait_until  # pyright: ignore[reportMissingImports]

PLAIN = """
rank = os.environ["RANK"]
if rank == "1":
    {end}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(3)", 3, "exited with code 3"),
        ("raise ValueError('boom')", 1, "failed: ValueError: boom"),
        ("os.kill(os.getpid(), 9)", 1, "was killed by SIGKILL"),
    ],
)
def test_a_plain_script_that_fails_ends_the_job_within_two_seconds(launch, end, code, words):
    start = time.monotonic()
    job = launch(PLAIN.format(end=end), "-n", "2", heartbeat=False)
    assert job.wait(10) == code
    assert time.monotonic() - start < 4.0  # two seconds, and starting three interpreters on a busy machine
    first = job.err().splitlines()[0]
    assert first.startswith("gradwire: rank 1 on ") and words in first
    assert job.err().count("ValueError: boom\n") <= 1


def test_a_good_run_is_silent_and_returns_zero(launch):
    job = launch("print('hello', os.environ['RANK'], sys.argv[1:])", "-n", "2", heartbeat=False, arguments=("-x", "1"))
    assert job.wait() == 0
    assert job.out() == "hello 0 ['-x', '1']\n"
    assert job.err() == ""


def test_all_ranks_output_has_prefixes(launch):
    job = launch("print('out'); print('err', file=sys.stderr)", "-n", "2", "--output", "all", heartbeat=False)
    assert job.wait() == 0
    assert sorted(job.out().splitlines()) == ["[0] out", "[1] out"]
    assert sorted(job.err().splitlines()) == ["[0] err", "[1] err"]


def test_a_folder_of_logs_is_private(launch, tmp_path):
    logs = tmp_path / "logs"
    job = launch("print('out', os.environ['RANK'])", "-n", "2", "--output", str(logs), heartbeat=False)
    assert job.wait() == 0
    assert [(logs / f"rank-{rank}.log").read_text() for rank in range(2)] == ["out 0\n", "out 1\n"]
    assert job.out() == "out 0\n"
    assert logs.stat().st_mode & 0o777 == 0o700


def test_an_exception_is_shown_once_with_its_step_and_victims_are_silent(launch):
    job = launch("if rank == 1: raise ValueError('boom')\nwait_for_peers()", "-n", "2")
    assert job.wait() == 1
    lines = job.err().splitlines()
    assert lines[0].startswith("gradwire: rank 1 on testhost failed at step 12: ValueError: boom (pid ")
    assert job.err().count("Traceback") == 1
    assert "PeerError" not in job.err()


def test_a_killed_rank_is_named_within_a_second(launch):
    job = launch("wait_for_peers()", "-n", "3")
    pids = job.pids(3)
    time_of_death = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: "\n" in job.err(), "the report", timeout_s=5)
    assert time.monotonic() - time_of_death < 1.0
    assert job.wait(5) == 1
    # The step is that of the last beat, up to half a second ago.
    assert re.match(r"gradwire: rank 1 on testhost was killed by SIGKILL at about step (0|12) \(pid ", job.err())
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("way", ["os._exit(0)", "heart.leave('sys.exit(0)')", "sys.exit(0)"])
def test_a_rank_that_leaves_early_is_named_while_another_waits(launch, way):
    body = f"""
if rank == 1:
    heart.arrive("data/gradients", "all_reduce", 56); heart.complete("data/gradients"); time.sleep(0.6)
    {way}
else:
    heart.arrive("data/gradients", "all_reduce", 57)
    wait_for_peers()
"""
    job = launch(body, "-n", "2")
    assert job.wait() == 1
    first = job.err().splitlines()[0]
    assert first.startswith("gradwire: rank 1 on testhost left at step 12 (")
    assert "while rank 0 on testhost waits in all_reduce #57 of data/gradients" in first


def test_a_note_of_any_rank_is_shown(launch):
    job = launch("heart.note(f'of {rank}')\nheart.leave(None)", "-n", "2")
    assert job.wait() == 0
    assert sorted(job.err().splitlines()) == ["gradwire: of 0", "gradwire: of 1"]


def test_a_clean_end_releases_everybody_together(launch):
    body = """
if rank == 1: time.sleep(0.5)
(here / f"leaving-{rank}").write_text(str(time.monotonic()))
assert heart.leave(None) is None
(here / f"left-{rank}").write_text(str(time.monotonic()))
heart.close()
"""
    job = launch(body, "-n", "2")
    assert job.wait() == 0
    assert job.err() == ""
    assert float((job.folder / "left-0").read_text()) >= float((job.folder / "leaving-1").read_text())


@pytest.mark.parametrize(("number", "code", "within_s"), [(signal.SIGTERM, 143, 2.5), (signal.SIGINT, 130, 5.5)])
def test_a_signal_to_the_launcher_ends_every_worker(launch, number, code, within_s):
    job = launch("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)", "-n", "2")
    pids = job.pids(2)
    start = time.monotonic()
    job.process.send_signal(number)
    assert job.wait(10) == code
    assert time.monotonic() - start < within_s
    assert not any(is_alive(pid) for pid in pids)
    assert job.err().startswith(f"gradwire: {number.name}: ending 2 workers")


def test_a_signal_is_told_once_although_the_workers_end_one_by_one(launch):
    job = launch("try: time.sleep(60)\nexcept KeyboardInterrupt: time.sleep(0.3 * rank); os._exit(0)", "-n", "4")
    job.pids(4)
    job.process.send_signal(signal.SIGINT)
    assert job.wait(10) == 130
    assert [line for line in job.err().splitlines() if "ending" in line] == ["gradwire: SIGINT: ending 4 workers"]


def test_no_worker_outlives_a_killed_launcher(launch):
    job = launch("import time\nwhile True: time.sleep(0.1)", "-n", "2")
    pids = job.pids(2)
    job.process.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "the end of the workers", timeout_s=2)


def test_children_of_a_worker_are_ended_with_it(launch):
    body = """
import subprocess
child = subprocess.Popen(["sleep", "60"])
(here / "child").write_text(str(child.pid))
os._exit(0 if rank == 0 else 3)
"""
    job = launch(body, "-n", "1")
    assert job.wait() == 0
    child = int((job.folder / "child").read_text())
    wait_until(lambda: not is_alive(child), "the end of the grandchild", timeout_s=2)


HANG = """
def stuck():
    end = time.monotonic() + 60
    while not (here / "go").exists() and time.monotonic() < end:
        time.sleep(0.01)
if rank == 1:
    heart.arrive("data/gradients", "all_reduce", 56); heart.complete("data/gradients")
    stuck()
heart.arrive("data/gradients", "all_reduce", 57)
if rank == 0: stuck()
heart.complete("data/gradients")
heart.leave(None)
"""


def test_a_hang_in_python_is_reported_with_its_stack_and_taken_back(launch):
    job = launch(HANG, "-n", "2", GRADWIRE_HANG_S="1")
    wait_until(lambda: "in stuck" in job.err(), "the report", timeout_s=8)
    first = job.err().splitlines()[0]
    assert "rank 1 on testhost is missing from all_reduce #57 of data/gradients at step 12" in first
    assert "rank 1 (pid" in job.err() and "is at (most recent call last)" in job.err()
    (job.folder / "go").write_text("")
    assert job.wait() == 0
    assert "is back after" in job.err().splitlines()[-1]


def test_a_stopped_process_is_reported_as_stopped(launch):
    job = launch(HANG, "-n", "2", GRADWIRE_HANG_S="1")
    pids = job.pids(2)
    os.kill(pids[1], signal.SIGSTOP)
    wait_until(lambda: "process is stopped (SIGSTOP)" in job.err(), "the report", timeout_s=8)
    assert "rank 1 on testhost is missing from all_reduce #57" in job.err()
    os.kill(pids[1], signal.SIGCONT)
    (job.folder / "go").write_text("")
    assert job.wait() == 0
    assert "is back after" in job.err()


def test_a_hang_beyond_the_timeout_ends_the_job(launch):
    job = launch(HANG, "-n", "2", "--timeout", "2")
    assert job.wait(15) == 1
    assert "rank 1 on testhost is missing from all_reduce #57" in job.err()
    assert "(timeout 2 s)" in job.err()


def test_a_worker_that_ignores_the_stop_is_ended(launch):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank == 0: os._exit(3)\nwhile True: pass"
    job = launch(body, "-n", "2")
    pids = job.pids(2)
    assert job.wait(10) == 3
    assert not any(is_alive(pid) for pid in pids)


def test_the_launcher_imports_no_torch(launch, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    job = launch("pass", "-n", "1", heartbeat=False, PYTHONPATH=path)
    assert job.wait() == 0


def test_sockets_are_not_inherited_by_what_a_worker_runs(launch):
    body = """
import subprocess
links = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, timeout=10).stdout
(here / f"links-{rank}").write_text(links)
"""
    job = launch(body, "-n", "2")
    assert job.wait() == 0
    assert not any("socket:" in (job.folder / f"links-{rank}").read_text() for rank in range(2))


def test_a_closed_console_does_not_end_the_job(launch):
    body = """
import subprocess
for _ in range(2000): print("x" * 80)
(here / "finished").write_text("")
"""
    job = launch("pass", "-n", "1", heartbeat=False)
    assert job.wait() == 0
    (job.folder / "script.py").write_text("from pathlib import Path\nhere = Path(__file__).parent\n" + body)
    command = f"{sys.executable} -m gradwire run script.py | head -n 1"
    done = subprocess.run(command, shell=True, cwd=job.folder, capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr) == ("x" * 80 + "\n", "gradwire: stdout is closed; the job goes on without it\n")
    assert (job.folder / "finished").exists()


def test_nohup_survives_the_end_of_the_terminal(launch):
    job = launch("pass", "-n", "1", heartbeat=False)
    assert job.wait() == 0
    (job.folder / "script.py").write_text("import os, signal\nos.kill(os.getppid(), signal.SIGHUP)\n")
    command = [sys.executable, "-m", "gradwire", "run", "script.py"]
    for ignore, code in ((True, 0), (False, 129)):
        restore = signal.SIG_IGN if ignore else signal.SIG_DFL
        done = subprocess.run(
            command, cwd=job.folder, timeout=20, preexec_fn=lambda how=restore: signal.signal(signal.SIGHUP, how)
        )  # fmt: skip
        assert done.returncode == code
