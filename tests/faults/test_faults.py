"""Each fault looks as it should: named on the first line, within its bound, with nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests.faults.scripts import (
    descendants,
    environment,
    finish,
    gone_within,
    run,
    start,
    wait_for_step,
    write_script,
)

HOST = socket.gethostname()


def test_a_healthy_run_ends_with_0(tmp_path: Path) -> None:
    ended = run("run", "-n", "2", "--output", "all", write_script(tmp_path))
    assert ended.code == 0
    assert "[0] DONE 0 125" in ended.out
    assert "[1] DONE 1 125" in ended.out
    assert ended.err == ""


def test_a_killed_worker_is_named_with_its_signal(tmp_path: Path) -> None:
    ended = run("run", "-n", "3", write_script(tmp_path, fault="os.kill(os.getpid(), 9)"))
    assert ended.code == 1
    assert f"rank 1 on {HOST} was killed by SIGKILL" in ended.first_line
    assert ended.seconds_after_step < 5
    assert "Traceback" not in ended.err
    assert "terminate called" not in ended.err


def test_an_exception_shows_one_traceback_the_cause(tmp_path: Path) -> None:
    ended = run("run", "-n", "3", write_script(tmp_path, fault="raise ValueError('boom')"))
    assert ended.code == 1
    assert f"rank 1 on {HOST} failed at step 29: ValueError: boom" in ended.first_line
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert "PeerError" not in ended.err
    assert ended.seconds_after_step < 4


def test_case_23_an_exception_before_the_first_synchronisation(tmp_path: Path) -> None:
    prelude = "import os\nif os.environ.get('RANK') == '1': raise ValueError('early')\nprint('AT STEP', os.getpid(), flush=True)"
    ended = run("run", "-n", "2", write_script(tmp_path, prelude=prelude))
    assert ended.code == 1
    assert "rank 1" in ended.first_line
    assert "ValueError: early" in ended.err
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert ended.seconds_after_step < 2 + 3  # the bound, and the import of torch by the other rank


@pytest.mark.parametrize("code", [0, 3])
def test_an_early_exit_is_named(tmp_path: Path, code: int) -> None:
    ended = run("run", "-n", "2", write_script(tmp_path, fault=f"sys.exit({code})"))
    assert "rank 1" in ended.first_line
    assert ended.code == (code or 1)
    if code == 0:
        assert "left at step 29" in ended.first_line
    assert ended.seconds_after_step < 5


def test_the_scripts_own_exit_code_is_the_launchers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.exit(7)\n")
    assert finish(start("run", "-n", "2", script)).code == 7


def test_case_24_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    num_workers = 2
    process = start("run", "-n", "2", write_script(tmp_path, num_workers=num_workers, epochs=200))
    wait_for_step(process)
    family = descendants(process.pid)
    assert len(family) >= 2 + 2 * num_workers
    process.kill()
    assert gone_within(family, 2.0) == set()
    finish(process)


@pytest.mark.parametrize(("number", "code", "bound_s"), [(signal.SIGTERM, 143, 2.0), (signal.SIGINT, 130, 5.0)])
def test_signals_end_everything(tmp_path: Path, number: signal.Signals, code: int, bound_s: float) -> None:
    process = start("run", "-n", "2", write_script(tmp_path, num_workers=1, epochs=200))
    wait_for_step(process)
    family = descendants(process.pid)
    process.send_signal(number)
    began_s = time.monotonic()
    ended = finish(process, timeout_s=20)
    assert time.monotonic() - began_s < bound_s
    assert ended.code == code
    assert "Traceback" not in ended.err
    assert gone_within(family, 0.5) == set()


def test_a_hang_is_reported_with_rank_collective_and_stack(tmp_path: Path) -> None:
    process = start("run", "-n", "2", write_script(tmp_path, fault="time.sleep(7)"))
    wait_for_step(process)
    ended = finish(process, timeout_s=40)
    assert ended.code == 0  # a hang that ends is told, not killed
    assert "rank 1" in ended.first_line
    assert "all_reduce #" in ended.first_line
    assert "data/gradients" in ended.first_line
    assert "in fault" in ended.err
    assert "is back after" in ended.err
    assert "gradwire-heartbeat" not in ended.err


def test_a_hang_beyond_the_timeout_stops_the_job(tmp_path: Path) -> None:
    ended = run("run", "-n", "2", "--timeout", "8", write_script(tmp_path, fault="time.sleep(600)"), timeout_s=40)
    assert ended.code == 1
    assert "in fault" in ended.err
    assert ended.seconds_after_step < 15


def test_a_stopped_process_is_named(tmp_path: Path) -> None:
    process = start(
        "run", "-n", "2", "--output", "all", "--timeout", "8", write_script(tmp_path, fault="os.kill(os.getpid(), 19)")
    )
    wait_for_step(process, 2)
    ended = finish(process, timeout_s=40)
    assert ended.code == 1
    assert "rank 1" in ended.first_line
    assert "SIGSTOP" in ended.err


def test_models_that_differ_are_refused_before_the_first_step(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        model="model = torch.nn.Sequential(*([torch.nn.Linear(4, 16), torch.nn.Linear(16, 1)][: 2 - world.rank]))",
        prelude="print('AT STEP 0', flush=True)",
    )
    ended = run("run", "-n", "2", script)
    assert ended.code == 1
    assert "only rank 0 has parameter 2 (1.weight (1, 16) float32 trained)" in ended.err
    assert "MismatchError" in ended.first_line


def test_plans_that_differ_are_refused(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, distribute=", plan=gw.Plan(accumulate=1 + world.rank)", prelude="print('AT STEP 0', flush=True)"
    )
    ended = run("run", "-n", "2", script)
    assert ended.code == 1
    assert "ranks disagree on the plan" in ended.err


def test_a_killed_loader_worker_is_named(tmp_path: Path) -> None:
    fault = "os.kill(__import__('multiprocessing').active_children()[0].pid, 9)"
    ended = run("run", "-n", "2", write_script(tmp_path, fault=fault, num_workers=2, epochs=4))
    assert ended.code == 1
    assert "rank 1" in ended.first_line
    assert "DataError" in ended.err
    assert "worker" in ended.err


def test_a_nan_is_skipped_and_named(tmp_path: Path) -> None:
    ended = run(
        "run",
        "-n",
        "2",
        write_script(tmp_path, loss="loss = loss * (float('nan') if step == STEP and world.rank == 1 else 1)"),
    )
    assert ended.code == 0
    assert "step 29 skipped on all ranks" in ended.out
    assert "rank 1: 0.weight" in ended.out


def test_a_nan_stops_the_run_if_told_to(tmp_path: Path) -> None:
    loss = "loss = loss * (float('nan') if step == STEP and world.rank == 1 else 1)"
    ended = run("run", "-n", "2", "--on-nonfinite", "stop", write_script(tmp_path, loss=loss))
    assert ended.code == 1
    assert "NonFiniteError" in ended.first_line
    assert "rank 1: 0.weight" in ended.err


def foreign(rank: int, port: int) -> dict[str, str]:
    """What srun-like launchers set."""
    return environment(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run_foreign(script: Path, rank: int, port: int):
    import subprocess

    return subprocess.Popen(
        [sys.executable, str(script)],
        env=foreign(rank, port),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_script_started_by_hand_trains(tmp_path: Path) -> None:
    script, port = write_script(tmp_path), free_port()
    for process in [run_foreign(script, rank, port) for rank in (0, 1)]:
        ended = finish(process)
        assert ended.code == 0, ended.err
        assert "DONE" in ended.out


def test_two_jobs_on_one_port_are_refused(tmp_path: Path) -> None:
    script, port = write_script(tmp_path, epochs=300), free_port()
    first = [run_foreign(script, rank, port) for rank in (0, 1)]
    try:
        wait_for_step(first[0])
        second = run_foreign(script, 0, port)
        ended = finish(second)
        assert ended.code == 1
        assert f"port {port}" in ended.err
        stranger = finish(run_foreign(script, 1, port))
        assert stranger.code == 1
        assert "rank 1 at 127.0.0.1" in stranger.err
        assert "is taken by" in stranger.err
    finally:
        for process in first:
            process.kill()
            finish(process)


def test_under_a_foreign_launcher_the_victim_prints_one_line(tmp_path: Path) -> None:
    script, port = write_script(tmp_path, fault="raise ValueError('boom')"), free_port()
    victim, culprit = [run_foreign(script, rank, port) for rank in (0, 1)]
    assert "ValueError: boom" in finish(culprit).err
    ended = finish(victim)
    assert ended.code == 1
    assert "rank 1" in ended.err
    assert "Traceback" not in ended.err


def test_case_22_twenty_starts_and_kills_leave_nothing(tmp_path: Path) -> None:
    """Two here; `pytest -m slow` does the twenty."""
    _start_and_kill(tmp_path, 2)


@pytest.mark.slow
def test_case_22_in_full(tmp_path: Path) -> None:
    _start_and_kill(tmp_path, 20)


def _start_and_kill(folder: Path, times: int) -> None:
    script = write_script(folder, epochs=200)
    before = set(os.listdir("/dev/shm"))
    for _ in range(times):
        process = start("run", "-n", "2", script)
        wait_for_step(process)
        family = descendants(process.pid)
        process.kill()
        assert gone_within(family, 2.0) == set()
        finish(process)
    ended = run("run", "-n", "2", write_script(folder))
    assert ended.code == 0
    assert set(os.listdir("/dev/shm")) - before == set()
