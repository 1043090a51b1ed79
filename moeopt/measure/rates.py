"""Rates of a GPU, which kernels are measured against: memory bandwidth and matmul rate, measured once per GPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from moeopt.core.shape import MoEShape
from moeopt.files import replace_file

log = logging.getLogger(__name__)

_COPY_BYTES: Final = 1 << 30
_READ_BYTES: Final = 1 << 31
_MATMUL_SIZE: Final = 8192
# The fastest of so many rows counts: what is measured is a bound, and one action alone is up to 8 % slower.
_REPEATS: Final = 8
_ROW: Final = 4
_FORMAT: Final = 3


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
    return " | ".join((gpu, driver, torch, shape.spec.compute))


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
        tflops: float | None = 2.0 * n**3 / seconds(_matmul(device, shape.spec.compute, n)) * 1e-12
    except (RuntimeError, AttributeError) as error:
        log.info("the %s matmul rate cannot be measured here: %s", shape.spec.compute, error)
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
