"""Study files: what is accepted, and one clear line for what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeopt.core.shape import MoEShape
from moeopt.errors import InvalidInputError
from moeopt.recordings.shipped import find_recording, shipped_recordings
from moeopt.study_file import StudyFile
from moeopt.tuning.options import TuneOptions, TuneRequest

SHAPE = "[shape]\nnum_experts = 8\ntop_k = 2\nhidden_size = 256\nintermediate_size = 128\n"
STUDIES = sorted((Path(__file__).parents[1] / "studies").glob("*.toml"))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "study.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_small_study(tmp_path: Path) -> None:
    study = StudyFile.load(write(tmp_path, SHAPE + '[tune]\ntrials = 5\n[export]\nengine="vllm"\ndirectory="out"\n'))
    assert study.shape == MoEShape(8, 2, 256, 128)
    assert study.tune == TuneRequest(study.shape, search=TuneOptions(trials=5))
    assert study.export_directory == tmp_path / "out"
    assert study.tune.stand_in is None


@pytest.mark.parametrize("path", STUDIES, ids=lambda p: p.name)
def test_the_studies_in_the_repository_load(path: Path) -> None:
    study = StudyFile.load(path)
    assert study.description


def test_there_are_studies_and_recordings() -> None:
    assert STUDIES
    assert shipped_recordings()
    for name in shipped_recordings():
        assert find_recording(name).is_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"section \[shape\] is missing"),
        ("x = [", "not TOML"),
        ("shape = 3", "shape is 3: a mapping"),
        (
            SHAPE + "[tuning]\n",
            "study file key 'tuning' is unknown: the keys are description, export,",
        ),
        (SHAPE + "[tune]\nbatches = [1]\n", r"\[tune\] key 'batches' is unknown: the keys are batch_sizes,"),
        (SHAPE + "[tune]\nuse_tma = true\n", r"\[tune\] key 'use_tma' is unknown: the keys are batch_sizes,"),
        (SHAPE + "use_tma = true\n", "shape key 'use_tma' is unknown"),
        (SHAPE + "[tune]\ntrials = 'many'\n", "trials is 'many': give a whole number of at least 1"),
        (SHAPE + "[tune]\ntrials = true\n", "trials"),
        (SHAPE + "[tune]\nmode = 'x'\n", "mode 'x' is unknown"),
        (SHAPE + "[tune]\nspace = 'x'\n", "search space 'x'"),
        (SHAPE + "[tune]\ntrials = 0\n", "trials is 0"),
        (SHAPE + "[tune]\nseed = -1\n", "seed is -1"),
        (SHAPE + "[tune]\nworkers = 0\n", "workers is 0"),
        (SHAPE + "[tune]\ntimeout = 'soon'\n", "timeout is 'soon'"),
        (SHAPE + "[tune]\nbatch_sizes = ['a']\n", r"batch_sizes is \['a'\]: give at least one batch size"),
        (SHAPE + "[export]\nengine = 'tgi'\ndirectory = 'x'\n", "engine 'tgi' is unknown"),
        (SHAPE + "[export]\nengine = 'sglang'\n", r"\[export\] key 'directory' is missing"),
        (SHAPE + "[export]\nengine = 3\n", "engine is 3: give a text"),
        (SHAPE + "[replay]\nrecording = 'none.jsonl.gz'\n", "recording 'none.jsonl.gz' was not found"),
        (SHAPE.replace("num_experts = 8", "num_experts = 1"), "top_k 2 is greater than the 1 experts"),
        (SHAPE + "dtype = 'fp3'\n", "dtype 'fp3' is unknown"),
        (SHAPE + "experts = 3\n", "shape key 'experts' is unknown"),
        ("[shape]\nnum_experts = 8\n", "shape key 'top_k' is missing"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidInputError, match=message) as error:
        StudyFile.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no such study file"):
        StudyFile.load(tmp_path / "none.toml")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        StudyFile.load(path)
