"""Makes the files of ``data/`` with the code of commit 6261dc7, the last before the package was rearranged.

They are what users have on their disks: later code has to open, resume and write them the same, so they
are never made again with later code. To add one::

    git worktree add --detach /tmp/base 6261dc7
    PYTHONPATH=/tmp/base python tests/compat/make.py OUT [NAME ...]

and copy it from OUT. Every NAME is a function of this module; a server's dump needs PostgreSQL's programs.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from interface import command_table, signature
from moeopt.compile.memo import FailureMemo
from moeopt.compile.survey import Survey
from moeopt.contribute import bundle_recording
from moeopt.gpu import GpuSpec
from moeopt.measure.recording import RecordedDevice, Recording
from moeopt.options import TuneOptions
from moeopt.record import Recorder
from moeopt.search.landscape import write_summary
from moeopt.shape import MoEShape
from moeopt.space import LaunchConfig, SearchSpace
from moeopt.study import StudyKey, StudyStore
from moeopt.tuner import Tuner

import moeopt
from moeopt.cli import build_app
from moeopt.compile.pool import CompilePool
from moeopt.costmodel import Correction, load_correction, pack_correction
from moeopt.kernels import get_kernel
from moeopt.kernels.routing import Routing
from moeopt.measure.base import Cell, Failure, Job, Measurement, Race, Resources, never_stop
from moeopt.measure.roofline import Rates, RateStore, rate_key

BATCH_SIZES = (1, 16, 64)
TRIALS = 8
SEED = 3
SHAPE = MoEShape(8, 2, 256, 128)
GRID = {
    "BLOCK_SIZE_M": (16, 32, 64),
    "BLOCK_SIZE_N": (32, 64, 128),
    "BLOCK_SIZE_K": (64, 128),
    "GROUP_SIZE_M": (1, 16),
    "num_warps": (4, 8),
    "num_stages": (2, 3),
}
WIDE = {
    "BLOCK_SIZE_M": (16, 32, 64),
    "BLOCK_SIZE_N": (32, 64),
    "BLOCK_SIZE_K": (64, 128),
    "GROUP_SIZE_M": (1, 8),
    "num_warps": (2, 4),
    "num_stages": (3,),
    "maxnreg": (0, 128),
    "USE_TMA": (False, True),
}
SHAPES = {
    "bf16": MoEShape(256, 8, 3072, 256),
    "fp8 in blocks": MoEShape(256, 8, 7168, 256, dtype="fp8_w8a8", block_shape=(128, 128)),
    "int8 per channel": MoEShape(64, 6, 2048, 1408, dtype="int8_w8a8", per_channel=True),
    "int4 in groups": MoEShape(129, 9, 4096, 512, dtype="int4_w4a16", group_size=32, shared_experts=1, ep_size=2),
}


# -- recordings -------------------------------------------------------------------------------------


def _us(config: dict[str, Any], role: str, m: int) -> float:
    log = {key: math.log2(value) for key, value in config.items() if key.startswith(("BLOCK", "GROUP"))}
    cost = 1.0 + 0.08 * (log["BLOCK_SIZE_M"] - 4 - min(2, math.log2(m) / 3)) ** 2
    cost += 0.3 * (log["BLOCK_SIZE_N"] - (6 if role == "up" else 5)) ** 2
    cost += 0.02 * (log["BLOCK_SIZE_K"] - 7) ** 2 + 0.01 * log["GROUP_SIZE_M"] / 4
    cost += 0.03 * (config["num_warps"] == (8 if m < 32 else 4)) + 0.02 * (config["num_stages"] == 2)
    cost += 0.04 * (config.get("maxnreg", 0) == 128) - 0.03 * config.get("USE_TMA", False)
    return (10 + m / 4) * (1.5 if role == "up" else 1.0) * cost


def _row(config: dict[str, Any]) -> dict[str, Any]:
    if config["BLOCK_SIZE_N"] == 64 and config["num_stages"] == 3 and config["num_warps"] == 8:
        return {"config": config, "status": "compile_error", "error": "PassManager::run failed"}
    if config["BLOCK_SIZE_M"] == 64 and config["BLOCK_SIZE_N"] == 128 and config["num_stages"] == 3:
        return {"config": config, "status": "out_of_resources", "error": "shared memory"}
    row: dict[str, Any] = {"config": config, "status": "ok", "compile_s": 0.5}
    for role in ("up", "down"):
        times = {str(m): [_us(config, role, m) * (1 + 0.001 * i) for i in range(5)] for m in BATCH_SIZES}
        row[role] = {"registers": 64, "spills": 0, "shared_bytes": 8192, "relative_error": 0.0017, "us": times}
    return row


def _recorded(out: Path, name: str, values: dict[str, tuple[Any, ...]]) -> Path:
    """What the Recorder makes of a landscape that no GPU has."""
    header = {
        "format": "moe-landscape/1",
        "kernel": "builtin 0.1.0",
        "kernel_hash": "0123456789abcdef",
        "shape": SHAPE.to_dict(),
        "gpu": GpuSpec.by_name("NVIDIA H200").to_dict(),
        "versions": {"triton": "3.6.0", "torch": "2.11.0", "driver": "570.1"},
        "space": {key: list(row) for key, row in values.items()},
        "roofline_us": {
            role: {str(m): 0.7 * (10 + m / 4) * (1.5 if role == "up" else 1.0) for m in BATCH_SIZES}
            for role in ("up", "down")
        },
    }
    configs = [
        LaunchConfig.from_dict(dict(zip(values, row, strict=True))) for row in itertools.product(*values.values())
    ]
    lines = [header, *(_row(config.to_dict()) for config in configs)]
    source = out / f"source-{name}"
    with gzip.open(source, "wt") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    target = out / name
    Recorder(RecordedDevice(Recording.load(source)), SearchSpace("mine", values), BATCH_SIZES, target).run()
    source.unlink()
    return target


def recording(out: Path) -> None:
    """A recording, one with more parameters, what `record` makes of the first one, and half of that."""
    path = _recorded(out, "recording.jsonl.gz", GRID)
    _recorded(out, "wide.jsonl.gz", WIDE)
    device, space = RecordedDevice(Recording.load(path)), SearchSpace("mine", GRID)
    Recorder(device, space, BATCH_SIZES, out / "recorded-again.jsonl.gz").run()

    def stop(done: int, total: int) -> None:
        if done == 60:
            raise KeyboardInterrupt

    cut = Recorder(device, space, BATCH_SIZES, out / "recorded-again.cut")
    try:
        cut.run(stop)
    except KeyboardInterrupt:
        data = cut.part.read_bytes() + b'{"config":{"BLOCK_SI'
        (out / "recorded-again.part.gz").write_bytes(gzip.compress(data, mtime=0))
        cut.part.unlink()
    bundle_recording(path, out / "contribution.jsonl.gz")


def compiled(out: Path) -> None:
    """A recording without times, of `moeopt compile`, and the failures that it remembers in Triton's cache."""
    values = {**GRID, "BLOCK_SIZE_M": (16,), "BLOCK_SIZE_N": (32, 64), "BLOCK_SIZE_K": (64,), "GROUP_SIZE_M": (1,)}
    space = SearchSpace("mine", {**values, "num_warps": (4,), "num_stages": (2, 3)})
    kernel, gpu = get_kernel("builtin"), GpuSpec.by_name("NVIDIA GeForce RTX 5090")
    path = out / "compiled.jsonl.gz"
    cache = out / "cache"
    survey = Survey(kernel, SHAPE, gpu, space, BATCH_SIZES, path)
    with CompilePool(kernel, SHAPE, gpu.compute_capability, 1, cache, inspect=True) as pool:
        survey.run(pool)
        specialisations = {role: kernel.specialisation(SHAPE, role, 64) for role in ("up", "down")}
        memo = FailureMemo(cache / "failed.jsonl")
        for number, role in enumerate(("up", "down")):
            future = pool.submit(space.configs()[0], role, 64)
            task = next(task for task in pool._known.values() if task.future is future)
            memo.add(pool._memo_key(task), Failure("compile", f"PassManager::run failed {number}", "logs/1.log"))
        memo.add("another", Failure("timeout", "compiling took over 60 s (the median is 0.8 s)"))
        memo.add("late", Failure("timeout", "compiling took over 60 s (the median is 0.8 s)"))
        memo.add("late", Failure("timeout", "compiling took over 61 s (the median is 0.8 s)"))
        real = FailureMemo.open(Path("cache"), kernel.key, gpu.compute_capability).path
    shutil.copy(memo.path, out / "failed.jsonl")
    shutil.rmtree(cache)
    _write_json(
        out / "failed.json",
        {
            "path": str(real), "kernel": kernel.key.name, "source_hash": kernel.key.source_hash,
            "config": space.configs()[0].to_dict(), "specialisations": specialisations,
        },
    )  # fmt: skip


# -- databases --------------------------------------------------------------------------------------


def _moeopt(out: Path, *args: str) -> str:
    command = [sys.executable, "-P", "-m", "moeopt.cli", *args]
    return subprocess.run(command, cwd=out, check=True, stdout=subprocess.PIPE, text=True).stdout


def tune_arguments(name: str, kind: str = "db") -> list[str]:
    """The command that made a database; the same one goes on with it."""
    mode = "joint" if name == "joint" else "split"
    space, source = ("wide", "wide") if name == "wide" else ("grid", "recording")
    return [
        "tune", "--gpu", f"recorded:{source}.jsonl.gz", "--batch-sizes", "1,16,64", "--mode", mode, "--space", space,
        "--trials", str(TRIALS), "--seed", str(SEED), "--storage", f"{name}.{kind}",
    ]  # fmt: skip


def _tuned(out: Path, name: str, kind: str = "db") -> None:
    exports = [part for engine in _engines(name) for part in ("--export", f"{engine}:{name}-files/{engine}")]
    _moeopt(out, *tune_arguments(name, kind), "--json", f"{name}.json", *exports)
    _keep_json(out / f"{name}.json")
    _kept(out, name, kind)


def _engines(name: str) -> list[str]:
    return ["sglang", "vllm"] if name != "wide" else ["sglang"]  # vLLM knows no USE_TMA


def _keep_json(path: Path) -> None:
    data = json.loads(path.read_text().replace(f"{path.parent}/", "OUT/"))
    data["wall_s"], data["timings"] = 1.5, dict.fromkeys(data["timings"], 0.5)
    _write_json(path, data)


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def _kept(out: Path, name: str, kind: str, torn: bytes = b"") -> None:
    """Status of a database, and the database itself, packed; a journal with what is torn at its end."""
    status = json.loads(_moeopt(out, "status", "--storage", f"{name}.{kind}", "--json"))
    _write_json(out / f"{name}.status.json", {**status, "storage": f"{name}.{kind}"})
    path = out / f"{name}.{kind}"
    if kind == "db":
        whole = out / f"{name}.whole"
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("VACUUM INTO ?", (str(whole),))
        whole.replace(path)
    (out / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes() + torn, mtime=0))
    for left in out.glob(f"{path.name}*"):
        if left.suffix != ".gz":
            left.unlink()


class Dies(RecordedDevice):
    """Is killed (kill -9) after so many measurements, once these are stored."""

    def __init__(self, path: Path, after: int) -> None:
        super().__init__(Recording.load(path))
        self._left = after

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        for measurement in super().measure(jobs, race):
            if self._left == 0:
                time.sleep(1.5)
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
            yield measurement


def _killed(work: Callable[[], object]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, status


def _cut(out: Path, storage: str, after: int, sampler: optuna.samplers.BaseSampler | None = None) -> None:
    """The tune of `tune_arguments`, killed."""

    def work() -> None:
        with StudyStore(storage) as store:
            options = TuneOptions(batch_sizes=BATCH_SIZES, trials=TRIALS, seed=SEED, sampler=sampler)
            Tuner(Dies(out / "recording.jsonl.gz", after), store, options).run()

    _killed(work)


def finished(out: Path) -> None:
    """A finished tune in split mode, and what other commands say of its database."""
    _tuned(out, "finished")
    with gzip.open(out / "finished.db.gz") as file:
        (out / "finished.db").write_bytes(file.read())
    _moeopt(out, "export", "sglang:exported", "--storage", "finished.db", "--ladder", "auto", "--json", "export.json")
    answer = (out / "export.json").read_text().replace(f"{out}/", "OUT/")
    (out / "export.json").write_text(answer)
    _moeopt(
        out, "verify", "--storage", "finished.db", "--gpu", "recorded:recording.jsonl.gz", "--passes", "4", "--json",
        "verify.json",
    )  # fmt: skip
    (out / "finished.db").unlink()
    shutil.rmtree(out / "exported")


def joint(out: Path) -> None:
    """A finished tune in joint mode."""
    _tuned(out, "joint")


def wide(out: Path) -> None:
    """A finished tune of the wide space with maxnreg and USE_TMA."""
    _tuned(out, "wide")


def journal(out: Path) -> None:
    """A finished tune in a journal file."""
    _tuned(out, "journal", "journal")


def cut(out: Path) -> None:
    """A tune that was killed in the middle, and a trial that a process of plain Optuna left RUNNING."""
    _cut(out, str(out / "cut.db"), 31)
    with StudyStore(out / "cut.db") as store:
        key = store.keys()[0].key
        store.optuna_study(key, Cell("up", 16)).ask()
    _kept(out, "cut", "db")


def cutjournal(out: Path) -> None:
    """The same in a journal file, whose last line is torn."""
    _cut(out, str(out / "cutjournal.journal"), 31)
    _kept(out, "cutjournal", "journal", torn=b'{"op_code":4,"worker_id":"a","stu')


def tpe(out: Path) -> None:
    """A tune with one of Optuna's samplers: its run keeps a long list of configs to try first."""
    for kind in ("db", "journal"):
        storage = str(out / f"tpe.{kind}")
        result = moeopt.tune(
            gpu=f"recorded:{out / 'recording.jsonl.gz'}", batch_sizes=BATCH_SIZES, trials=TRIALS, seed=SEED,
            storage=storage, sampler=optuna.samplers.TPESampler(seed=1), progress=False,
        )  # fmt: skip
        result.write_json(out / "tpe.json")
    _keep_json(out / "tpe.json")
    # Killed while the parts of the run's attribute were being written: one of several is there.
    lines = (out / "tpe.journal").read_bytes().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if b'"run:' in line)
    assert b'.001":' in lines[first + 1]
    (out / "torn.journal.gz").write_bytes(gzip.compress(b"".join(lines[: first + 1]), mtime=0))
    (out / "tpe.journal").unlink()
    (out / "tpe.journal.run").unlink()
    _kept(out, "tpe", "db")


def cuttpe(out: Path) -> None:
    """The same, killed in the middle."""
    _cut(out, str(out / "cuttpe.db"), 31, optuna.samplers.TPESampler(seed=1))
    _kept(out, "cuttpe", "db")


class Live(RecordedDevice):
    """Answers as a GPU does: not replayed, with faults and facts of every kind."""

    def __init__(self, path: Path, driver: str) -> None:
        super().__init__(Recording.load(path))
        self.info = replace(self.info, recorded=False, driver=driver, source="measured on a GPU that is none")
        self._asked: Counter[Job] = Counter()

    def measure(self, jobs: Sequence[Job], race: Race = never_stop) -> Generator[Measurement]:
        for measurement in super().measure(jobs, race):
            yield self._faulty(measurement)

    def _faulty(self, measurement: Measurement) -> Measurement:
        config, job = measurement.job.config, measurement.job
        if measurement.status == "failed":
            return measurement
        kind = (config.block_size_n // 32 + config.num_stages + config.num_warps // 4 + config.group_size_m // 16) % 6
        if kind == 1 and config.block_size_k == 128:
            why = Failure("timeout", 'a launch took over 5 s; "µ" \\ ' + "and so on " * 220, None)
            return Measurement(job, "failed", resources=measurement.resources, failure=why)
        if kind == 1:
            spilled = {role: Resources(255, 512, 40960, 1.25) for role in job.cell.roles}
            why = Failure("constraints", "512 bytes of local memory per thread", None)
            return Measurement(job, "rejected", resources=spilled, failure=why)
        if kind == 2:
            error = math.inf if config.block_size_k == 64 else math.nan if config.block_size_m == 32 else 0.25
            why = Failure("correctness", f"relative error {error} is over 0.01", "logs/moeopt/1.log")
            return Measurement(
                job, "failed", relative_error=error, resources=measurement.resources, failure=why, extra={"sm_mhz": 1}
            )
        extra = {"sm_mhz": 1980, "temperature_c": 41.5, "disturbed": kind == 0, "clocks": [1, None, "x"]}
        # The clock falls while the finalists take turns.
        self._asked[job] += 1
        slower = 1 + 0.004 * (self._asked[job] - 1) * (1 + config.group_size_m / 16)
        return replace(measurement, us=tuple(us * slower for us in measurement.us), extra=extra)


def live(out: Path) -> None:
    """Two tunes as of a GPU, with two drivers: rejected and failed configs, times of finalists, facts of timings."""
    path = out / "live.db"
    seen: Counter[str] = Counter()
    for driver, trials in (("570.1", TRIALS), ("580.2", 3)):
        with StudyStore(path) as store:
            options = TuneOptions(batch_sizes=BATCH_SIZES, trials=trials, seed=SEED)
            result = Tuner(Live(out / "recording.jsonl.gz", driver), store, options).run()
            assert result.key is not None
            result.export("sglang", out / "live-files" / driver)
            result.write_json(out / f"live-{driver}.json")
            _keep_json(out / f"live-{driver}.json")
            for trials_ in store.load(result.key, options.cells()).values():
                seen.update(trial.measurement.status for trial in trials_)
                seen.update(t.measurement.failure.reason for t in trials_ if t.measurement.failure is not None)
            finals = [store.cell_info(result.key, cell).get("finals") for cell in options.cells()]
            assert any(finals), finals
    wanted = {"ok", "raced_out", "rejected", "failed", "compile", "constraints", "correctness", "timeout"}
    assert set(seen) == wanted, seen
    _kept(out, "live", "db")


def notes(out: Path) -> None:
    """A database that `moeopt dashboard` wrote its notes into."""
    from moeopt.dashboard import annotate

    storage = str(out / "notes.db")
    moeopt.tune(
        gpu=f"recorded:{out / 'recording.jsonl.gz'}", batch_sizes=[16], trials=3, storage=storage, progress=False
    )
    with StudyStore(storage) as store:
        annotate(store)
    _kept(out, "notes", "db")


def server(out: Path) -> None:
    """A server's database after a tune was killed that shared its jobs: some wait, some are claimed, some done."""
    from tests.storage.server import PostgresServer

    postgres = PostgresServer()
    try:
        postgres.start()
        url = postgres.create_database("server")
        _cut(out, url, 31)
        dump = subprocess.run(
            [postgres._bin / "pg_dump", "--inserts", "--no-owner", "--no-privileges", "-d", url],
            check=True, stdout=subprocess.PIPE, text=True,
        ).stdout  # fmt: skip
    finally:
        postgres.remove()
    # psql's own commands, and words that older servers do not know.
    unwanted = ("\\", "--", "SET ", "SELECT pg_catalog.set_config")
    lines = [line for line in dump.splitlines() if line and not line.startswith(unwanted)]
    text = "\n".join(lines).replace(f"'{socket.gethostname()}:", "'host:")
    (out / "server.sql.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


# -- other files ------------------------------------------------------------------------------------


def keys(out: Path) -> None:
    """Keys of studies: their attributes, digests, titles and names."""
    first = StudyKey(SHAPES["bf16"], "NVIDIA H200", "builtin", "0.1.0", "0123456789abcdef", "3.6.0", "2.11.0", "570.1")
    some = [
        first,
        replace(first, mode="joint"),
        replace(first, routing="zipf:1.2"),
        replace(first, routing="uniform, warm L2"),
        replace(first, routing="file:0123456789ab, warm L2"),
        replace(first, recorded=True, driver=""),
        replace(first, kernel="sglang", kernel_version="0.5.23", gpu="NVIDIA GeForce RTX 5090"),
        replace(first, kernel="vllm", kernel_version="0.11.0", kernel_hash="", mode="joint"),
        *(replace(first, shape=shape) for name, shape in SHAPES.items() if name != "bf16"),
        replace(first, shape=MoEShape(16, 2, 4096, 14336, dtype="fp16", gated=False)),
        replace(first, shape=MoEShape(32, 4, 2048, 768, dtype="int8_w8a16", group_size=128)),
        StudyKey(SHAPES["bf16"], "a | strange GPU " * 40, "builtin"),
    ]
    _write_json(
        out / "keys.json",
        [
            {
                "attrs": key.attrs(),
                "digest": key.digest,
                "title": key.title(),
                "names": [key.study_name(cell) for cell in (Cell("up", 1), Cell("down", 4096), Cell("joint", 64))],
            }
            for key in some
        ],
    )


def plans(out: Path) -> None:
    """Plans of four shapes on two GPUs."""
    found = {}
    for gpu in ("NVIDIA H200", "NVIDIA GeForce RTX 5090"):
        for name, shape in SHAPES.items():
            text = "".join(
                f"{key} = {json.dumps(value)}\n" for key, value in shape.to_dict().items() if value is not None
            )
            space = "wide" if name == "bf16" else "grid"
            (out / "plan.toml").write_text(f"[shape]\n{text}")
            _moeopt(
                out, "plan", "plan.toml", "--gpu", gpu, "--space", space, "--trials", "12", "--triton", "3.6.0",
                "--json", "plan.json",
            )  # fmt: skip
            found[f"{name} on {gpu}"] = json.loads((out / "plan.json").read_text())
    (out / "plan.toml").unlink()
    (out / "plan.json").unlink()
    _write_json(out / "plans.json", found)


def study(out: Path) -> None:
    """A study file with every key, and what a tune of it says."""
    (out / "study.toml").write_text(
        f"""\
description = "A study with every key"

[shape]
num_experts = {SHAPE.num_experts}
top_k = {SHAPE.top_k}
hidden_size = {SHAPE.hidden_size}
intermediate_size = {SHAPE.intermediate_size}
dtype = "bf16"
per_channel = false
gated = true
shared_experts = 0
ep_size = 1

[tune]
batch_sizes = [64, 1]
gpu = "recorded:recording.jsonl.gz"
kernel = "builtin"
mode = "joint"
space = "grid"
trials = 4
timeout = "5m"
storage = "study.db"
routing = "uniform"
seed = 7
workers = 1

[replay]
recording = "recording.jsonl.gz"

[export]
engine = "vllm"
directory = "study-files"
"""
    )
    _moeopt(out, "tune", "study.toml", "--json", "study.json")
    _keep_json(out / "study.json")
    _kept(out, "study", "db")
    (out / "study.status.json").unlink()


def rates(out: Path) -> None:
    """Measured rates of GPUs, as the user's cache keeps them."""
    store = RateStore(out / "rates.json")
    for name, shape in SHAPES.items():
        key = rate_key("NVIDIA H200", "570.1", "2.11.0", shape)
        store.save(key, Rates(3900.5, 4100.0, None if name.startswith("int8") else 750.25))


def arrays(out: Path) -> None:
    """The summary of a folder of recordings, and the first trees of the cost model with what they say."""
    folder = out / "folder"
    folder.mkdir()
    for name in ("recording.jsonl.gz", "wide.jsonl.gz"):
        shutil.copy(out / name, folder)
    shutil.copy(write_summary(folder), out / "summary.npz")
    shutil.rmtree(folder)
    whole = load_correction()
    end = int(whole.roots[6])
    trees = Correction(whole.roots[:6], whole.feature[:end], whole.threshold[:end], whole.left[:end], whole.value[:end])
    random = np.random.default_rng(0)
    features, group = random.normal(3.0, 3.0, (40, 22)), random.integers(0, 7, 40).astype(float)
    said = trees(features, np.arange(40), group)
    np.savez_compressed(out / "trees.npz", features=features, group=group, said=said, **pack_correction(trees))


def routings(out: Path) -> None:
    """Keys of routings, that of a file among them, and what a seed draws."""
    rng = np.random.default_rng(1)
    np.save(out / "routing.npy", np.argsort(rng.random((40, 8)), axis=1)[:, :2].astype(np.int32))
    texts = ("uniform", "zipf:1.2", "zipf:1.20", "zipf:0", "dirichlet:.5", f"file:{out / 'routing.npy'}")
    drawn = {name: Routing.parse("uniform").draw(shape, 16, 3, 5).tobytes() for name, shape in SHAPES.items()}
    _write_json(
        out / "routings.json",
        {
            "keys": {text.replace(f"{out}/", ""): Routing.parse(text).key for text in texts},
            "drawn": {name: hashlib.sha256(data).hexdigest() for name, data in drawn.items()},
        },
    )


def doctor(out: Path) -> None:
    """What `moeopt doctor` says of logs and of a folder."""
    found = []
    shape = ["--experts", "8", "--top-k", "2", "--hidden", "256", "--intermediate", "128", "--dtype", "bf16"]
    folder = ["--config-dir", "finished-files/sglang", *shape]
    logs = sorted((Path(__file__).parents[1] / "data/logs").glob("*.log"))
    for log in logs:
        shutil.copy(log, out)
    for args in (
        *(["--log", log.name] for log in logs),
        ["--log", logs[-1].name, "--config-dir", "finished-files/sglang"],
        [*folder, "--gpu", "NVIDIA H200", "--triton", "3.6.0"],
        [*folder, "--gpu", "NVIDIA H200", "--triton", "3.7.0"],
        [*folder, "--gpu", "NVIDIA H100 80GB HBM3", "--triton", "3.6.0"],
        ["--config-dir", "finished-files/vllm", "--engine", "vllm", *shape, "--gpu", "NVIDIA H200"],
    ):
        command = [sys.executable, "-P", "-m", "moeopt.cli", "doctor", *args, "--json"]
        done = subprocess.run(command, cwd=out, stdout=subprocess.PIPE, text=True, check=False)
        text = done.stdout.replace(f"{out}/", "OUT/")
        found.append({"args": args, "status": done.returncode, "answer": json.loads(text)})
    for log in logs:
        (out / log.name).unlink()
    _write_json(out / "doctor.json", found)


def suggested(out: Path) -> None:
    """The mark of a folder that holds what was not measured."""
    _moeopt(
        out, "suggest", "suggested", "--experts", "8", "--top-k", "2", "--hidden", "256", "--intermediate", "128",
        "--dtype", "bf16", "--gpu", "NVIDIA H200", "--batch-sizes", "1,64", "--triton", "3.6.0",
    )  # fmt: skip
    shutil.rmtree(out / "suggested" / "configs")


def commands(out: Path) -> None:
    """All commands with their options."""
    _write_json(out / "commands.json", command_table(build_app()))


def names(out: Path) -> None:
    """The public names, how they are called, and what a result has."""
    table = {name: getattr(moeopt, name) for name in moeopt.__all__}
    with gzip.open(out / "finished.db.gz") as file:
        (out / "names.db").write_bytes(file.read())
    result = moeopt.load(str(out / "names.db"))
    (out / "names.db").unlink()
    some = {"TuneResult": result, "BatchResult": result.best(64), "RoleResult": result.best(64).up}
    _write_json(
        out / "names.json",
        {
            "signatures": {
                name: signature(value)
                for name, value in table.items()
                if callable(value) and name not in (*some, "MoeoptError")
            },
            "attributes": {name: [a for a in dir(value) if not a.startswith("_")] for name, value in some.items()},
            "names": list(table),
        },
    )


PARTS = (
    recording, compiled, finished, joint, wide, journal, cut, cutjournal, tpe, cuttpe, live, notes, server, keys, plans,
    study, rates, arrays, routings, doctor, suggested, commands, names,
)  # fmt: skip


def main(out: Path, names: Sequence[str]) -> None:
    """Makes some or all."""
    out.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if not names or part.__name__ in names:
            part(out.resolve())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
