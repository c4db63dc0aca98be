"""Signals to the launcher, as something that a selector can wait for."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from types import FrameType, TracebackType
from typing import Self

__all__ = ["Interrupted", "Signals"]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The launcher was told to end before the workers were started."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.number = number


class Signals:
    """Catches SIGINT, SIGTERM, SIGHUP and SIGCHLD while it is open; only in the main thread.

    received: the ending signals so far, in order.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> Self:
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        heeded = [
            number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN
        ]  # nohup, and jobs in scripts
        self._handlers = {number: signal.signal(number, self._note) for number in (*heeded, signal.SIGCHLD)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """For selectors: readable when a signal has come."""
        return self._reader.fileno()

    def clear(self) -> None:
        """Make it unreadable again."""
        try:
            os.read(self._reader.fileno(), 4096)
        except BlockingIOError:
            pass  # cleared already

    def pause(self, wait_s: float) -> None:
        """Wait; raises Interrupted when an ending signal comes or has come."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            if not self.received and selector.select(wait_s):
                self.clear()
        if self.received:
            raise Interrupted(self.received[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self.received.append(signal.Signals(number))
