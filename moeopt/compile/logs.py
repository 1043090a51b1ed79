"""Logs of compiles: one that runs ends in ``.running``, one of a failure is kept without it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

_RUNNING: Final = ".running"
# Another machine may share the folder, whose processes are not seen here: it has written to its logs since.
_OLD_S: Final = 600.0


def running_log(log_dir: Path, name: str) -> Path:
    """Where a compile of this process writes, until it is over."""
    return log_dir / f"{os.getpid()}-{name}.log{_RUNNING}"


def keep_log(path: Path) -> str | None:
    """The log of a compile that has failed, under its lasting name; None where there is none."""
    try:
        return str(path.rename(path.with_name(path.name.removesuffix(_RUNNING))))
    except OSError:
        return None


def remove_stale_logs(log_dir: Path) -> None:
    """Removes logs of compiles whose process a power cut or a SIGKILL has ended."""
    for path in log_dir.glob(f"*.log{_RUNNING}"):
        owner = path.name.partition("-")[0]
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _OLD_S and owner.isdigit() and not _alive(int(owner)):
                path.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        pass
    return True
