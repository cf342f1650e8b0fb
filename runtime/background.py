"""Work that goes on while the caller runs on the default: one thread, one verification after another."""

from __future__ import annotations

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable

#: Seconds that the end of the process waits for a verification in hand.
_PATIENCE_S = 10.0

_all: weakref.WeakSet[Background] = weakref.WeakSet()


class Background:
    """Runs functions one after another in a daemon thread, which starts with the first of them.

    Two verifications at a time would disturb each other's clock. What waits at the end of the process is dropped: it can be
    had again. A forked child starts with nothing to do and a thread of its own.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._idle = threading.Condition(self._guard)
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()
        self._open = 0
        self._closed = False
        _all.add(self)

    def submit(self, task: Callable[[], None]) -> None:
        """Run a function when those before it are done. It must not raise."""
        if os.getpid() != self._owner:
            self.__init__()  # type: ignore[misc]  # locks of the parent may be held by threads that the child lacks
        with self._guard:
            if self._closed:
                return
            self._open += 1
            self._tasks.put(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kernelcast-verify", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left to do. Returns whether that is so."""
        if os.getpid() != self._owner:
            return True
        with self._guard:
            return self._idle.wait_for(lambda: not self._open or self._closed, timeout_s)

    def close(self) -> None:
        """Drop what waits, and give what runs some seconds to end."""
        if os.getpid() != self._owner:
            return
        with self._guard:
            self._closed = True
            self._idle.notify_all()
        self._tasks.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE_S)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._closed:
            try:
                task()
            finally:
                with self._guard:
                    self._open -= 1
                    if not self._open:
                        self._idle.notify_all()


def _close_all() -> None:
    for each in list(_all):
        each.close()


atexit.register(_close_all)
