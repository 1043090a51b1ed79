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
