"""Files other than databases that commit 6261dc7 wrote are read and written the same."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeopt.compile import CompilePool
from moeopt.compile.failure_memo import FailureMemo
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.provenance import KernelKey
from moeopt.core.shape import MoEShape
from moeopt.core.space import SearchSpace
from moeopt.core.trial import Cell, Failure
from moeopt.costmodel.trees import pack_correction, unpack_correction
from moeopt.errors import RecordingError
from moeopt.kernels import get_kernel
from moeopt.kernels.routing import Routing
from moeopt.measure.rates import Rates, RateStore, rate_key
from moeopt.recordings.bundle import bundle_recording
from moeopt.recordings.compile_sweep import CompileSweep
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Recording
from moeopt.recordings.landscape import Landscape, load_landscapes, write_summary
from moeopt.recordings.record import Recorder
from moeopt.storage.key import StudyKey
from tests.cli.conftest import Run

from .conftest import DATA, old_json
from .stored import exact

BATCH_SIZES = (1, 16, 64)


def _lines(path: Path) -> list[str]:
    """JSON lines in one spelling."""
    return [exact(json.loads(line)) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


# -- keys of studies --------------------------------------------------------------------------------


@pytest.mark.parametrize("old", old_json("keys.json"), ids=lambda old: old["digest"])
def test_keys(old: dict[str, Any]) -> None:
    key = StudyKey.from_attrs(old["attrs"])
    assert key is not None
    assert exact(key.attrs()) == exact(old["attrs"])
    assert (key.digest, key.title()) == (old["digest"], old["title"])
    cells = (Cell("up", 1), Cell("down", 4096), Cell("joint", 64))
    assert [key.study_name(cell) for cell in cells] == old["names"]


def test_routings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names stand in keys, and what a seed draws decides the bytes of a launch."""
    old = old_json("routings.json")
    monkeypatch.chdir(DATA)
    assert {text: Routing.parse(text).key for text in old["keys"]} == old["keys"]
    shapes = {name.partition(" on ")[0]: plan["shape"] for name, plan in old_json("plans.json").items()}
    drawn = {n: Routing.parse("uniform").draw(MoEShape.from_dict(s), 16, 3, 5).tobytes() for n, s in shapes.items()}
    assert {name: hashlib.sha256(data).hexdigest() for name, data in drawn.items()} == old["drawn"]


def test_the_builtin_kernel_is_the_same_one() -> None:
    """The hash of its source is part of every study's key: where it changes, no old study of it goes on.

    Who changes what the kernel computes or how changes this on purpose.
    """
    assert get_kernel("builtin").key.source_hash == old_json("failed.json")["source_hash"]


# -- recordings -------------------------------------------------------------------------------------


def _recorder(tmp_path: Path) -> Recorder:
    path = DATA / "recording.jsonl.gz"
    values = json.loads(gzip.decompress(path.read_bytes()).splitlines()[0])["space"]
    space = SearchSpace("mine", {key: tuple(row) for key, row in values.items()})
    return Recorder(RecordedDevice(Recording.load(path)), space, BATCH_SIZES, tmp_path / "again.jsonl.gz")


def test_a_recording_is_written_as_before(tmp_path: Path) -> None:
    assert _lines(_recorder(tmp_path).run()) == _lines(DATA / "recorded-again.jsonl.gz")


def test_half_a_recording_is_finished(tmp_path: Path) -> None:
    data = gzip.decompress((DATA / "recorded-again.part.gz").read_bytes())
    assert not data.endswith(b"\n"), "its last line is torn"
    (tmp_path / "again.jsonl.gz.part").write_bytes(data)
    first: list[int] = []
    path = _recorder(tmp_path).run(lambda done, total: first.append(done))
    assert first[0] == data.count(b"\n"), "what is there is not measured again"
    assert _lines(path) == _lines(DATA / "recorded-again.jsonl.gz")


def test_a_bundle_is_written_as_before(tmp_path: Path) -> None:
    path = bundle_recording(DATA / "recording.jsonl.gz", tmp_path / "bundle.jsonl.gz")
    assert _lines(path) == _lines(DATA / "contribution.jsonl.gz")


def _survey(path: Path, **changes: Any) -> CompileSweep:
    """A sweep over the recording's space, whose header is of the Triton and the kernel source that are here."""
    header, *rows = (json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines())
    kernel = get_kernel("builtin")
    header["kernel_hash"] = kernel.key.source_hash
    header["versions"]["triton"] = _triton()
    lines = [{**header, **changes}, *rows]
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    space = SearchSpace("mine", {key: tuple(values) for key, values in header["space"].items()})
    shape, gpu = MoEShape.from_dict(header["shape"]), GpuSpec.from_dict(header["gpu"])
    return CompileSweep(kernel, shape, gpu, space, BATCH_SIZES, path)


def _triton() -> str:
    from importlib.metadata import version

    return version("triton")


def test_a_compiled_space_is_not_compiled_again(tmp_path: Path) -> None:
    path = Path(shutil.copy(DATA / "compiled.jsonl.gz", tmp_path))
    survey = _survey(path)
    before = _lines(path)
    with CompilePool(survey.kernel, survey.shape, (12, 0), 1, tmp_path / "cache") as pool:
        survey.run(pool)
        assert pool.counts.asked == 0
    assert survey.counts.resumed == survey.counts.space == len(before) - 1
    assert _lines(path) == before
    assert all(not role.us for row in Recording.load(path).rows.values() for role in row.roles.values())


def test_a_compiled_space_of_another_kernel_is_refused(tmp_path: Path) -> None:
    path = Path(shutil.copy(DATA / "compiled.jsonl.gz", tmp_path))
    survey = _survey(path, kernel="builtin 0.0.9")
    pool = CompilePool(survey.kernel, survey.shape, (12, 0), 1, tmp_path / "cache")
    with pool, pytest.raises(RecordingError, match="another kernel"):
        survey.run(pool)


# -- what is remembered beside Triton's cache and in the user's -------------------------------------


def test_failed_compiles(tmp_path: Path) -> None:
    old = old_json("failed.json")
    path = tmp_path / "failed.jsonl"
    shutil.copy(DATA / "failed.jsonl", path)
    memo = FailureMemo(path)
    assert len(memo) == 4
    assert memo.get("another") is None, "one timeout is no proof"
    assert memo.get("late") == Failure("timeout", "compiling took over 61 s (the median is 0.8 s)")
    new = FailureMemo(tmp_path / "new.jsonl")
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        new.add(entry.pop("key"), Failure(**entry))
    assert new.path.read_bytes() == path.read_bytes()
    key = KernelKey(old["kernel"], "0.1.0", old["source_hash"])
    made_with = "triton3.6.0"
    expected = old["path"].replace(made_with, f"triton{_triton()}")
    assert FailureMemo.open(Path("cache"), key, (12, 0)).path == Path(expected)


def test_failed_compiles_are_known_to_the_pool(tmp_path: Path) -> None:
    kernel, shape = get_kernel("builtin"), MoEShape(8, 2, 256, 128)
    memo = FailureMemo.open(tmp_path, kernel.key, (12, 0))
    memo.path.parent.mkdir(parents=True)
    shutil.copy(DATA / "failed.jsonl", memo.path)
    config = LaunchConfig.from_dict(old_json("failed.json")["config"])
    with CompilePool(kernel, shape, (12, 0), 1, tmp_path) as pool:
        for number, role in enumerate(("up", "down")):
            compiled = pool.submit(config, role, 64).result(timeout=60)  # type: ignore[arg-type]
            assert compiled.remembered
            assert compiled.failure == Failure("compile", f"PassManager::run failed {number}", "logs/1.log")


def test_rates(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    shutil.copy(DATA / "rates.json", path)
    store = RateStore(path)
    some = MoEShape(8, 2, 256, 128)
    shapes = (some, replace(some, dtype="fp8_w8a8"), replace(some, dtype="int8_w8a8"))
    keys = [rate_key("NVIDIA H200", "570.1", "2.11.0", shape) for shape in shapes]
    rates = [store.load(key) for key in keys]
    assert rates == [Rates(3900.5, 4100.0, 750.25), Rates(3900.5, 4100.0, 750.25), Rates(3900.5, 4100.0, None)]
    new = RateStore(tmp_path / "new.json")
    for key, rate in zip(keys, rates, strict=True):
        assert rate is not None
        new.save(key, rate)
    assert exact(json.loads(new.path.read_text())) == exact(old_json("rates.json"))


# -- what is shipped --------------------------------------------------------------------------------


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("recording.jsonl.gz", "wide.jsonl.gz"):
        shutil.copy(DATA / name, folder)
    return folder


def test_a_summary_of_recordings_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = _folder(tmp_path)
    shutil.copy(DATA / "summary.npz", folder)
    caplog.set_level("INFO")
    found = load_landscapes(folder)
    assert "not in the summary" not in caplog.text
    for landscape, name in zip(found, ("recording.jsonl.gz", "wide.jsonl.gz"), strict=True):
        whole = Landscape.from_recording(Recording.load(DATA / name))
        assert (landscape.shape, landscape.gpu, landscape.cells) == (whole.shape, whole.gpu, whole.cells)
        assert np.array_equal(landscape.table, whole.table)
        assert np.allclose(landscape.us, whole.us, rtol=2e-3, equal_nan=True)


def test_a_summary_of_recordings_is_written_as_before(tmp_path: Path) -> None:
    with np.load(write_summary(_folder(tmp_path))) as new, np.load(DATA / "summary.npz") as old:
        assert sorted(new) == sorted(old)
        assert json.loads(str(new["heads"])) == json.loads(str(old["heads"]))
        for name in old:
            if name != "heads":
                assert new[name].dtype == old[name].dtype
                equal_nan = old[name].dtype.kind == "f"
                assert np.array_equal(new[name], old[name], equal_nan=equal_nan)


def test_trees_of_the_cost_model() -> None:
    with np.load(DATA / "trees.npz") as old:
        packed = {name: old[name] for name in ("sizes", "nodes", "numbers")}
        trees = unpack_correction(packed)
        said = trees(old["features"], np.arange(len(old["said"])), old["group"])
        assert np.array_equal(said, old["said"])
        for name, array in pack_correction(trees).items():
            assert array.dtype == packed[name].dtype
            assert np.array_equal(array, packed[name])


# -- plans ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(old_json("plans.json")))
def test_plans(name: str, run: Run, tmp_path: Path) -> None:
    old = old_json("plans.json")[name]
    fields = {key: value for key, value in old["shape"].items() if value is not None}
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items())
    (tmp_path / "plan.toml").write_text(f"[shape]\n{text}")
    done = run(
        "plan", "plan.toml", "--gpu", old["gpu"], "--space", old["space"]["name"], "--trials", old["trials"],
        "--triton", "3.6.0", "--json", "plan.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    new = json.loads((tmp_path / "plan.json").read_text())
    assert set(new) - {"engines"} == set(old)
    del new["engines"]  # came later
    for estimate in ("estimated_seconds", "estimated_seconds_compiled_before", "cores"):
        assert new[estimate] > 0, "of this machine, and of a cost model that may be fitted anew"
        old[estimate] = new[estimate]
    for estimate in ("memory_bytes", "least_memory_bytes"):
        assert new[estimate] == pytest.approx(old[estimate], rel=0.01), "the bytes of a launch may be counted better"
        old[estimate] = new[estimate]
    assert exact(new) == exact(old)
