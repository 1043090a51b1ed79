"""An engine that nobody has: one spec and one registration, and everything knows its files, logs and rules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moeopt import engines, shape_from_model
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape, Role
from moeopt.core.table import ConfigTable
from moeopt.doctor import diagnose
from moeopt.engines import EngineSpec, registry
from moeopt.engines.file_names import FileName, FileNames
from moeopt.engines.layout import Layout
from moeopt.engines.log import Backend, Deployment, LogFacts, LogLine, ServerLog
from moeopt.engines.serving import ServingRules
from moeopt.engines.spec import KernelFile, Server
from moeopt.errors import ExportError, InvalidInputError
from moeopt.export import (
    ConfigName,
    export_configs,
    find_config_files,
    import_configs,
    install_configs,
    read_config_file,
    start_line,
)
from moeopt.export.lookup import guess_engine
from moeopt.kernels import get_kernel
from moeopt.kernels.sglang import SglangKernel
from tests.cli.conftest import Run
from tests.kernels import tiny_engine

Write = Callable[..., Path]

GPU = "NVIDIA H200"
SHAPE = MoEShape(8, 2, 4096, 512)
BLOCKS = SHAPE.replace(dtype="fp8_w8a8", block_shape=(128, 128))
CONFIG = LaunchConfig(16, 64, 64, 1, 4, 3)
OTHER = LaunchConfig(16, 128, 64, 8, 8, 4)
UP = "quark-8x1024@nvidia h200.json"
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 4096,
    "moe_intermediate_size": 1024,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class QuarkNames(FileNames):
    """``quark-{E}x{2N}@{device}[+dtype][+{block_n}x{block_k}][~down].json``."""

    def of(self, shape: MoEShape, gpu_name: str, role: Role = "up") -> FileName:
        name = super().of(shape, gpu_name, role)
        return FileName(**{**vars(name), "intermediate_size": 2 * name.intermediate_size})

    def elements(self, name: FileName) -> int:
        return name.intermediate_size // 2

    def write(self, name: FileName) -> str:
        text = f"quark-{name.num_experts}x{name.intermediate_size}@{name.device}"
        text += f"+{name.dtype}" if name.dtype else ""
        text += "+{}x{}".format(*name.block_shape) if name.block_shape else ""
        return text + ("~down.json" if name.down else ".json")

    def parse(self, text: str, title: str) -> FileName:
        match = re.fullmatch(r"quark-(\d+)x(\d+)@([^+~]+?)(?:\+(\w+_\w+))?(?:\+(\d+)x(\d+))?(~down)?\.json", text)
        if match is None:
            raise InvalidInputError(f"{text!r} is not a file of {title}: expected quark-ExN@device.json")
        e, n, device, dtype, block_n, block_k, down = match.groups()
        block = (int(block_n), int(block_k)) if block_n else None
        return FileName(int(e), int(n), device, dtype, block, down=bool(down))


def default_config(shape: MoEShape, batch_size: int, gpu: GpuSpec) -> LaunchConfig:
    return LaunchConfig(16, 32, 32, 1, 4, 2 if batch_size > 8 else 3)


def shards(tp: int, ep: int) -> int:
    if tp != ep:
        raise InvalidInputError(f"--ep {ep}: Quark takes --ep {tp}, the size of --tp")
    return 2


def backend(facts: LogFacts, reads: bool) -> Backend | None:
    name = facts.setting("quark_kernels")
    return Backend(name, name == "triton", f"{name} was asked for") if name else None


class QuarkKernel(SglangKernel):
    """Launched as SGLang's kernel is."""

    name = "quark"


QUARK = EngineSpec(
    name="quark",
    title="Quark",
    kernel=KernelFile("MOEOPT_QUARK_KERNEL", "1 to 2", ("moe/kernels.py",), f"{__name__}:QuarkKernel"),
    names=QuarkNames(device=str.lower, split=True, pattern="quark-*.json"),
    layout=Layout(parent="tables", prefix="tr-", separator="."),
    variable="QUARK_TABLES",
    replaces_bundled=True,
    bundled=("moe",),
    default_config=default_config,
    shards=shards,
    server=Server("quark {model}", "--gpus"),
    serving=ServingRules(option=lambda checkpoint, version: "--kernels triton"),
    log=ServerLog(
        lines=(
            LogLine("tuned", "table ", r"table (?P<path>[^\n]+?\.json) read"),
            LogLine("default", "no table", r"no table (?P<asked>[^\n]+?\.json)"),
            LogLine("fallback", "old table", r"old table (?P<path>[^\n]+?\.json) \((?P<version>[\d.]+)\) for "
                    r"(?P<asked>[^\n]+?\.json)"),
            LogLine("ready", "quark is up", r"quark is up"),
        ),
        starts=("quark starts:",),
        lists=("quark starts:",),
        opening="quark starts",
        settings=("model", "gpus", "quark_kernels"),
        anywhere=(LogLine("quark_kernels", "--kernels", r"--kernels (?P<value>\w+)"),),
        own=("quark_kernels",),
        shown=("quark_kernels",),
        backend=backend,
        deployment=lambda facts: Deployment(*[facts.number("gpus")] * 3),
        triton_option=lambda facts: "--kernels triton",
    ),
    more_keys=frozenset({"LANES"}),
    fixed_keys={"LANES": 4},
    added_keys=lambda shape: {"LANES": 4},
    notes_triton_version=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def quark() -> Iterator[None]:
    engines.register(QUARK)
    yield
    del registry._SPECS["quark"]


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A directory with its files of two batch sizes, up and down."""
    root = tmp_path / "mine"
    configs = {1: CONFIG, 64: OTHER}
    up, down = export_configs("quark", root, SHAPE, GPU, "3.6.0", ConfigTable.of(configs, {1: OTHER, 64: CONFIG}))
    assert up == root / "tables" / "tr-3.6.0" / UP
    assert down == up.with_name("quark-8x1024@nvidia h200~down.json")
    return root


def test_a_name_belongs_to_one_engine() -> None:
    engines.register(QUARK)
    with pytest.raises(InvalidInputError, match="'sglang' is there already"):
        engines.register(EngineSpec(**{f: getattr(QUARK, f) for f in QUARK.__slots__} | {"name": "sglang"}))
    assert engines.names() == ("sglang", "vllm", "quark")


def test_files_are_written_merged_and_read_back(tables: Path) -> None:
    export_configs("quark", tables, SHAPE, GPU, "3.6.0", ConfigTable.of({8: CONFIG}))
    path = tables / "tables" / "tr-3.6.0" / UP
    assert json.loads(path.read_text())["8"] == {**CONFIG.to_dict(), "LANES": 4}
    file = read_config_file(path)
    assert (file.engine, file.usable, file.problems) == ("quark", True, ())
    assert file.name == ConfigName(8, 1024, "nvidia h200", engine="quark")
    assert file.configs() == {1: CONFIG, 8: CONFIG, 64: OTHER}
    assert import_configs("quark", tables, SHAPE, GPU, "3.6.0").at("down", 1) == OTHER


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ({"LANES": 2}, "lanes"),
        ({"SPLIT_K": 1}, "unknown_key"),
        ({"USE_TMA": True}, "unknown_key"),
        ({"LANES": "4"}, "value"),
    ],
)
def test_its_own_keys_of_an_entry(tables: Path, entry: dict[str, object], code: str) -> None:
    path = tables / "tables" / "tr-3.6.0" / UP
    path.write_text(json.dumps({"triton_version": "3.6.0", "1": {**CONFIG.to_dict(), **entry}, "2": CONFIG.to_dict()}))
    assert [(p.code, p.batch_size) for p in read_config_file(path).problems] == [(code, 1)]


def test_what_it_does_not_know_is_not_written(tmp_path: Path) -> None:
    tma = LaunchConfig(16, 64, 128, 1, 4, 3, use_tma=True)
    with pytest.raises(ExportError, match="Quark knows no USE_TMA"):
        export_configs("quark", tmp_path, BLOCKS, GPU, "3.6.0", ConfigTable.of({1: tma}))


def test_lookup_finds_exact_older_missing_and_near(tables: Path) -> None:
    assert guess_engine(tables) == guess_engine(tables / "tables") == "quark"

    def look(shape: MoEShape, version: str = "3.6.0"):
        return find_config_files("quark", tables / "tables", ConfigName.of("quark", shape, GPU), version)

    found = look(SHAPE)
    assert (found.tuned, found.root, found.up.how, found.down.how) == (True, tables, "exact", "exact")
    found = look(SHAPE, "3.7.1")
    assert (found.up.how, found.up.version, found.up.asked.parent.name) == ("fallback", "3.6.0", "tr-3.7.1")
    found = look(SHAPE.replace(num_experts=4))
    assert (found.up.how, found.down.how) == ("missing", "missing")
    assert [miss.why for miss in found.near_misses] == ["E is 8, asked is 4 (another expert-parallel size)"] * 2
    (tables / "tables" / "tr-old").mkdir()
    assert look(SHAPE, "3.7.1").obstacles == ("tr-old",)


def test_files_by_name_alone(tmp_path: Path) -> None:
    (tmp_path / UP).write_text(json.dumps({"1": CONFIG.to_dict(), "2": CONFIG.to_dict()}))
    assert guess_engine(tmp_path) == "quark"
    assert [p.message for p in read_config_file(tmp_path / UP).problems] == [
        f"it lies in {tmp_path.name!r}: Quark looks in tables/tr-X.Y.Z/ only"
    ]
    assert ConfigName.parse("E=8,N=512,device_name=NVIDIA_H200.json").engine == "sglang"
    with pytest.raises(InvalidInputError, match="is not a file of Quark"):
        ConfigName.parse("E=8,N=512,device_name=NVIDIA_H200.json", "quark")


def test_installing_beside_or_instead_of_what_it_ships(tmp_path: Path) -> None:
    package = tmp_path / "site" / "quark"
    shipped = package / "moe" / "tables" / "tr-3.5.0" / "quark-1x2@x.json"
    shipped.parent.mkdir(parents=True)
    shipped.write_text("{}")
    mine = tmp_path / "mine"
    done = install_configs(
        "quark",
        SHAPE,
        GPU,
        "3.6.0",
        ConfigTable.of({1: CONFIG}),
        package=package,
        environment={"QUARK_TABLES": str(mine)},
    )
    assert "linked 1 files that Quark ships" in done.said
    assert (mine / "tables" / "tr-3.5.0" / shipped.name).samefile(shipped)
    assert done.start == f"QUARK_TABLES={mine} quark MODEL --kernels triton"
    assert start_line("quark", mine, SHAPE, "/m") == f"QUARK_TABLES={mine} quark /m --kernels triton"


def test_doctor_of_its_directory(tables: Path) -> None:
    answer = diagnose(config_dir=tables, shape=SHAPE, gpu_name=GPU, triton_version="3.6.0")
    assert (answer.engine, answer.code, answer.status) == ("quark", "tuned", 0)
    assert answer.verdict == f"Tuned: Quark reads {UP} from {tables}."
    (tables / "tables" / "tr-old").mkdir()
    answer = diagnose(config_dir=tables, shape=BLOCKS, gpu_name=GPU, triton_version="3.6.0")
    assert answer.code == "default" and "bad_directory" in [f.code for f in answer.findings]
    assert answer.next[0].startswith("moeopt tune --experts 8 ") and "--export quark:" in answer.next[0]
    assert answer.next[1].startswith("QUARK_TABLES=$PWD/moe-configs quark MODEL --gpus 1")


def test_doctor_of_its_log(tables: Path, tmp_path: Path, run: Run) -> None:
    place = tables / "tables" / "tr-3.6.0"
    start = "quark starts: model='/m', gpus=2, quark_kernels=triton"
    log = tmp_path / "server.log"
    log.write_text(f"{start}\ntable {place / UP} read\ntable {place / UP.replace('.json', '~down.json')} read\n")
    answer = diagnose(log)
    assert (answer.engine, answer.backend, answer.code, answer.status) == ("quark", "triton", "tuned", 0)
    log.write_text(f"{start}\nno table {place / 'quark-4x1024@nvidia h200.json'}\nquark is up\n")
    answer = diagnose(log, tables)
    assert answer.verdict.startswith("Not tuned: Quark found no file for quark-4x1024@nvidia h200.json")
    assert "near_miss" in [f.code for f in answer.findings]
    assert answer.next[0] == (
        "moeopt tune --model /m --engine quark --tp 2 --ep 2 --experts 4 --intermediate 512 --export quark:moe-configs"
    )
    log.write_text(f"{start}\nold table /q/{UP} (3.5.1) for {place / UP}\n")
    assert "Triton 3.5.1" in diagnose(log).findings[0].message
    log.write_text("quark starts: model='/m'\n$ quark /m --kernels cuda\nquark is up\n")
    done = run("doctor", "--log", log)
    assert done.returncode == 1
    assert done.stdout.startswith("Not in use: Quark runs the experts with cuda, which reads no Triton config file.")
    assert "quark /m --gpus 1 --kernels triton" in done.stdout


def test_plan_and_export_of_the_command_line(tmp_path: Path, run: Run, tiny_recording: Write) -> None:
    shape = ["--experts", "8", "--top-k", "2", "--hidden", "4096", "--intermediate", "512"]
    done = run("plan", *shape, "--gpu", GPU, "--triton", "3.6.0", "--json", tmp_path / "plan.json")
    assert done.returncode == 0, done.stderr
    files = json.loads((tmp_path / "plan.json").read_text())["files"]
    assert files["quark"] == [f"tables/tr-3.6.0/{UP}", f"tables/tr-3.6.0/{UP.replace('.json', '~down.json')}"]
    done = run("suggest", "out", *shape, "--gpu", GPU, "--engine", "quark", "--triton", "3.6.0")
    assert done.returncode == 0, done.stderr
    assert read_config_file(tmp_path / "out" / files["quark"][0]).usable
    recording = f"recorded:{tiny_recording()}"
    done = run("tune", "--gpu", recording, "--trials", "4", "--storage", "s.db", "--export", "quark:first")
    assert done.returncode == 0, done.stderr
    done = run("export", "quark:second", "--storage", "s.db")
    assert done.returncode == 0 and "QUARK_TABLES=" in done.stdout, done.stderr
    first, second = (sorted((tmp_path / d).rglob("quark-*.json")) for d in ("first", "second"))
    assert len(first) == 2 and [p.read_text() for p in first] == [p.read_text() for p in second]
    assert all(read_config_file(path).usable for path in first)
    done = run("tune", *shape, "--gpu", recording, "--export", f"lepton:{tmp_path}")
    assert done.returncode == 2 and "give sglang:DIR or vllm:DIR or quark:DIR" in done.stderr


def test_shape_of_a_model_by_its_rule(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    shape, derivation = shape_from_model(tmp_path, engine="quark", tp=4, ep=4)
    assert (shape.num_experts, shape.intermediate_size) == (4, 512)
    assert derivation.file == "E=4,N=1024"
    with pytest.raises(InvalidInputError, match="Quark takes --ep 4"):
        shape_from_model(tmp_path, engine="quark", tp=4, ep=2)
    with pytest.raises(InvalidInputError, match="Quark fuses no shared expert"):
        shape_from_model(tmp_path, engine="quark", tp=1, ep=1, fuse_shared_experts=True)


def test_its_kernel_is_found_and_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_engine.write(tmp_path / "quark" / "moe", ("sglang", "quark"), name="kernels.py")
    monkeypatch.setenv("MOEOPT_QUARK_KERNEL", str(tmp_path))
    kernel = get_kernel("auto", engine="quark")
    assert (kernel.key.name, kernel.source.path) == ("quark", path.resolve())
    h200 = GpuSpec.by_name(GPU)
    assert kernel.default_config(SHAPE, "up", 64, h200) == default_config(SHAPE, 64, h200)
    kernel.check(SHAPE, h200)
    with pytest.raises(InvalidInputError, match="give one of builtin, sglang, vllm, quark, auto"):
        get_kernel("lepton")
