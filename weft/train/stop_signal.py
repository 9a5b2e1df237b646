"""StopSignal: turn Ctrl-C and SIGTERM into a request to stop after the step; a second one acts at once."""

from __future__ import annotations

import signal
import threading
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """`requested` becomes True inside `with`, and only in the main thread, which receives signals."""

    requested = False

    def __enter__(self) -> StopSignal:
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._request) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _request(self, number: int, _frame: Any) -> None:
        if self.requested:
            signal.signal(number, self._handlers[number])
            signal.raise_signal(number)
        self.requested = True
