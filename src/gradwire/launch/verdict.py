"""What the coordinator decides, and how it is written out: `Verdict`, stacks, and the first lines people read."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gradwire.launch.wire import Message, get_int, get_text

__all__ = ["Exit", "Frame", "Verdict", "stack_text"]

Frame = tuple[str, int, str]
MAX_FRAMES = 30
MAX_TEXT = 60_000  # characters; JSON may need 12 bytes for one, and a frame has 1 MiB


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why the job stops: the root cause, named once.

    rank: the culprit. step: where it was, None if it never said. headline: what, who, where, in one line.
    cure: what to do, or "". detail: traceback, stacks or last lines of stderr, or "". exit_code: the launcher's.
    """

    rank: int
    host: str
    step: int | None
    headline: str
    cure: str = ""
    detail: str = ""
    exit_code: int = 1

    def text(self) -> str:
        """The whole report: headline, cure, detail."""
        return "\n".join(part.rstrip("\n") for part in (self.headline, self.cure, self.detail) if part)

    def message(self) -> Message:
        """As a `stop` message."""
        return {"kind": "stop", **asdict(self), "detail": shortened(self.detail)}

    @classmethod
    def parse(cls, message: Message) -> Verdict:
        """From a `stop` message; WireError if it is none."""
        step = None if message.get("step") is None else get_int(message, "step")
        texts = {name: get_text(message, name) for name in ("host", "headline", "cure", "detail")}
        return cls(rank=get_int(message, "rank"), step=step, exit_code=get_int(message, "exit_code"), **texts)


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a worker process ended, as its launcher saw it.

    code: exit code, or -N for signal N, as subprocess has it. note: what else is known, e.g. an out-of-memory kill.
    tail: its last lines on stderr. shown: they are on the user's console already.
    """

    code: int
    note: str = ""
    tail: str = ""
    shown: bool = False

    def message(self, rank: int) -> Message:
        """As an `exited` message."""
        return {"kind": "exited", "rank": rank, **asdict(self)}

    @classmethod
    def parse(cls, message: Message) -> Exit:
        """From an `exited` message; WireError if it is none."""
        code = get_int(message, "code", low=-64, high=255)
        texts = {name: get_text(message, name) for name in ("note", "tail")}
        return cls(code=code, shown=message.get("shown") is True, **texts)

    def describe(self, at: str) -> str:
        """`was killed by SIGKILL at step 12`, `failed: ValueError: boom` or `exited with code 3`; at: ` at step 12`."""
        note = f": {self.note}" if self.note else ""
        if self.code < 0:
            return f"was killed by {signal_name(-self.code)}{at}{note}"
        if self.code == 1 and "Traceback (most recent call last):" in self.tail:
            return f"failed{at}: {last_line(self.tail)}"
        return f"exited with code {self.code}{at}{note}"

    def exit_code(self) -> int:
        """The launcher's exit code for it: a script's own code, 1 for a signal."""
        return self.code if self.code > 0 else 1

    def cure(self) -> str:
        """What to do, where the way it died tells."""
        if "memory" in self.note:
            return "cure: a smaller batch_size, more accumulation, fewer ranks on this host, or a higher memory limit"
        if self.code == -signal.SIGKILL:
            return "cure: if nobody killed it, look for an out-of-memory kill in the kernel's log (dmesg)"
        return ""


def shortened(text: str) -> str:
    """At most 60,000 characters: the start and the end."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n... {len(text) - MAX_TEXT} characters left out ...\n{text[-half:]}"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 70` where there is no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def who(rank: int, host: str) -> str:
    """`rank 1 on HOST`, or `rank 1` while its host is unknown."""
    return f"rank {rank} on {host}" if host else f"rank {rank}"


def at_step(step: int | None) -> str:
    """` at step 12`, or nothing."""
    return "" if step is None else f" at step {step}"


def last_line(traceback_text: str) -> str:
    r"""The line of a traceback that names the exception: the first after the last stack.

    >>> last_line("Traceback (most recent call last):\n  File ...\nValueError: boom\nand more\n")
    'ValueError: boom'
    """
    before, header, after = traceback_text.rpartition("Traceback (most recent call last):\n")
    lines = [line for line in after.splitlines() if line.strip() and not line.startswith((" ", "\t"))]
    if not lines:
        return (before.strip().splitlines() or ["an exception without text"])[-1][:300]
    return (lines[0] if header else lines[-1])[:300]


def stack_text(frames: Sequence[Frame], *, indent: str = "  ") -> str:
    """Frames, given innermost first, written like a traceback: most recent call last."""
    lines = [f'{indent}File "{file}", line {line}, in {function}' for file, line, function in reversed(frames)]
    return "\n".join(lines)


def number_list(numbers: Sequence[int]) -> str:
    """`rank 1`, `ranks 0 and 2`, `ranks 0, 1 and 2`."""
    words = [str(number) for number in sorted(numbers)]
    if len(words) == 1:
        return f"rank {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"


def rank_range(ranks: range) -> str:
    """`rank 1`, or `ranks 2 to 5`."""
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start} to {ranks.stop - 1}"
