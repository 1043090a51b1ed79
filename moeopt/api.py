"""``moeopt.tune`` and ``moeopt.load``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from moeopt.core.shape import MoEShape, choose_batch_sizes
from moeopt.core.trial import Mode
from moeopt.devices import open_device
from moeopt.distributed.board import share
from moeopt.errors import DeviceError, InvalidInputError
from moeopt.measure.base import Device
from moeopt.measure.options import DeviceOptions
from moeopt.result import TuneResult
from moeopt.storage.store import StudyStore
from moeopt.tuning.load import load_result
from moeopt.tuning.options import DEFAULT_STORAGE, TuneOptions, TuneRequest, parse_timeout
from moeopt.tuning.progress import TuneProgress
from moeopt.tuning.tuner import Tuner

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler


def tune(
    shape: MoEShape | None = None,
    batch_sizes: Sequence[int] | None = None,
    *,
    gpu: str | Device | None = None,
    kernel: str = "auto",
    mode: Literal["split", "joint"] = "split",
    space: str = "grid",
    trials: int = 24,
    timeout: float | str | None = None,
    storage: str | None = None,
    sampler: BaseSampler | None = None,
    pruner: BasePruner | None = None,
    routing: str = "uniform",
    seed: int | None = None,
    workers: int | None = None,
    progress: bool = True,
    engine: str | None = None,
    warm_l2: bool = False,
    wait_idle: float | str | None = None,
    executor: Literal["local", "ray"] = "local",
) -> TuneResult:
    """Finds the fastest launch config of the fused MoE kernel for each batch size.

    A second call with the same arguments and storage resumes: it times nothing that is already there.

    Args:
        shape: The layer, as one GPU sees it. May be omitted where ``gpu`` is a recording.
        batch_sizes: Tokens per forward pass; None for the 18 of the published tuners, or all of a recording.
        gpu: ``cuda:0``, ``all``, ``recorded:FILE`` or a device; None for the first CUDA GPU.
        kernel: ``builtin``, ``sglang``, ``vllm``, or ``auto`` for the engine that is importable, else builtin.
        mode: ``split`` gives up and down a config each, which share BLOCK_SIZE_M; ``joint`` gives them one.
        space: ``grid`` for what the published scripts walk, ``wide`` for more values per parameter.
        trials: Most launch configs that may be timed per (batch size, projection).
        timeout: Seconds (or ``"5m"``) after which the best so far is returned.
        storage: URL or file of the study database; None for ``studies/moeopt.db``.
        sampler: Any Optuna sampler; None for moeopt's own search.
        pruner: Any Optuna pruner; None for moeopt's racing.
        routing: Distribution of tokens over experts: ``uniform``, ``zipf:1.2``, ``dirichlet:0.5``, ``file:PATH``.
        seed: Of the search; None for 0, so that a second call resumes the first.
        workers: Compile processes; None for all cores but one.
        progress: Show progress on a terminal.
        engine: The engine that the result is for, which kernel ``auto`` looks for.
        warm_l2: Let weights stay in L2 between launches, unlike serving.
        wait_idle: Seconds (or ``"5m"``) to wait for a busy GPU to be quiet before timing.
        executor: ``local``, or ``ray`` for the GPUs of the Ray cluster at RAY_ADDRESS.

    Returns:
        The best configs, to look at or to export.

    Raises:
        MoeoptError: Something given cannot be used; the message says what and what to do.
        KeyboardInterrupt: The run was interrupted; what was measured is in the database.
    """
    request = TuneRequest(
        shape=shape,
        gpu=None if isinstance(gpu, Device) else gpu,
        storage=DEFAULT_STORAGE if storage is None else storage,
        batch_sizes=None if batch_sizes is None else tuple(batch_sizes),
        device=DeviceOptions(
            kernel=kernel,
            engine=engine,
            routing=routing,
            workers=workers,
            warm_l2=warm_l2,
            wait_idle=parse_timeout(wait_idle, "wait_idle") or 0.0,
            executor=executor,
        ),
        search=TuneOptions(
            mode=mode,
            space=space,
            trials=trials,
            timeout=parse_timeout(timeout),
            seed=seed or 0,
            sampler=sampler,
            pruner=pruner,
        ),
    )
    with open_tune(request, gpu if isinstance(gpu, Device) else None) as tuner:
        result = run_tune(tuner, progress=progress)
    if tuner.interrupted:
        raise KeyboardInterrupt
    return result


@contextmanager
def open_tune(request: TuneRequest, device: Device | None = None) -> Iterator[Tuner]:
    """A tune that is ready to run: its study database and its device are open within the ``with`` block.

    Args:
        request: What is tuned, and where.
        device: Measures instead of the device that the request names.

    Raises:
        MoeoptError: Something given cannot be used; the message says what and what to do.
    """
    with ExitStack() as stack:
        store = stack.enter_context(StudyStore(request.storage))
        device = device or stack.enter_context(_open(request))
        sizes = choose_batch_sizes(request.batch_sizes, device.spec.batch_sizes)
        yield Tuner(device, store, replace(request.search, batch_sizes=sizes), share=share)


def run_tune(tuner: Tuner, *, progress: bool = True) -> TuneResult:
    """Runs a tune to its end, its timeout or an interrupt.

    Args:
        tuner: Of :func:`open_tune`.
        progress: Show progress on a terminal.
    """
    total = tuner.options.trials * len(tuner.cells)
    with TuneProgress(total) if progress else nullcontext() as tuner.progress:
        return TuneResult.of(tuner.run())


def _open(request: TuneRequest) -> Device:
    """The device; a recording may stand in where there is no GPU and none was named."""
    try:
        return open_device(request.gpu, request.shape, request.device, batch_sizes=request.batch_sizes)
    except DeviceError:
        if request.gpu is not None or request.stand_in is None or _cuda_present():
            raise
        return open_device(f"recorded:{request.stand_in}", request.shape, DeviceOptions())


def _cuda_present() -> bool:
    import torch

    return torch.cuda.is_available()


def load(
    storage: str | None = None, shape: MoEShape | None = None, *, mode: str | None = None, key: str | None = None
) -> TuneResult:
    """The best that a study database holds for a shape, without tuning.

    Args:
        storage: URL or file of the study database; None for ``studies/moeopt.db``.
        shape: The layer; may be omitted where the database holds one only.
        mode: ``split`` or ``joint``; may be omitted where the database holds one only.
        key: Which of several, as ``moeopt status`` prints it: a driver, Triton or kernel that was replaced
            has a key of its own.

    Raises:
        StorageError: The database cannot be opened.
        InvalidInputError: It holds no such shape, or several things fit.
    """
    if mode not in (None, *get_args(Mode)):
        raise InvalidInputError(f"mode {mode!r} is unknown: give 'split' or 'joint'")
    with StudyStore(DEFAULT_STORAGE if storage is None else storage, create=False) as store:
        found = [
            s
            for s in store.keys()  # noqa: SIM118  (a method of ours, no dict)
            if (shape is None or s.key.shape == shape)
            and (mode is None or s.key.mode == mode)
            and (key is None or s.key.digest == key)
            and s.trials
        ]
        if not found:
            wanted = shape.slug() if shape else "any shape"
            wanted += f", {mode} mode" if mode else ""
            wanted += f", key {key}" if key else ""
            raise InvalidInputError(f"{store.display} holds no results for {wanted}: tune it first")
        if len(found) > 1:
            lines = "; ".join(f"{s.key.title()} | {s.key.mode} | {s.key.digest}" for s in found)
            raise InvalidInputError(
                f"{store.display} holds {len(found)} results that fit ({lines}): give a shape, a mode, "
                "or a key, which stands last"
            )
        return TuneResult.of(load_result(store, found[0].key))
