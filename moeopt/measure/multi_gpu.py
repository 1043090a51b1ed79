"""Several GPUs of one kind as one device."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from moeopt.core.config import LaunchConfig
from moeopt.core.trial import Job, Measurement, Race, never_stop
from moeopt.errors import DeviceError
from moeopt.measure.base import Device

log = logging.getLogger(__name__)

# How far the control config's times on the GPUs may lie apart, as a share of the fastest.
AGREEMENT: Final = 0.03
# What a timing costs beside its launches, in tokens' worth of launch: for sharing work out evenly.
_FIXED_COST: Final = 512
_JOIN_S: Final = 2.0
_ANSWER_S: Final = 0.1


class MultiGpuDevice(Device):
    """Shares jobs out over devices, whole batch sizes at a time.

    All configs of a batch size are timed on the same GPU, so that what is compared is never mixed.
    Before the first timing every GPU times the control config: if they do not agree within
    :data:`AGREEMENT`, it refuses.

    Args:
        devices: At least one, all of the same shape, kind of GPU, and kernel.

    Raises:
        DeviceError: They differ.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        if not devices:
            raise DeviceError("no GPU was given: name at least one")
        first = devices[0].spec
        for number, device in enumerate(devices):
            spec = device.spec
            if spec.gpu != first.gpu:
                raise DeviceError(
                    f"GPU {number} is {spec.gpu.name} and GPU 0 is {first.gpu.name}: tune each kind by itself, "
                    "with --gpu cuda:N"
                )
            if spec.shape != first.shape or spec.provenance.kernel_hash != first.provenance.kernel_hash:
                raise DeviceError(f"GPU {number} would time another shape or kernel than GPU 0")
        count = f"{len(devices)} GPUs; " if len(devices) > 1 else ""
        super().__init__(replace(first, provenance=replace(first.provenance, source=count + first.provenance.source)))
        self.devices = tuple(devices)
        self.control: tuple[float, ...] | None = None
        self._assignment = BatchSizeAssignment(range(len(devices)))

    def prefetch(self, configs: Iterable[LaunchConfig]) -> None:
        # One compile pool serves all.
        self.devices[0].prefetch(configs)

    def check_agreement(self) -> tuple[float, ...]:
        """Times the control config on every GPU.

        Returns:
            Microseconds per GPU; nothing for recordings, whose times are what they are.

        Raises:
            DeviceError: They do not agree, or there is nothing to compare.
        """
        if self.control is None:
            self.control = agreed([device.control_us() for device in self.devices])
        return self.control

    def control_us(self) -> float | None:
        """The slowest GPU's; 0 for recordings."""
        return max(self.check_agreement(), default=0.0)

    def notices(self) -> tuple[str, ...]:
        return agreement_text(self.control)

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        """Times each share on its GPU at once; ``race`` is called in the calling thread."""
        if not jobs:
            return
        self.check_agreement()
        shares: list[list[Job]] = [[] for _ in self.devices]
        for job in jobs:
            shares[self._assignment.of(job.cell.batch_size)].append(job)
        channel = ResultChannel()
        threads = [
            threading.Thread(target=channel.work, args=(device, share), name=f"moeopt-gpu{number}", daemon=True)
            for number, (device, share) in enumerate(zip(self.devices, shares, strict=True))
            if share
        ]
        for thread in threads:
            thread.start()
        try:
            yield from channel.results(race, len(threads))
        finally:
            channel.stop()
            for thread in threads:
                thread.join(timeout=_JOIN_S)

    def close(self) -> None:
        for device in self.devices:
            device.close()


class BatchSizeAssignment:
    """Which GPU times which batch size: a new one goes to the GPU with the least to do.

    Args:
        gpus: Their numbers.
    """

    def __init__(self, gpus: Iterable[int]) -> None:
        self._owner: dict[int, int] = {}
        self._load = dict.fromkeys(gpus, 0)

    def of(self, batch_size: int) -> int:
        """The GPU of a batch size."""
        if batch_size not in self._owner:
            lightest = min(self._load, key=lambda gpu: (self._load[gpu], gpu))
            self._owner[batch_size] = lightest
            self._load[lightest] += batch_size + _FIXED_COST
        return self._owner[batch_size]

    def drop(self, gpu: int) -> None:
        """A GPU is gone: its batch sizes go to the others when they are asked for again."""
        del self._load[gpu]
        self._owner = {size: owner for size, owner in self._owner.items() if owner != gpu}


def agreed(times: Sequence[float | None]) -> tuple[float, ...]:
    """The times of the control config, where they may be mixed.

    Raises:
        DeviceError: They lie further apart than :data:`AGREEMENT`, or one is missing.
    """
    found: list[float] = []
    for number, us in enumerate(times):
        if us is None:
            raise DeviceError(
                f"GPU {number} cannot time the control config, so nothing shows that the GPUs agree: "
                "use one of them, with --gpu cuda:N"
            )
        found.append(us)
    if not any(found):
        return ()
    apart = max(found) / min(found) - 1.0
    if apart > AGREEMENT:
        listed = ", ".join(f"GPU {i} {us:.1f} µs" for i, us in enumerate(found))
        raise DeviceError(
            f"the GPUs disagree by {100 * apart:.1f} % on the control config ({listed}), "
            f"{100 * AGREEMENT:g} % is allowed: their times cannot be mixed, use one with --gpu cuda:N"
        )
    log.info("the GPUs agree within %.2f %% on the control config", 100 * apart)
    return tuple(found)


def agreement_text(control: Sequence[float] | None) -> tuple[str, ...]:
    """What :func:`agreed` found, in a sentence; nothing where nothing was compared."""
    if not control or len(control) < 2:
        return ()
    listed = ", ".join(f"{us:.1f}" for us in control)
    apart = 100 * (max(control) / min(control) - 1)
    return (f"the {len(control)} GPUs agree within {apart:.2f} % on the control config ({listed} µs)",)


@dataclass(frozen=True)
class Question:
    """A device's thread asks the race and waits for ``answer``."""

    job: Job
    rounds: Sequence[float]
    answer: queue.SimpleQueue[bool]


class ResultChannel:
    """Carries results and questions from the devices' threads to the calling one."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Measurement | Question | BaseException | None] = queue.SimpleQueue()
        self._stopped = threading.Event()

    def work(self, device: Device, jobs: Sequence[Job], *, raced: bool = True) -> None:
        """Runs in a device's thread; without ``raced`` no question is asked."""
        try:
            with contextlib.closing(device.measure(jobs, self._ask if raced else self._stop)) as results:
                for measurement in results:
                    if self._stopped.is_set():
                        break
                    self._inbox.put(measurement)
        except BaseException as error:  # noqa: BLE001  (the border of a thread: raised in the calling one)
            self._inbox.put(error)
        else:
            self._inbox.put(None)

    def _stop(self, job: Job, rounds: Sequence[float]) -> bool:
        return self._stopped.is_set()

    def _ask(self, job: Job, rounds: Sequence[float]) -> bool:
        if self._stopped.is_set():
            return True
        answer: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._inbox.put(Question(job, rounds, answer))
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Empty):
                return answer.get(timeout=_ANSWER_S)
        return True

    def messages(self, threads: int = 1) -> Generator[Measurement | Question | BaseException]:
        """What the threads say, until all have ended: results, questions, and what a device raised."""
        while threads:
            message = self._inbox.get()
            if message is None:
                threads -= 1
            else:
                yield message

    def results(self, race: Race, threads: int) -> Generator[Measurement]:
        """Runs in the calling thread until all others have ended."""
        for message in self.messages(threads):
            match message:
                case Measurement():
                    yield message
                case Question(job, rounds, answer):
                    answer.put(race(job, rounds))
                case BaseException():
                    raise message

    def stop(self) -> None:
        """Lets every thread end: no question waits for an answer."""
        self._stopped.set()
