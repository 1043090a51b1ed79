"""Forks workers that replay a recording, so that a test pays for imports once.

Arguments: URL, recording, number of workers, seconds idle until the end, lease in seconds.
Prints "PID" for each worker, then "PID TIMED" as each ends by itself.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Sequence

from moeopt.core.trial import Job, Measurement, Race, never_stop
from moeopt.distributed.worker import Worker
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.storage.store import StudyStore


class PacedDevice(RecordedDevice):
    """Replays with a pause for each job."""

    pause_s = float(os.environ.get("PAUSE_S", "0"))

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        for measurement in super().measure(jobs, race):
            time.sleep(self.pause_s)
            yield measurement


def main() -> None:
    url, path, count, idle_s, lease_s = sys.argv[1:]
    recording = Recording.load(path)
    import psycopg  # noqa: F401  (so that children need not)

    import moeopt.distributed.claims  # noqa: F401

    for _ in range(int(count)):
        pid = os.fork()
        if pid == 0:
            with StudyStore(url) as store:
                timed = Worker(store, PacedDevice(recording), lease_s=float(lease_s)).run(float(idle_s))
            sys.stdout.write(f"{os.getpid()} {timed}\n")
            sys.stdout.flush()
            os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
