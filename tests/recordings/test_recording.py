"""Recordings: what is read, how it is replayed, and files that are broken in every way."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeopt import LaunchConfig, SearchSpace
from moeopt.core.trial import Cell, Job, Resources
from moeopt.errors import RecordingError
from moeopt.recordings.device import RecordedDevice
from moeopt.recordings.format import Header, Recording

Write = Callable[..., Path]
FAST = LaunchConfig(16, 64, 128, 1, 4, 3)
CRASHES = LaunchConfig(32, 128, 64, 1, 8, 3)
TOO_LARGE = LaunchConfig(64, 128, 64, 1, 4, 3)


@pytest.fixture
def device(tiny_recording: Write) -> RecordedDevice:
    return RecordedDevice(Recording.load(tiny_recording()))


def lines_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_lines(path: Path, lines: Sequence[object]) -> Path:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    return path


def message(path: Path) -> str:
    with pytest.raises(RecordingError) as error:
        Recording.load(path)
    text = str(error.value)
    assert text.startswith(f"{path}: ") and "\n" not in text and len(text) < 500 + len(str(path))
    return text


def test_what_is_read(tiny_recording: Write) -> None:
    path = tiny_recording()
    recording = Recording.load(path)
    rows = lines_of(path)[1:]
    assert len(recording.rows) == len(rows) == 144
    assert recording.batch_sizes == (1, 16, 64)
    assert recording.shape.slug() == "E8-top2-K256-N128-bf16"
    assert recording.gpu.name == "NVIDIA H200" and recording.gpu.bandwidth_gbps == 4800
    for row in rows:
        read = recording.rows[LaunchConfig.from_dict(row["config"])]
        assert read.status == row["status"] and (read.error or None) == row.get("error")
        for role, part in read.roles.items():
            assert {str(m): list(us) for m, us in part.us.items()} == row[role]["us"]
            assert read.resources(role) == Resources(row[role]["registers"], 0, 8192, 0.5)
            assert part.relative_error == row[role]["relative_error"]


def test_batch_sizes_are_those_that_every_timed_config_has(tiny_recording: Write, tmp_path: Path) -> None:
    lines = lines_of(tiny_recording())
    row = next(r for r in lines[1:] if r["status"] == "ok")
    del row["down"]["us"]["16"]
    assert Recording.load(write_lines(tmp_path / "less.gz", lines)).batch_sizes == (1, 64)


def test_replay_gives_the_recorded_rounds(device: RecordedDevice) -> None:
    jobs = [Job(Cell(role, m), FAST) for role in ("up", "down") for m in (1, 64)]  # type: ignore[arg-type]  # roles
    for job, answer in zip(jobs, device.measure(jobs), strict=True):
        row = device.recording.rows[FAST]
        recorded = row.roles[job.cell.role]  # type: ignore[index]  # not joint here
        assert answer.job == job and answer.status == "ok"
        assert answer.us == recorded.us[job.cell.batch_size] and answer.relative_error == 0.0017
        assert answer.resources == {job.cell.role: row.resources(job.cell.role)}
        assert answer.median_us == sorted(answer.us)[2]


def test_a_joint_cell_is_the_sum_of_both_roles_round_by_round(device: RecordedDevice) -> None:
    up, down, joint = device.measure([Job(Cell(role, 16), FAST) for role in ("up", "down", "joint")])  # type: ignore[arg-type]  # roles
    assert joint.us == tuple(a + b for a, b in zip(up.us, down.us, strict=True))
    assert set(joint.resources) == {"up", "down"}


def test_race_ends_a_measurement_after_the_round_that_it_says(device: RecordedDevice) -> None:
    seen: list[int] = []

    def race(job: Job, rounds: Sequence[float]) -> bool:
        seen.append(len(rounds))
        return len(rounds) == 2

    (answer,) = device.measure([Job(Cell("up", 16), FAST)], race)
    assert answer.status == "raced_out" and len(answer.us) == 2 and seen == [1, 2]


def test_failures_are_values_with_a_reason(device: RecordedDevice) -> None:
    cell = Cell("up", 16)
    unknown = LaunchConfig(16, 64, 128, 3, 4, 3)
    jobs = [Job(cell, CRASHES), Job(cell, TOO_LARGE), Job(cell, unknown), Job(Cell("joint", 17), FAST)]
    crash, large, other, size = device.measure(jobs)
    assert [m.status for m in (crash, large, other, size)] == ["failed"] * 4
    assert crash.failure and (crash.failure.reason, crash.failure.message) == ("compile", "PassManager::run failed")
    assert large.failure and large.failure.reason == "constraints"
    assert other.failure and "not in the recording" in other.failure.message
    assert size.failure and "batch size 17 is not in the recording" in size.failure.message
    assert crash.median_us == float("inf")


def test_measure_is_lazy(device: RecordedDevice) -> None:
    rounds: list[Job] = []
    jobs = [Job(Cell("up", m), FAST) for m in (1, 16, 64)]
    results = device.measure(jobs, lambda job, _: bool(rounds.append(job)))
    next(results)
    assert {job.cell.batch_size for job in rounds} == {1}
    results.close()


def test_candidates_are_those_that_the_gpu_would_try(device: RecordedDevice) -> None:
    configs = SearchSpace.grid(device.spec.shape).configs()
    candidates = device.spec.candidates(configs)
    assert CRASHES in candidates and TOO_LARGE not in candidates
    assert set(candidates) < set(configs) and all(c in device.recording.rows for c in candidates)
    assert candidates == [c for c in configs if c in set(candidates)]


def test_device_info_says_that_nothing_is_measured_here(device: RecordedDevice) -> None:
    info = device.spec.provenance
    assert info.recorded and "nothing is measured on this machine" in info.source and "NVIDIA H200" in info.source
    assert (info.kernel, info.kernel_version, info.kernel_hash) == ("builtin", "0.1.0", "0123456789abcdef")
    assert (info.triton, info.torch, info.routing) == ("3.6.0", "2.11.0", "uniform")


def test_rooflines_where_the_header_has_them(tiny_recording: Write) -> None:
    device = RecordedDevice(Recording.load(tiny_recording()))
    assert device.spec.roofline_us(Cell("up", 16)) == pytest.approx(0.9 * 14 * 1.5)
    assert device.spec.roofline_us(Cell("joint", 16)) == pytest.approx(0.9 * 14 * 2.5)
    assert device.spec.roofline_us(Cell("up", 17)) is None
    none = RecordedDevice(Recording.load(tiny_recording("none.gz", roofline_us={})))
    assert none.spec.roofline_us(Cell("up", 16)) is None


@pytest.mark.parametrize(("kernel", "text"), [("vllm 0.33.0", "16x64x128 G1 w4 s4"), ("sglang", "64x64x32 G8 w4 s3")])
def test_default_config_is_that_of_the_recordings_engine(tiny_recording: Write, kernel: str, text: str) -> None:
    device = RecordedDevice(Recording.load(tiny_recording(kernel=kernel)))
    assert str(device.spec.default_config("up", 16)) == text


def test_extras_of_the_recorded_space(tiny_recording: Write) -> None:
    device = RecordedDevice(Recording.load(tiny_recording()))
    assert device.spec.space_extras == ()
    wide = {"space": {"BLOCK_SIZE_M": [16], "maxnreg": [0, 96]}}
    assert RecordedDevice(Recording.load(tiny_recording("w.gz", **wide))).spec.space_extras == ("maxnreg",)


def test_every_truncation_is_found(tiny_recording: Write, tmp_path: Path) -> None:
    data = tiny_recording().read_bytes()
    path = tmp_path / "cut.gz"
    cuts = {*range(40), *range(0, len(data), max(1, len(data) // 60)), *range(len(data) - 12, len(data))}
    for length in sorted(cuts):
        path.write_bytes(data[:length])
        text = message(path)
        assert "truncated" in text or "empty" in text or "not a recording" in text, length


def test_truncated_before_compressing(tiny_recording: Write, tmp_path: Path) -> None:
    with gzip.open(tiny_recording()) as file:
        text = file.read()
    path = tmp_path / "cut.gz"
    for length in (1, 100, len(text) // 2, len(text) - 2):
        path.write_bytes(gzip.compress(text[:length]))
        assert "is not JSON (truncated?)" in message(path)


def test_flipped_bytes_are_found(tiny_recording: Write, tmp_path: Path) -> None:
    with gzip.open(tiny_recording()) as file:
        data = gzip.compress(file.read())  # its header, unlike that of a named file, ends at byte 10
    path = tmp_path / "flipped.gz"
    for position in range(10, len(data), max(1, len(data) // 80)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :])
        message(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [  # the time in gzip's header would be in the tests' names, which have to be the same in all processes
        (b"", "empty"),
        (b"plain text\n", "not a recording"),
        (b'{"format": "moe-landscape/1"}\n', "not a recording"),
        (b"PK\x03\x04", "not a recording"),
        (gzip.compress(b"", mtime=0), "empty"),
        (gzip.compress(b"\n\n", mtime=0), "empty"),
        (gzip.compress(b"\xff\xfe\xfd", mtime=0), "not a recording"),
        (gzip.compress(b"[1]\n", mtime=0), "line 1 is not a JSON object"),
        (gzip.compress(b"[" * 100_000, mtime=0), "line 1 is not JSON"),
        (gzip.compress(b'{"format": "moe-landscape/2"}\n', mtime=0), "its format is 'moe-landscape/2'"),
        (gzip.compress(b'{"16": {"BLOCK_SIZE_M": 16}}\n', mtime=0), "its format is None"),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "other.gz"
    path.write_bytes(content)
    assert said in message(path)


def test_no_file(tmp_path: Path) -> None:
    assert "no such file" in message(tmp_path / "nowhere.gz")
    assert "not a recording" in message(tmp_path)


@pytest.mark.parametrize("key", ["shape", "gpu", "kernel", "versions"])
def test_header_keys_that_are_missing(tiny_recording: Write, tmp_path: Path, key: str) -> None:
    lines = lines_of(tiny_recording())
    del lines[0][key]
    assert f"the header cannot be used (Object missing required field `{key}`)" in message(
        write_lines(tmp_path / "x.gz", lines)
    )


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"shape": [8, 2]}, "shape is [8, 2]: a mapping"),
        ({"shape": {}}, "'num_experts' is missing"),
        ({"shape": {"num_experts": "8", "top_k": 2, "hidden_size": 1, "intermediate_size": 1}}, "num_experts is '8'"),
        ({"gpu": "H200"}, "gpu is 'H200': a mapping"),
        ({"gpu": {"name": "NVIDIA B9000"}}, "'NVIDIA B9000' is not in the table"),
        ({"gpu": {"name": "NVIDIA H200", "multiprocessors": "132"}}, "multiprocessors is '132'"),
        ({"kernel": None}, "Expected `str`, got `null` - at `$.kernel`"),
        ({"versions": "3.6.0"}, "Expected `object`, got `str` - at `$.versions`"),
        ({"space": ["BLOCK_SIZE_M"]}, "Expected `object`, got `array` - at `$.space`"),
        ({"roofline_us": [1]}, "Expected `object`, got `array` - at `$.roofline_us`"),
        ({"roofline_us": {"up": {"1": "fast"}}}, "Expected `float`, got `str` - at `$.roofline_us[...][...]`"),
    ],
)
def test_bad_headers(tiny_recording: Write, header: dict[str, Any], said: str) -> None:
    assert said in message(tiny_recording(**header))


@pytest.mark.parametrize(
    "change",
    [
        {"config": None},
        {"config": {}},
        {"config": {"BLOCK_SIZE_M": 16}},
        {"status": None},
        {"status": "fine"},
        {"up": None},
        {"up": []},
        {"up": {"registers": 1, "spills": 0, "shared_bytes": 0}},
        {"up": {"us": {"1": [1.0]}}},
        {"down": {"registers": "many", "spills": 0, "shared_bytes": 0, "us": {"1": [1.0]}}},
        *[
            {"up": {"registers": 1, "spills": 0, "shared_bytes": 0, "us": us}}
            for us in (
                [1.0], {"1": []}, {"1": None}, {"1": 1.0}, {"1": ["1.0"]}, {"1": [0.0]}, {"1": [-1.0]}, {"1": [True]},
                {"1": [float("nan")]}, {"1": [float("inf")]}, {"zero": [1.0]}, {"0": [1.0]}, {"1.5": [1.0]},
            )
        ],
        {"up": {"registers": 1, "spills": 0, "shared_bytes": 0, "relative_error": "small", "us": {"1": [1.0]}}},
        {"compile_s": "long"},
        {"compile_s": [1]},
    ],
)  # fmt: skip
def test_bad_lines_are_named(tiny_recording: Write, tmp_path: Path, change: dict[str, Any]) -> None:
    lines = lines_of(tiny_recording())
    number = next(n for n, line in enumerate(lines) if line.get("status") == "ok")
    lines[number].update(change)
    assert f"line {number + 1} cannot be used" in message(write_lines(tmp_path / "bad.gz", lines))


@pytest.mark.parametrize("line", ["", "null", "[]", "3", '"x"', "{", '{"config": '])
def test_lines_that_are_no_objects(tiny_recording: Write, tmp_path: Path, line: str) -> None:
    lines: list[Any] = [*lines_of(tiny_recording())]
    lines[5] = line
    assert "line 6 is not" in message(write_lines(tmp_path / "bad.gz", lines))


def test_a_timed_config_needs_both_roles_and_another_none(tiny_recording: Write, tmp_path: Path) -> None:
    lines = lines_of(tiny_recording())
    number = next(n for n, line in enumerate(lines) if line.get("status") == "ok")
    del lines[number]["down"]
    assert "'down'" in message(write_lines(tmp_path / "bad.gz", lines))
    lines[number]["status"] = "compile_error"
    assert len(Recording.load(write_lines(tmp_path / "good.gz", lines)).rows) == 144


def test_repeated_configs_and_no_configs(tiny_recording: Write, tmp_path: Path) -> None:
    lines = lines_of(tiny_recording())
    assert "line 146 repeats the config" in message(write_lines(tmp_path / "twice.gz", [*lines, lines[7]]))
    assert "holds no configs" in message(write_lines(tmp_path / "none.gz", lines[:1]))


def test_text_with_odd_line_separators_is_one_line(tiny_recording: Write, tmp_path: Path) -> None:
    lines = lines_of(tiny_recording())
    failed = next(line for line in lines if line.get("status") == "compile_error")
    failed["error"] = "a\u2028b\x85c"
    texts = [json.dumps(line, ensure_ascii=False) for line in lines]
    recording = Recording.load(write_lines(tmp_path / "odd.gz", texts))
    assert recording.rows[LaunchConfig.from_dict(failed["config"])].error == "a\u2028b\x85c"


HEADER = {
    "format": "moe-landscape/1",
    "kernel": "sglang 0.5.23",
    "shape": {"num_experts": 8, "top_k": 2, "hidden_size": 256, "intermediate_size": 128},
    "gpu": {"name": "NVIDIA H200"},
    "versions": {"triton": "3.6.0"},
}
TIMES = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=5)
ROLE = st.fixed_dictionaries(
    {
        "registers": st.integers(0, 255),
        "spills": st.integers(0, 999),
        "shared_bytes": st.integers(0, 232448),
        "us": st.dictionaries(st.integers(1, 4096).map(str), TIMES, min_size=1, max_size=3),
    },
    optional={"relative_error": st.none() | st.floats(0, 1)},
)
CONFIGS = st.lists(
    st.sampled_from(SearchSpace.grid(Header.decode(HEADER).shape).configs()),
    min_size=1,
    max_size=5,
    unique=True,
)


@settings(max_examples=60, deadline=None)
@given(st.data(), CONFIGS)
def test_round_trip(data: st.DataObject, configs: list[LaunchConfig]) -> None:
    lines: list[dict[str, Any]] = [HEADER]
    for config in configs:
        status = data.draw(st.sampled_from(["ok", "out_of_resources", "compile_error"]))
        row = {"config": config.to_dict(), "status": status, "compile_s": data.draw(st.none() | st.floats(0, 99))}
        if status == "ok":
            row |= {"up": data.draw(ROLE), "down": data.draw(ROLE)}
        lines.append(row)
    with tempfile.TemporaryDirectory() as directory:
        recording = Recording.load(write_lines(Path(directory) / "r.gz", lines))
    assert list(recording.rows) == configs
    for row in lines[1:]:
        read = recording.rows[LaunchConfig.from_dict(row["config"])]
        assert read.status == row["status"] and set(read.roles) == set(row) & {"up", "down"}
        for role, part in read.roles.items():
            assert {str(m): list(us) for m, us in part.us.items()} == row[role]["us"]
    RecordedDevice(recording)


SCALARS = st.none() | st.booleans() | st.integers(-1, 9) | st.floats() | st.sampled_from(["ok", "up", "1", ""])
KEYS = st.sampled_from(
    [
        "config",
        "status",
        "up",
        "down",
        "us",
        "1",
        "registers",
        "error",
        "compile_s",
        "shape",
        "gpu",
        "kernel",
        "versions",
    ]
)
JSON = st.recursive(SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x, max_size=4), max_leaves=12)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, JSON, max_size=3), st.dictionaries(KEYS, JSON, max_size=4), st.booleans())
def test_random_lines_never_crash(header: dict[str, Any], row: dict[str, Any], good: bool) -> None:
    role = {"registers": 1, "spills": 0, "shared_bytes": 0, "us": {"1": [1.0]}}
    base = {"config": FAST.to_dict(), "status": "ok", "up": role, "down": role} if good else {}
    with tempfile.TemporaryDirectory() as directory:
        path = write_lines(Path(directory) / "r.gz", [{**HEADER, **header}, {**base, **row}])
        try:
            recording = Recording.load(path)
        except RecordingError as error:
            assert "\n" not in str(error)
        else:
            device = RecordedDevice(recording)
            jobs = [Job(Cell("joint", m), c) for c in recording.rows for m in recording.batch_sizes]
            assert len(list(device.measure(jobs))) == len(jobs)
