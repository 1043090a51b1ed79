"""``moeopt tune`` on a device that is kept busy for ever: a process that a test interrupts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from moeopt import api
from moeopt.cli import main
from moeopt.compile import CompilePool
from moeopt.measure.base import Device
from moeopt.measure.supervisor import Deadlines
from tests.compile.faulty import FaultyKernel
from tests.measure.measure_benches import HangsLaterBench
from tests.measure.measure_workers import make_device

PATIENT = Deadlines(start=120.0, prepare=600.0, first_check=600.0, floor=600.0, factor=20.0)


def run(busy: str, recording: str, scratch: str) -> None:
    """Tunes.

    Args:
        busy: ``compiling``: no compile ever ends; ``timing``: the 21st launch never ends.
        recording: What the worker replays.
        scratch: Where ``<busy>`` appears once it is so, and where the tune writes.
    """
    folder = Path(scratch)

    def open_busy(*_: Any, **__: Any) -> Device:
        bench = HangsLaterBench(Path(recording), marker=str(folder / "timing"))
        device = make_device(Path(recording), folder, bench=bench, batch_sizes=(16, 64), deadlines=PATIENT)
        if busy == "compiling":
            kernel = FaultyKernel(folder, seconds=3600.0)
            device._compiler = CompilePool(kernel, device.spec.shape, (9, 0), 2, folder / "cache", folder / "logs")
        return device

    api.open_device = open_busy
    sys.argv = [
        "moeopt", "tune", "--gpu", "cuda:0", "--experts", "8", "--top-k", "2", "--hidden", "256", "--intermediate",
        "128", "--dtype", "bf16", "--batch-sizes", "16,64", "--storage", str(folder / "x.db"),
        "--export", f"sglang:{folder / 'out'}", "--json", str(folder / "x.json"),
    ]  # fmt: skip
    main()


if __name__ == "__main__":
    run(*sys.argv[1:])
