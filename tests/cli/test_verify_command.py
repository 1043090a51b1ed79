"""``moeopt verify`` on a recording, through the files that a tune wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from moeopt.cli import tune, verify
from moeopt.core.config import LaunchConfig
from moeopt.core.table import ConfigTable
from moeopt.errors import InvalidInputError
from moeopt.export import export_configs, import_configs
from moeopt.recordings.format import Recording

GOOD, BAD = LaunchConfig(16, 64, 128, 1, 4, 3), LaunchConfig(64, 32, 64, 16, 8, 2)


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    tune.register(app)
    verify.register(app)
    return app


def run(app: typer.Typer, *arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def write(recording: Recording, directory: Path, config: LaunchConfig) -> Path:
    table = dict.fromkeys((1, 16, 64), config)
    export_configs("sglang", directory, recording.shape, recording.gpu.name, "3.6.0", ConfigTable.of(table, table))
    return directory


def test_tuned_files_replace_a_bad_existing_file(
    app: typer.Typer, tiny_recording: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny_recording()
    recording = Recording.load(path)
    tuned, existing = write(recording, tmp_path / "new", GOOD), write(recording, tmp_path / "old", BAD)
    output = run(
        app, "verify", "--gpu", f"recorded:{path}", "--tuned", tuned, "--existing", existing,
        "--batch-sizes", "1", "--json", tmp_path / "v.json", "--export", tmp_path / "kept",
    )  # fmt: skip
    assert "replaying" in output and "nothing was interleaved" in output and "1 of 1 batch sizes" in output
    row = json.loads((tmp_path / "v.json").read_text())["batch_sizes"]["1"]
    assert list(row["arms"]) == ["existing", "default", "tuned"] and row["kept"] == "tuned"
    kept = import_configs("sglang", tmp_path / "kept", recording.shape, recording.gpu, "3.6.0")
    assert kept.at("up", 1) == GOOD


def test_the_study_database_is_what_is_verified_by_default(
    app: typer.Typer, tiny_recording: Callable[..., Path], tmp_path: Path
) -> None:
    path, storage = tiny_recording(), tmp_path / "s.db"
    run(app, "tune", "--gpu", f"recorded:{path}", "--storage", storage, "--trials", 8, "--batch-sizes", "1")
    output = run(app, "verify", "--gpu", f"recorded:{path}", "--storage", storage)
    assert "tuned µs" in output and "default µs" in output
    with pytest.raises(InvalidInputError, match="batch size 16 was not tuned"):
        run(app, "verify", "--gpu", f"recorded:{path}", "--storage", storage, "--batch-sizes", "16")


def test_files_without_a_shape_are_refused(app: typer.Typer, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="give the shape as well"):
        run(app, "verify", "--tuned", tmp_path)
