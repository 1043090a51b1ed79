"""Rooflines: bytes over bandwidth, operations over matmul rate, both measured once per GPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeopt.core.shape import DTYPES, MoEShape, Role
from moeopt.core.trial import Cell
from moeopt.files import replace_file
from moeopt.kernels.workset import LAUNCHES, expert_bytes, touched

log = logging.getLogger(__name__)

_COPY_BYTES: Final = 1 << 30
_READ_BYTES: Final = 1 << 31
_MATMUL_SIZE: Final = 8192
# The fastest of so many rows counts: what is measured is a bound, and one action alone is up to 8 % slower.
_REPEATS: Final = 8
_ROW: Final = 4
_FORMAT: Final = 3
_LARGE_BATCH: Final = 512


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch has to do at least.

    Attributes:
        bytes: Touched experts' weights once, activations, outputs.
        flops: Two per multiply-add.
    """

    bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What a GPU does.

    Attributes:
        copy_gbps: Bytes read plus bytes written of a large copy, in GB/s.
        read_gbps: Bytes read of a large sum. Launches mostly read, and where memory turns around
            between reading and writing a copy is slower than that.
        matmul_tflops: Of a large matrix product in the shape's compute type; None where it could not
            be measured.
    """

    copy_gbps: float
    read_gbps: float
    matmul_tflops: float | None

    @property
    def memory_gbps(self) -> float:
        """The faster of both: what a launch is measured against."""
        return max(self.copy_gbps, self.read_gbps)


def work(shape: MoEShape, role: Role, batch_size: int, experts: float, pairs: float | None = None) -> Work:
    """Bytes and operations of one launch.

    Args:
        shape: The layer.
        role: Which projection.
        batch_size: M.
        experts: How many experts of this GPU the batch visits.
        pairs: (token, expert) pairs with an expert on this GPU; None for M * top_k.
    """
    all_pairs = batch_size * shape.top_k
    pairs = all_pairs if pairs is None else pairs
    rows, k = shape.output_rows(role), shape.reduction(role)
    tokens = batch_size if role == "up" else pairs
    activations = tokens * k * DTYPES[shape.dtype].activation_bits / 8
    outputs = all_pairs * rows * 2
    return Work(experts * expert_bytes(shape, role) + activations + outputs, 2.0 * pairs * rows * k)


def drawn_work(shape: MoEShape, role: Role, batch_size: int, routing: str, seed: int) -> Work:
    """The work of the routings that are timed, on average."""
    experts, pairs = _visits(shape, batch_size, routing, seed)
    return work(shape, role, batch_size, experts, pairs)


@lru_cache(maxsize=256)
def _visits(shape: MoEShape, batch_size: int, routing: str, seed: int) -> tuple[float, float]:
    """Experts visited and pairs with an expert here, on average over the routings drawn."""
    from moeopt.kernels.routing import Routing

    # Large batches differ little from one another, and take long to draw.
    count = LAUNCHES if batch_size < _LARGE_BATCH else 1
    drawn = Routing.parse(routing).draw(shape, batch_size, count, seed)
    experts = float(np.mean([touched(ids, shape.num_experts) for ids in drawn]))
    return experts, float(((drawn >= 0) & (drawn < shape.num_experts)).sum()) / len(drawn)


def launch_bytes(shape: MoEShape, cell: Cell, routing: str, seed: int = 0) -> float | None:
    """Bytes that the cell's launches move at least, the sum of both roles' in joint mode.

    Args:
        shape: The layer.
        cell: Role and batch size.
        routing: A routing, or the key of one.
        seed: Of the routings.

    Returns:
        None where the routing is the key of a file: it does not say which.
    """
    if routing.startswith("file:") and not Path(routing.removeprefix("file:")).expanduser().exists():
        return None
    return sum(drawn_work(shape, role, cell.batch_size, routing, seed).bytes for role in cell.roles)


def bound_us(what: Work, rates: Rates) -> float:
    """Microseconds that the work takes at these rates: the longer of the two."""
    moving = what.bytes / (rates.memory_gbps * 1e3)
    computing = what.flops / (rates.matmul_tflops * 1e6) if rates.matmul_tflops else 0.0
    return max(moving, computing)


class RateStore:
    """Measured rates in a file of the user's cache, by GPU, driver, torch and compute type."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()

    def load(self, key: str) -> Rates | None:
        """The rates of a key, or None. A file that cannot be read counts as empty."""
        entry = self._read().get(key)
        try:
            return Rates(**entry) if entry else None
        except TypeError:
            return None

    def save(self, key: str, rates: Rates) -> None:
        """Adds an entry. A cache that cannot be written is not an error: it is measured again next time."""
        content = {**self._read(), key: asdict(rates)}
        try:
            replace_file(self.path, json.dumps({"format": _FORMAT, "rates": content}, indent=1))
        except OSError as error:
            log.info("%s cannot be written (%s): the GPU's rates are measured again next time", self.path, error)

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        if not isinstance(data, dict) or data.get("format") != _FORMAT or not isinstance(data.get("rates"), dict):
            return {}
        return dict(data["rates"])


@cache
def default_path() -> Path:
    """Where rates are kept."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("moeopt")) / "rates.json"


def rate_key(gpu: str, driver: str, torch: str, shape: MoEShape) -> str:
    """Key of a :class:`RateStore` entry."""
    return " | ".join((gpu, driver, torch, DTYPES[shape.dtype].compute))


def measure_rates(device: Any, shape: MoEShape) -> Rates:
    """Measures bandwidths and matmul rate on the current stream: some tenths of a second, 2 GiB.

    Args:
        device: torch device.
        shape: Its compute type is multiplied.
    """
    import torch

    event: Any = torch.cuda.Event

    def seconds(action: Callable[[], object]) -> float:
        times: list[float] = []
        for number in range(_REPEATS + 2):
            first, last = event(enable_timing=True), event(enable_timing=True)
            first.record()
            for _ in range(_ROW):
                action()
            last.record()
            torch.cuda.current_stream().synchronize()
            if number >= 2:
                times.append(first.elapsed_time(last) * 1e-3 / _ROW)
        return min(times)

    free, _ = torch.cuda.mem_get_info(device)
    size = min(_COPY_BYTES, max(1 << 26, free // 4))
    copy_gbps = 2 * size / seconds(_copy(device, size)) * 1e-9
    torch.cuda.empty_cache()  # the next is larger than what was freed
    size = min(_READ_BYTES, max(1 << 26, free // 4))
    read_gbps = size / seconds(_read(device, size)) * 1e-9
    n = _MATMUL_SIZE if free > 8 * _MATMUL_SIZE**2 * 2 else _MATMUL_SIZE // 2
    try:
        tflops: float | None = 2.0 * n**3 / seconds(_matmul(device, DTYPES[shape.dtype].compute, n)) * 1e-12
    except (RuntimeError, AttributeError) as error:
        log.info("the %s matmul rate cannot be measured here: %s", DTYPES[shape.dtype].compute, error)
        tflops = None
    torch.cuda.empty_cache()
    return Rates(round(copy_gbps, 1), round(read_gbps, 1), None if tflops is None else round(tflops, 1))


def _copy(device: Any, size: int) -> Callable[[], object]:
    import torch

    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _read(device: Any, size: int) -> Callable[[], object]:
    import torch

    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    return lambda: torch.sum(source)


def _matmul(device: Any, compute: str, n: int) -> Callable[[], object]:
    import torch

    a = torch.randn(n, n, dtype=torch.bfloat16, device=device)
    b = torch.randn(n, n, dtype=torch.bfloat16, device=device)
    if compute == "fp8":
        one = torch.ones((), dtype=torch.float32, device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        return lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    if compute == "int8":
        ai, bi = (a * 30).to(torch.int8), (b * 30).to(torch.int8).t()
        return lambda: torch._int_mm(ai, bi)
    if compute == "fp16":
        a, b = a.to(torch.float16), b.to(torch.float16)
    return lambda: torch.mm(a, b)


def roofline_us(shape: MoEShape, cell: Cell, rates: Rates, routing: str, seed: int) -> float:
    """Microseconds of the cell's launches at these rates; the sum of both roles in joint mode."""
    return sum(bound_us(drawn_work(shape, role, cell.batch_size, routing, seed), rates) for role in cell.roles)
