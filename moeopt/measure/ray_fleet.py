"""GPUs of a Ray cluster as one device: an actor for each GPU, on whatever machine it is."""

from __future__ import annotations

import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from moeopt.errors import DeviceError, InvalidInputError, MoeoptError
from moeopt.measure.base import Cell, Device, Job, Measurement, Race, never_stop
from moeopt.shape import MoEShape, Role
from moeopt.space import LaunchConfig

if TYPE_CHECKING:
    from moeopt.devices import DeviceOptions

log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Jobs that an actor is given at a time: while it times them, results of the last ones are told.
_CHUNK: Final = 8
_START_S: Final = 300.0


class _GpuActor:
    """Runs in the cluster: holds the device of one GPU."""

    def __init__(self, make: Callable[[], Device]) -> None:
        self._device = make()

    def call(self, what: Callable[[Device], Any]) -> Any:
        """Something that the device answers."""
        return what(self._device)

    def measure(self, jobs: Sequence[Job]) -> list[Measurement]:
        """Times jobs in full; the race is run where its incumbents are."""
        return list(self._device.measure(jobs))


@dataclass
class _Member:
    """One actor, and what it has been given."""

    handle: Any
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)


class RayFleet(Device):
    """Shares jobs out over the actors of a Ray cluster, whole batch sizes at a time.

    Jobs of an actor that dies with its node go to the others. The race is run on what comes back: its
    outcome is that of a local device, but a loser has cost its full time.
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
            DeviceError: Ray cannot be reached, or no actor could open its device.
        """
        self._ray = ray = _import_ray()
        _connect(ray, address)
        actor = ray.remote(_GpuActor).options(
            num_cpus=0 if num_gpus else 1,
            num_gpus=num_gpus,
            scheduling_strategy="SPREAD",
            max_restarts=0,
            runtime_env=runtime_env,
        )
        self._members = [_Member(actor.remote(make)) for _ in range(count)]
        self._owner: dict[int, _Member] = {}
        first = self._opened()
        self.shape, self.gpu = first.shape, first.gpu
        self.info = replace(first.info, source=f"{len(self._members)} GPUs of a Ray cluster; {first.info.source}")
        self._batch_sizes = self._ask(_batch_sizes)

    def _opened(self) -> _Facts:
        """Waits for the actors; those that cannot open their device are left out."""
        facts: list[_Facts] = []
        errors: list[str] = []
        for member in list(self._members):
            try:
                facts.append(self._ray.get(member.handle.call.remote(_facts), timeout=_START_S))
            except (self._ray.exceptions.RayError, MoeoptError) as error:
                errors.append(str(getattr(error, "cause", None) or error).splitlines()[-1])
                self._members.remove(member)
        if not facts:
            raise DeviceError(f"no GPU of the Ray cluster could be opened: {errors[0] if errors else 'it has none'}")
        for line in errors:
            log.warning("a GPU of the Ray cluster was left out: %s", line)
        if len({(one.shape, one.gpu, one.info.kernel_hash) for one in facts}) > 1:
            names = ", ".join(sorted({one.gpu.name for one in facts}))
            raise DeviceError(f"the Ray cluster's GPUs or kernels differ ({names}): give it machines of one kind")
        return facts[0]

    def _ask(self, what: Callable[[Device], _T]) -> _T:
        """The answer of the first actor that lives."""
        while True:
            member = self._members[0] if self._members else None
            if member is None:
                raise DeviceError("all GPUs of the Ray cluster are gone: start it again and run the same command")
            try:
                answer: _T = self._ray.get(member.handle.call.remote(what))
            except self._ray.exceptions.RayActorError:
                self._bury(member)
            else:
                return answer

    @property
    def batch_sizes(self) -> tuple[int, ...] | None:
        return self._batch_sizes

    def candidates(self, configs: Sequence[LaunchConfig]) -> list[LaunchConfig]:
        fitting: list[LaunchConfig] = self._ask(_Call("candidates", (list(configs),)))
        return fitting

    def default_config(self, role: Role, batch_size: int) -> LaunchConfig:
        config: LaunchConfig = self._ask(_Call("default_config", (role, batch_size)))
        return config

    def space_extras(self) -> tuple[str, ...]:
        keys: tuple[str, ...] = self._ask(_Call("space_extras", ()))
        return keys

    def roofline_us(self, cell: Cell) -> float | None:
        us: float | None = self._ask(_Call("roofline_us", (cell,)))
        return us

    def hint(self, configs: Iterable[LaunchConfig]) -> None:
        hinted = list(configs)
        for member in self._members:
            member.handle.call.remote(_Call("hint", (hinted,)))

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        """Times jobs on all GPUs.

        Raises:
            DeviceError: All of them are gone.
        """
        for member in self._members:  # what an earlier call that was closed had left
            member.waiting.clear()
            member.running = []
        self._share_out(jobs)
        running: dict[Any, _Member] = {}
        while True:
            for member in self._members:
                if member.waiting and not member.running:
                    member.running = [member.waiting.popleft() for _ in range(min(_CHUNK, len(member.waiting)))]
                    running[member.handle.measure.remote(member.running)] = member
            if not running:
                return
            (done, *_), _ = self._ray.wait(list(running))
            member = running.pop(done)
            try:
                results: list[Measurement] = self._ray.get(done)
            except self._ray.exceptions.RayActorError:
                lost = [*member.running, *member.waiting]
                self._bury(member)
                self._share_out(lost)
                continue
            member.running = []
            for measurement in results:
                yield _raced(measurement, race)

    def _share_out(self, jobs: Sequence[Job]) -> None:
        """Gives each batch size to one GPU, so that what is compared is timed on the same."""
        if not self._members and jobs:
            raise DeviceError("all GPUs of the Ray cluster are gone: start it again and run the same command")
        by_size: defaultdict[int, list[Job]] = defaultdict(list)
        for job in jobs:
            by_size[job.cell.batch_size].append(job)
        for size, some in by_size.items():
            if self._owner.get(size) not in self._members:
                owned = {id(m): sum(o is m for o in self._owner.values()) for m in self._members}
                self._owner[size] = min(self._members, key=lambda m: owned[id(m)])
            self._owner[size].waiting.extend(some)

    def _bury(self, member: _Member) -> None:
        log.warning("a GPU of the Ray cluster is gone: the other %d take its work", len(self._members) - 1)
        self._members = [one for one in self._members if one is not member]

    def close(self) -> None:
        """Ends the actors; the cluster goes on."""
        for member in self._members:
            self._ray.kill(member.handle)
        self._members = []


@dataclass(frozen=True)
class _Facts:
    shape: MoEShape
    gpu: Any
    info: Any


def _facts(device: Device) -> _Facts:
    return _Facts(device.shape, device.gpu, device.info)


def _batch_sizes(device: Device) -> tuple[int, ...] | None:
    return device.batch_sizes


@dataclass(frozen=True)
class _Call:
    """A method call that travels to an actor."""

    name: str
    args: tuple[Any, ...]

    def __call__(self, device: Device) -> Any:
        return getattr(device, self.name)(*self.args)


def _raced(measurement: Measurement, race: Race) -> Measurement:
    """What a device would have answered that asks the race after each round."""
    if measurement.status != "ok":
        return measurement
    for rounds in range(1, len(measurement.us) + 1):
        if race(measurement.job, measurement.us[:rounds]):
            return replace(measurement, status="raced_out", us=measurement.us[:rounds])
    return measurement


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise InvalidInputError("--executor ray needs Ray: pip install 'moeopt[ray]'") from None
    return ray


def _connect(ray: Any, address: str | None) -> None:
    if ray.is_initialized():
        return
    try:
        ray.init(address=address or os.environ.get("RAY_ADDRESS"), log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise DeviceError(
            f"cannot reach the Ray cluster ({str(error).splitlines()[0]}): start it, or set RAY_ADDRESS"
        ) from None


def open_ray(
    gpu: str | None, shape: MoEShape | None, options: DeviceOptions, *, batch_sizes: tuple[int, ...] | None
) -> RayFleet:
    """A device on all GPUs of a Ray cluster, or with a recording on all its nodes.

    Args:
        gpu: ``recorded:FILE``, or anything that stands for CUDA GPUs: the cluster says how many.
        shape: The layer; a recording stands for its own.
        options: How each GPU is used.
        batch_sizes: What will be timed.

    Raises:
        DeviceError: The cluster cannot be reached or has no GPU.
    """
    import functools

    from moeopt.devices import open_device

    ray = _import_ray()
    _connect(ray, None)
    local = replace(options, executor="local")
    if gpu is not None and gpu.startswith("recorded:"):
        device = open_device(gpu, shape, local)
        nodes = sum(1 for node in ray.nodes() if node["Alive"])
        return RayFleet(functools.partial(_same, device), nodes)
    count = int(ray.cluster_resources().get("GPU", 0))
    if count == 0:
        raise DeviceError("the Ray cluster has no GPU: start its nodes where CUDA GPUs are, or give recorded:FILE")
    # The driver's numbers, not those within CUDA_VISIBLE_DEVICES, are what clocks and memory are read by.
    env = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    make = functools.partial(_open_own_gpu, shape, local, batch_sizes)
    return RayFleet(make, count, num_gpus=1, runtime_env=env)


def _open_own_gpu(shape: MoEShape | None, options: DeviceOptions, batch_sizes: tuple[int, ...] | None) -> Device:
    from moeopt.devices import open_device

    (index,) = _import_ray().get_runtime_context().get_accelerator_ids()["GPU"]
    return open_device(f"cuda:{index}", shape, options, batch_sizes=batch_sizes)


def _same(device: Device) -> Device:
    return device
