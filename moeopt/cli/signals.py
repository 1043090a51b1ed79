"""Signals that end commands which run for long."""

from __future__ import annotations

import signal
from types import FrameType


def end_on_sigterm() -> None:
    """SIGTERM ends a command as Ctrl-C does: what it has is kept."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
