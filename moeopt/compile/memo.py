"""A file of compiles that failed, so that they cost nothing next time."""

from __future__ import annotations

import json
import logging
import os
from importlib import metadata
from pathlib import Path

from moeopt.kernels.base import KernelKey
from moeopt.measure.base import Failure

log = logging.getLogger(__name__)


def triton_cache_dir() -> Path:
    """Where Triton keeps its compiled kernels if nothing else is asked for."""
    explicit = os.environ.get("TRITON_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


class FailureMemo:
    """Failed compiles of one (kernel source, Triton version, compute capability).

    A JSON-lines file beside the compiled kernels, so that it travels with a shipped cache. Lines
    that cannot be read (a torn last one) are passed over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failures: dict[str, Failure] = {}
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self._failures[entry["key"]] = Failure(entry["reason"], entry["message"], entry.get("log"))
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
        """The failure of an earlier compile, or None."""
        return self._failures.get(key)

    def add(self, key: str, failure: Failure) -> None:
        """Notes a failure, in memory and in the file."""
        self._failures[key] = failure
        entry = {"key": key, "reason": failure.reason, "message": failure.message, "log": failure.log}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            log.warning("failed compiles are not remembered: %s", error)
