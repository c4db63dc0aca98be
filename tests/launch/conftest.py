"""A fixture that starts launchers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import PREAMBLE, Launch, Launched  # pyright: ignore[reportMissingImports]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start `gradwire run OPTIONS script.py`; whatever is left at the end is killed."""
    launched: list[Launched] = []

    def start(
        body: str, *options: str, heartbeat: bool = True, arguments: tuple[str, ...] = (), **env: str
    ) -> Launched:
        script = tmp_path / "script.py"
        script.write_text((PREAMBLE if heartbeat else "import os, sys, time\n") + body)
        log = tmp_path / f"launcher-{len(launched)}.err"
        with log.open("w") as err, log.with_suffix(".out").open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "gradwire", "run", *options, str(script), *arguments],
                stdout=out,
                stderr=err,
                text=True,
                env={**os.environ, **env},
                cwd=tmp_path,
            )
        launched.append(Launched(tmp_path, process, log))
        return launched[-1]

    yield start
    for one in launched:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
            try:
                one.process.wait(5)
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait(5)
