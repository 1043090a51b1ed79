"""GPUs of a Ray cluster as one device: an actor for each GPU, on whatever machine it is."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn, TypeVar

from moeopt.core.config import LaunchConfig
from moeopt.core.trial import Job, Measurement, Race, never_stop
from moeopt.errors import DeviceError, InvalidInputError, MoeoptError
from moeopt.measure.base import Device, DeviceSpec, unknown_roofline
from moeopt.measure.multi_gpu import BatchSizeAssignment, Question, ResultChannel, agreed, agreement_text

T = TypeVar("T")
log = logging.getLogger(__name__)

_START_S: Final = 300.0
_CONNECT_S: Final = 10.0
_GONE: Final = "all GPUs of the Ray cluster are gone: start it again and run the same command"


@dataclass(frozen=True)
class RaceQuestion:
    """An actor asks the race: :meth:`GpuActor.answer` takes the answer, with this number."""

    number: int
    job: Job
    rounds: tuple[float, ...]


ActorMessage = Measurement | RaceQuestion | BaseException


class GpuActor:
    """Runs in the cluster: holds the device of one GPU.

    :meth:`measure` yields results and the race's questions as they come; :meth:`answer` and :meth:`stop`
    are called meanwhile, from another thread of the actor.
    """

    def __init__(self, make: Callable[[], Device]) -> None:
        self._device = make()
        self._channel = ResultChannel()
        self._questions: dict[int, queue.SimpleQueue[bool]] = {}
        self._numbers = itertools.count()
        self._stopped = -1

    def call(self, what: Callable[[Device], T]) -> T:
        """Something that the device answers."""
        return what(self._device)

    def measure(self, batch: int, jobs: Sequence[Job], raced: bool) -> Generator[ActorMessage]:
        """Times jobs. What is raised is yielded, as Ray would put a traceback into its message; it is the last."""
        channel = self._channel = ResultChannel()
        self._questions = {}
        if batch <= self._stopped:
            return
        thread = threading.Thread(target=channel.work, args=(self._device, jobs), kwargs={"raced": raced}, daemon=True)
        thread.start()
        try:
            for message in channel.messages():
                if isinstance(message, Question):
                    number = next(self._numbers)
                    self._questions[number] = message.answer
                    yield RaceQuestion(number, message.job, tuple(message.rounds))
                else:
                    yield message
                if isinstance(message, BaseException):
                    return
        finally:
            channel.stop()
            thread.join()

    def answer(self, number: int, lost: bool) -> None:
        """The race's answer to a question."""
        question = self._questions.pop(number, None)
        if question is not None:
            question.put(lost)

    def stop(self, batch: int) -> None:
        """Ends what is being measured, and what waits, of this batch."""
        self._stopped = batch
        self._channel.stop()

    def close(self) -> None:
        """Ends the device's processes."""
        self._channel.stop()
        self._device.close()


@dataclass
class _Member:
    """One actor, and what it has been given and not answered."""

    number: int
    handle: Any
    jobs: dict[Job, None] = field(default_factory=dict)


class RayDevice(Device):
    """Shares jobs out over the actors of a Ray cluster, whole batch sizes at a time.

    All that :class:`~moeopt.measure.multi_gpu.MultiGpuDevice` does on one machine, and jobs of an actor that dies with
    its node go to the others.
    """

    def __init__(
        self,
        make: Callable[[], Device],
        count: int,
        *,
        num_gpus: float = 0,
        address: str | None = None,
        runtime_env: dict[str, Any] | None = None,
    ) -> None:
        """Starts the actors.

        Args:
            make: Opens a GPU's device, on the actor's machine. Pickled.
            count: Number of actors.
            num_gpus: What Ray reserves for each.
            address: Of the cluster; None for RAY_ADDRESS, or else a Ray of this machine.
            runtime_env: Of the actors.

        Raises:
            DeviceError: Ray cannot be reached, no actor could open its device, or the GPUs differ.
        """
        self._ray = ray = import_ray()
        connect(ray, address)
        actor = ray.remote(concurrency_groups={"measure": 1, "answer": 1})(GpuActor).options(
            # A GPU is what is scarce on its machine; elsewhere a core stands for it.
            num_cpus=0 if num_gpus else 1,
            num_gpus=num_gpus,
            scheduling_strategy="SPREAD",
            max_restarts=0,
            runtime_env=runtime_env,
        )
        self._members = [_Member(number, actor.remote(make)) for number in range(count)]
        self._batch = 0
        try:
            first = self._opened()
        except BaseException:
            self.close()
            raise
        source = f"{len(self._members)} GPUs of a Ray cluster; {first.provenance.source}"
        super().__init__(
            replace(
                first,
                provenance=replace(first.provenance, source=source),
                # The actors answer: the engine whose rules these are need not be on this machine.
                candidates=lambda configs: self._ask(lambda device: device.spec.candidates(configs)),
                default_config=lambda role, m: self._ask(lambda device: device.spec.default_config(role, m)),
                roofline_us=lambda cell: self._ask(lambda device: device.spec.roofline_us(cell)),
            )
        )
        self._assignment = BatchSizeAssignment(member.number for member in self._members)
        self.control: tuple[float, ...] | None = None

    def _opened(self) -> DeviceSpec:
        """Waits for the actors; those that cannot open their device are left out."""
        specs: list[DeviceSpec] = []
        errors: list[str] = []
        for member in list(self._members):
            try:
                specs.append(self._ray.get(member.handle.call.remote(_plain_spec), timeout=_START_S))
            except (self._ray.exceptions.RayError, MoeoptError) as error:
                errors.append(str(getattr(error, "cause", None) or error).splitlines()[-1])
                self._ray.kill(member.handle)
                self._members.remove(member)
        if not specs:
            raise DeviceError(f"no GPU of the Ray cluster could be opened: {errors[0] if errors else 'it has none'}")
        for line in errors:
            log.warning("a GPU of the Ray cluster was left out: %s", line)
        if len({(one.shape, one.gpu, one.provenance.kernel_hash) for one in specs}) > 1:
            names = ", ".join(sorted({one.gpu.name for one in specs}))
            raise DeviceError(f"the Ray cluster's GPUs or kernels differ ({names}): give it machines of one kind")
        return specs[0]

    def _ask(self, what: Callable[[Device], T]) -> T:
        """The answer of the first actor that lives."""
        while self._members:
            member = self._members[0]
            try:
                answer: T = self._ray.get(member.handle.call.remote(what))
                return answer
            except self._ray.exceptions.RayActorError:
                self._drop_member(member)
        raise DeviceError(_GONE)

    def notices(self) -> tuple[str, ...]:
        return agreement_text(self.control)

    def prefetch(self, configs: Iterable[LaunchConfig]) -> None:
        wanted = list(configs)
        for member in self._members:
            member.handle.call.remote(lambda device: device.prefetch(wanted))

    def control_us(self) -> float | None:
        """The slowest GPU's; 0 for recordings."""
        return max(self.check_agreement(), default=0.0)

    def check_agreement(self) -> tuple[float, ...]:
        """Times the control config on every GPU that is still there: see :meth:`MultiGpuDevice.check_agreement`."""
        if self.control is None:
            asked = [(member, member.handle.call.remote(_control_us)) for member in self._members]
            times = []
            for member, answer in asked:
                try:
                    times.append(self._ray.get(answer))
                except self._ray.exceptions.RayActorError:
                    self._drop_member(member)
            self.control = agreed(times)
        return self.control

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        """Times each share on its GPU at once; ``race`` is called in the calling thread.

        Raises:
            DeviceError: All GPUs are gone, or one of them says that it cannot go on.
        """
        if not jobs:
            return
        self.check_agreement()
        self._batch += 1
        for member in self._members:
            member.jobs.clear()
        raced = race is not never_stop
        streams: dict[Any, _Member] = {}
        try:
            self._begin(streams, jobs, raced)
            while streams:
                (stream, *_), _ = self._ray.wait(list(streams), fetch_local=False)
                member = streams[stream]
                try:
                    message = self._ray.get(next(stream))
                except StopIteration:
                    del streams[stream]
                    continue
                except self._ray.exceptions.RayActorError:
                    for one in [s for s, m in streams.items() if m is member]:
                        del streams[one]
                    self._drop_member(member)
                    self._begin(streams, list(member.jobs), raced)
                    continue
                match message:
                    case RaceQuestion(number, job, rounds):
                        member.handle.answer.options(concurrency_group="answer").remote(number, race(job, rounds))
                    case BaseException():
                        raise message
                    case _:
                        del member.jobs[message.job]
                        yield message
        finally:
            for member in streams.values():
                # Its next batch waits until this one has ended.
                member.handle.stop.options(concurrency_group="answer").remote(self._batch)

    def _begin(self, streams: dict[Any, _Member], jobs: Sequence[Job], raced: bool) -> None:
        """Gives jobs to the GPUs of their batch sizes, so that what is compared is timed on the same."""
        if jobs and not self._members:
            raise DeviceError(_GONE)
        by_number = {member.number: member for member in self._members}
        shares: dict[int, list[Job]] = {}
        for job in jobs:
            shares.setdefault(self._assignment.of(job.cell.batch_size), []).append(job)
        for number, share in shares.items():
            member = by_number[number]
            member.jobs.update(dict.fromkeys(share))
            measure = member.handle.measure.options(num_returns="streaming", concurrency_group="measure")
            streams[measure.remote(self._batch, share, raced)] = member

    def _drop_member(self, member: _Member) -> None:
        self._members = [one for one in self._members if one is not member]
        self._assignment.drop(member.number)
        log.warning("a GPU of the Ray cluster is gone: the other %d take its work", len(self._members))

    def close(self) -> None:
        """Ends the actors and their processes; the cluster goes on."""
        members, self._members = self._members, []
        closing = [member.handle.close.options(concurrency_group="answer").remote() for member in members]
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.wait(closing, num_returns=len(closing), timeout=10.0) if closing else None
        for member in members:
            self._ray.kill(member.handle)


def _plain_spec(device: Device) -> DeviceSpec:
    """A device's spec without what only its own process can answer."""
    return replace(device.spec, candidates=_not_here, default_config=_not_here, roofline_us=unknown_roofline)


def _not_here(*_: Any) -> NoReturn:
    raise NotImplementedError("only the process that has the GPU answers this: its actor is asked")


def _control_us(device: Device) -> float | None:
    return device.control_us()


def import_ray() -> Any:
    """Ray.

    Raises:
        InvalidInputError: It is not installed.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise InvalidInputError("--executor ray needs Ray: pip install 'moeopt[ray]'") from None
    return ray


def connect(ray: Any, address: str | None) -> None:
    """Joins a cluster, or starts one of this machine; does nothing where that was done.

    Raises:
        DeviceError: It cannot be reached.
    """
    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        # Ray tries an address where nothing listens for minutes.
        host, _, port = (address or "").rpartition(":")
        if port.isdigit() and "/" not in host:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        at = f" at {address}" if address else ""
        raise DeviceError(
            f"cannot reach the Ray cluster{at} ({str(error).partition(chr(10))[0]}): start it, or set RAY_ADDRESS"
        ) from None
