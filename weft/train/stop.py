"""Stop: Ctrl-C and SIGTERM as a wish that is granted after the step; a second one is granted at once."""

from __future__ import annotations

import signal
import threading
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """`asked` becomes True; inside `with` only, and only in the main thread, where signals arrive."""

    asked = False

    def __enter__(self) -> Stop:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: Any) -> None:
        before = self._before[number]
        if self.asked:
            signal.signal(number, before)
            signal.raise_signal(number)
        self.asked = True
