"""The commands a lab is made of, the names it uses, and how leftovers are found and removed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

NAME = re.compile(r"gwlab-(\d+)-\d+-\w+")  # gwlab-PID-COUNT-h0, -sw: the pid tells whether somebody still uses it


class LabError(Exception):
    """The lab cannot be built or used; the message says why and what to do."""


def why_not() -> str | None:
    """Why a lab cannot be built here, or None.

    Returns one line with the cure.
    """
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        return "a lab needs Linux's network namespaces"
    if os.geteuid() != 0:
        return "a lab needs root, because it makes network namespaces; run it with sudo"
    for tool in ("ip", "tc", "taskset"):
        if shutil.which(tool) is None:
            return f"a lab needs `{tool}`; on Debian: apt-get install iproute2 util-linux"
    return None


def call(*words: str | int) -> str:
    """Run one command and return what it printed; LabError with its own words if it fails."""
    command = [str(word) for word in words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def namespaces() -> list[str]:
    """The lab namespaces that exist on this machine, anybody's."""
    listed = [line.split()[0] for line in call("ip", "netns", "list").splitlines() if line.strip()]
    return [name for name in listed if NAME.fullmatch(name)]


def remove(namespace: str) -> None:
    """End what still runs in a lab namespace and delete it, with every interface in it."""
    if not NAME.fullmatch(namespace):
        raise LabError(f"{namespace} is not a lab's namespace; nothing removed")
    for pid in call("ip", "netns", "pids", namespace).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended by itself meanwhile
    call("ip", "netns", "delete", namespace)


def clean() -> list[str]:
    """Remove what labs of dead processes left behind (after a SIGKILL); returns the namespaces removed."""
    left = [name for name in namespaces() if not Path(f"/proc/{_owner(name)}").exists()]
    for name in left:
        remove(name)
    return left


def _owner(namespace: str) -> str:
    match = NAME.fullmatch(namespace)
    if match is None:
        raise LabError(f"{namespace} is not a lab's namespace")
    return match.group(1)
