"""What every driver writes down: the machine, the versions, the command; and the two files NAME.json and NAME.md."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.cells import ROOT

RESULTS = ROOT / "benchmarks/results"


def about(module: str, network: str, repetitions: int) -> dict[str, str]:
    """Where and how a result was made, for people. module: the driver's, for the command."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")), "unknown")
    return {
        "machine": f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f} at the start",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "network": network,
        "repetitions": str(repetitions),
        "command": f"python -m {module} {shlex.join(sys.argv[1:])}".strip(),
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def write(result: dict[str, Any], text: str, folder: Path) -> None:
    """NAME.json with every number, NAME.md with ``text``; a driver that is stopped leaves the last whole ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for ending, content in ((".json", json.dumps(result, indent=1) + "\n"), (".md", text)):
        fresh = folder / f"{result['name']}{ending}.new"
        fresh.write_text(content)
        fresh.replace(folder / f"{result['name']}{ending}")


def read(path: Path) -> dict[str, Any]:
    """A result that ``write`` left; an empty one if there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def say(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr, flush=True)
