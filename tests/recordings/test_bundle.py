"""A bundled recording says what was measured, and not by whom or where."""

from __future__ import annotations

import getpass
import gzip
import json
import socket
from pathlib import Path

import pytest

from moeopt.errors import ExportError, RecordingError
from moeopt.recordings.bundle import _Cleaner, bundle_recording
from moeopt.recordings.format import Recording

SECRETS = ["/home/someone/models", "GPU-12345678", "buildhost.example.com", "licence-7"]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    header = {
        "format": "moe-landscape/1",
        "kernel": "sglang 0.5.23",
        "kernel_hash": "0123456789abcdef",
        "shape": {"num_experts": 8, "top_k": 2, "hidden_size": 256, "intermediate_size": 128, "dtype": "bf16"},
        "gpu": {"name": "NVIDIA H200", "compute_capability": [9, 0], "uuid": "GPU-12345678"},
        "versions": {"triton": "3.6.0", "torch": "2.11.0+cu130", "driver": "580.1", "site": "licence-7"},
        "clocks": {"sm_mhz": 1980, "serial": "licence-7"},
        "routing": "file:/home/someone/models/trace.npy",
        "hostname": "buildhost.example.com",
        "argv": ["moeopt", "record", "/home/someone/models/out.jsonl.gz"],
        "complete": True,
    }
    config = {
        "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 2,
    }  # fmt: skip
    role = {"registers": 40, "spills": 0, "shared_bytes": 6144, "relative_error": 0.001, "us": {"4": [10.5, 10.4]}}
    host, user = socket.gethostname(), getpass.getuser()
    rows = [
        {"config": config, "status": "ok", "compile_s": 0.6, "up": role, "down": {**role, "pid": 4711}},
        {
            "config": {**config, "num_stages": 3},
            "status": "compile_error",
            "error": f"ptxas failed on /tmp/{user}/x.ptx and ~/cache/y of {user} at {host}: exit 1",
            "log": "/home/someone/models/x.log",
        },
    ]
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in (header, *rows)).encode()))
    return path


def test_what_was_measured_stays(recording: Path) -> None:
    out = bundle_recording(recording)
    assert out.name == "mine-contribution.jsonl.gz"
    before, after = Recording.load(recording), Recording.load(out)
    assert (after.shape, after.gpu, after.batch_sizes) == (before.shape, before.gpu, before.batch_sizes)
    assert after.header.versions == {"triton": "3.6.0", "torch": "2.11.0+cu130", "driver": "580.1"}
    assert after.header.clocks == {"sm_mhz": 1980}
    for config, row in before.rows.items():
        assert after.rows[config].roles == row.roles
        assert after.rows[config].status == row.status


def test_names_and_paths_go(recording: Path) -> None:
    data = bundle_recording(recording).read_bytes()
    text = gzip.decompress(data).decode()
    for secret in [*SECRETS, "someone", "trace.npy", "4711", "hostname", "argv", ".log"]:
        assert secret not in text
    error = json.loads(text.splitlines()[2])["error"]
    assert error == "ptxas failed on PATH and PATH of NAME at NAME: exit 1"
    # Nor in gzip's own header: no file name, no time.
    assert data[3] == 0
    assert data[4:8] == b"\0\0\0\0"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("No such file: '/home/Jo Doe/a b.py': exit 1", "No such file: 'PATH': exit 1"),
        ('File "C:\\Users\\Jo Doe\\x.py", line 3', 'File "PATH", line 3'),
        ("at \\\\server\\share\\x and file:///srv/x", "at PATH and file://PATH"),
        ("of Jo Doe: /home/Jo Doe/x failed", "of NAME: PATH failed"),
        ("1/2 of 'a' / 'b' failed", "1PATH of 'a' / 'b' failed"),
    ],
)
def test_paths_with_spaces(text: str, clean: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "Jo Doe")
    assert _Cleaner().text(text) == clean


def test_the_same_recording_makes_the_same_bytes(recording: Path, tmp_path: Path) -> None:
    one = bundle_recording(recording, tmp_path / "a.jsonl.gz").read_bytes()
    assert one == bundle_recording(recording, tmp_path / "b.jsonl.gz").read_bytes()


def test_bad_input(recording: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="itself"):
        bundle_recording(recording, recording)
    with pytest.raises(ExportError, match="cannot be written"):
        bundle_recording(recording, recording / "such.jsonl.gz")
    (tmp_path / "other.jsonl.gz").write_bytes(b"x")
    with pytest.raises(RecordingError):
        bundle_recording(tmp_path / "other.jsonl.gz")
