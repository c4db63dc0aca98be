"""Where the threads of this process are."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from gradwire.launch.verdict import MAX_FRAMES, Frame, shortened, stack_text

__all__ = ["all_stacks", "thread_stack"]


def thread_stack(ident: int) -> list[Frame]:
    """The frames of one thread, innermost first, 30 at most; none if it has ended."""
    return _frames(sys._current_frames().get(ident))  # pyright: ignore[reportPrivateUsage]


def _frames(frame: FrameType | None) -> list[Frame]:
    """Innermost first, 30 at most."""
    frames: list[Frame] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        line = frame.f_lineno or frame.f_code.co_firstlineno  # None between two lines
        frames.append((frame.f_code.co_filename, line, frame.f_code.co_qualname))
        frame = frame.f_back
    return frames


def all_stacks(owner: int) -> str:
    """Every thread's stack but gradwire's own, the script's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    foreign = [ident for ident in frames if not names.get(ident, "").startswith("gradwire")]
    order = sorted(foreign, key=lambda ident: (ident != owner, ident))
    texts = [f"  {names.get(ident, ident)}:\n{stack_text(_frames(frames[ident]), indent='    ')}" for ident in order]
    return shortened("\n".join(texts))
