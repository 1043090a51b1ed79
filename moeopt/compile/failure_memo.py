"""A file of compiles that failed, so that they cost nothing next time."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Final

from moeopt.core.provenance import KernelKey
from moeopt.core.trial import Failure

log = logging.getLogger(__name__)

TIMEOUTS_BELIEVED: Final = 2


def triton_cache_dir() -> Path:
    """Where Triton keeps its compiled kernels if nothing else is asked for."""
    explicit = os.environ.get("TRITON_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


class FailureMemo:
    """Failed compiles of one (kernel source, Triton version, compute capability).

    A compile that ran out of time may have met a busy machine: it counts as failed only once it did so
    in :data:`TIMEOUTS_BELIEVED` runs. The file is JSON lines and lies beside the compiled kernels, so
    that it travels with a shipped cache. Lines that cannot be read (a torn last one) are passed over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failures: dict[str, Failure] = {}
        self._timeouts: Counter[str] = Counter()
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("failed compiles of earlier runs are not known: %s", error)
            return
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self._note(entry["key"], Failure(entry["reason"], entry["message"], entry.get("log")))
            except (ValueError, KeyError, TypeError):
                log.debug("%s: passed over an unreadable line", path)

    @classmethod
    def open(cls, cache_dir: Path, kernel: KernelKey, capability: tuple[int, int]) -> FailureMemo:
        """The memo that belongs to a kernel, the installed Triton and a compute capability."""
        name = f"{kernel.name}-{kernel.source_hash}-triton{metadata.version('triton')}-sm{capability[0]}{capability[1]}"
        return cls(cache_dir / "moeopt" / f"failed-{name}.jsonl")

    def __len__(self) -> int:
        return len(self._failures)

    def get(self, key: str) -> Failure | None:
        """The failure of an earlier compile that is not worth another try, or None."""
        failure = self._failures.get(key)
        if failure is not None and failure.reason == "timeout" and self._timeouts[key] < TIMEOUTS_BELIEVED:
            return None
        return failure

    def add(self, key: str, failure: Failure) -> None:
        """Notes a failure, in memory and in the file."""
        self._note(key, failure)
        entry = {"key": key, "reason": failure.reason, "message": failure.message, "log": failure.log}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            log.warning("failed compiles are not remembered: %s", error)

    def _note(self, key: str, failure: Failure) -> None:
        self._failures[key] = failure
        self._timeouts[key] += failure.reason == "timeout"
