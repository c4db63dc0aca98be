"""`Lane`: one thread that runs a group's collectives in one fixed order."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable

Task = Callable[[], object]


class Lane:
    """Runs tasks one after another, in the order of ``submit``, beside the training thread.

    After a task raised, later ones are dropped, and whoever waits next raises the first error, once. The thread starts
    with the first task and ends with ``close``.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._markers: set[Task] = set()
        self._error: BaseException | None = None

    def submit(self, task: Task) -> None:
        """Queue ``task``; returns at once."""
        if self._thread is None:
            context = contextvars.copy_context()
            self._thread = threading.Thread(target=context.run, args=(self._run,), name=self._name, daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def marker(self) -> Callable[[], None]:
        """A function that waits until every task submitted before now has ended, and raises the first error among them."""
        passed = self._passed()

        def wait() -> None:
            passed()
            error, self._error = self._error, None
            if error is not None:
                raise error

        return wait

    def settle(self) -> None:
        """Wait until every task submitted so far has ended; an error is left to whoever drains next."""
        self._passed()()

    def _passed(self) -> Callable[[], None]:
        if self._thread is None:
            return lambda: None
        passed = threading.Event()
        mark = passed.set
        self._markers.add(mark)
        self._tasks.put(mark)

        def wait() -> None:
            passed.wait()
            self._markers.discard(mark)

        return wait

    def drain(self) -> None:
        """Wait until every task submitted so far has ended; raise the first error among them."""
        self.marker()()

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread after the tasks already queued; one blocked in a dead collective is left to the process."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            thread.join(timeout=timeout_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self._error is not None and task not in self._markers:
                continue
            try:
                task()
            except BaseException as error:  # handed to the training thread by drain
                self._error = error
