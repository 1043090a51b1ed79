"""Runs tunes in forked children, so that a test can kill -9 them without paying for imports each time.

Reads one JSON line per run: {"storage", "log", "result"}; answers with the child's pid, and with
its exit status when it has ended. Each measurement is a line of the log, written before it is
handed over: time and job.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from moeopt.core.trial import Job, Measurement, Race, never_stop
from moeopt.distributed.board import share
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.storage.store import StudyStore
from moeopt.tuning.options import TuneOptions
from moeopt.tuning.tuner import Tuner

SECONDS_PER_JOB = 0.008


class SlowDevice(RecordedDevice):
    """Replays at the pace of a GPU and writes down what it was asked for."""

    def __init__(self, recording: Recording, log: Path) -> None:
        super().__init__(recording)
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        for measurement in super().measure(jobs, race):
            time.sleep(SECONDS_PER_JOB)
            job = measurement.job
            line = f"{time.time()} {job.cell.role} {job.cell.batch_size} {job.config}\n"
            os.write(self._log, line.encode())
            yield measurement


def run(recording: Recording, order: dict[str, str]) -> None:
    with StudyStore(order["storage"]) as store:
        device = SlowDevice(recording, Path(order["log"]))
        options = TuneOptions(batch_sizes=recording.batch_sizes[1::3], trials=10, seed=5)
        result = Tuner(device, store, options, share=share).run()
    Path(order["result"]).write_text(json.dumps(result.to_dict(), sort_keys=True))


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def main() -> None:
    recording = Recording.load(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory:  # a first run, so that children need not import, nor load
        names = {name: f"{directory}/{name}" for name in ("log", "result")}
        run(recording, {"storage": f"{directory}/first.db", **names})
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            run(recording, json.loads(line))
            os._exit(0)
        _say(pid)
        _, status = os.waitpid(pid, 0)
        _say(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
