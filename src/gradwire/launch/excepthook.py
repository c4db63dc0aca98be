"""An uncaught exception reaches the coordinator, and the user sees the cause once and no victims' tracebacks."""

from __future__ import annotations

import sys
import threading
import traceback
from types import TracebackType

from gradwire.errors import PeerError
from gradwire.launch.heartbeat import Heartbeat

__all__ = ["install_excepthook"]

VERDICT_WAIT_S = 2.0


def install_excepthook(heartbeat: Heartbeat) -> None:
    """Send uncaught exceptions of any thread by `heartbeat.fail`; the hooks there were print what is to be printed.

    Under gradwire's launcher a rank prints nothing that the coordinator was told: the launcher prints the report. Under
    another launcher (`heartbeat.reports`) the failing rank prints its own traceback, and a victim of another rank one
    line. A traceback that nobody else will show is always printed here.
    """
    main_hook, thread_hook = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _handled(heartbeat, error):
            main_hook(kind, error, trace)

    def hook_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or not _handled(heartbeat, args.exc_value):
            thread_hook(args)

    sys.excepthook, threading.excepthook = hook, hook_thread


def _handled(heartbeat: Heartbeat, error: BaseException) -> bool:
    """Tell the coordinator; whether somebody else shows the error."""
    if not isinstance(error, Exception):
        # KeyboardInterrupt: the launcher names the signal
        return isinstance(error, SystemExit) or not heartbeat.reports
    victim = isinstance(error, PeerError)
    told = heartbeat.fail("".join(traceback.format_exception(error)), victim=victim)
    if not heartbeat.reports:
        return told or (victim and heartbeat.verdict() is not None)
    verdict = heartbeat.verdict(VERDICT_WAIT_S) if victim else None
    return verdict is not None and verdict.rank != heartbeat.rank
