"""``moeopt`` whose recordings replay at the pace of a GPU.

Each measurement is a line of the file that TIMED_LOG names; GIVE_UP_S says how long a database is waited for.
"""

from __future__ import annotations

import os
import time

from moeopt.cli import main
from moeopt.core.trial import Job, Measurement, Race
from moeopt.distributed.shared import SharedDevice
from moeopt.recordings.device import RecordedDevice
from moeopt.storage.store import StudyStore

SECONDS_PER_JOB = 0.02
_measure = RecordedDevice._measure


def _slow(self: RecordedDevice, job: Job, race: Race) -> Measurement:
    time.sleep(SECONDS_PER_JOB)
    with open(os.environ["TIMED_LOG"], "a") as log:  # noqa: PTH123
        log.write(f"{job.cell.role} {job.cell.batch_size} {job.config}\n")
    return _measure(self, job, race)


if __name__ == "__main__":
    RecordedDevice._measure = _slow  # type: ignore[method-assign]
    give_up_s = float(os.environ.get("GIVE_UP_S", "60"))
    for function in (SharedDevice.__init__, StudyStore.writer):
        assert function.__kwdefaults__ is not None
        function.__kwdefaults__["give_up_s"] = give_up_s
    main()
