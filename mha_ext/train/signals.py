"""Ctrl-C and its relatives, turned into a wish that the training loop grants after the step at hand.

SIGPIPE, which comes when the reader of the output has gone (`| head`), is one of them.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE") if hasattr(signal, name)]


class StopRequest:
    """While entered, `signal_number` is that of the first stop signal, or 0; a second one interrupts at once."""

    def __init__(self) -> None:
        self.signal_number = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in STOP_SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number:
            raise KeyboardInterrupt
        self.signal_number = number
