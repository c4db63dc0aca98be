"""The workers of one host, without a coordinator."""

import os
import selectors
import signal
import sys

from launching import wait_until  # pyright: ignore[reportMissingImports]

from gradwire.launch.local import Workers
from gradwire.launch.output import Output


def test_a_signal_to_a_worker_that_has_just_ended_leaves_its_exit_to_be_read():
    with selectors.DefaultSelector() as selector:
        output = Output("rank0", range(1))
        workers = Workers([sys.executable, "-c", "raise SystemExit(7)"], selector=selector, output=output)
        pid = workers.start(0, dict(os.environ))
        wait_until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), "its end")
        workers.signal(signal.SIGHUP)
        assert [(rank, exit.code) for rank, exit in workers.reap()] == [(0, 7)]
        assert not workers.running
        output.close()
