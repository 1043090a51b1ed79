"""What the doctor says of a server log."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape
from moeopt.core.table import ConfigTable
from moeopt.doctor import Diagnosis, diagnose
from moeopt.doctor.scan import scan
from moeopt.doctor.verdict import judge_log
from moeopt.export import export_configs

LOGS = Path(__file__).parents[1] / "data" / "logs"
PRO = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
NAME = "E=256,N=256,device_name=NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition"
UP, DOWN = f"/c/configs/triton_3_6_0/{NAME}.json", f"/c/configs/triton_3_6_0/{NAME}_down.json"
ARGS = (
    "server_args={{'model_path': '/m', 'quantization': {q}, 'tp_size': 4, 'log_level': 'info', "
    "'moe_runner_backend': '{b}'}}"
)
READY = "The server is fired up and ready to roll!"
VLLM = (
    "(APIServer pid=1) INFO 03-01 10:00:00 [startup.py:96] non-default args: {'model': '/m', 'tensor_parallel_size': 2}"
)
FLAT = "/f/E=256,N=512,device_name=NVIDIA_H200.json"


def judge(*lines: str, **options) -> Diagnosis:
    return judge_log(scan(io.BytesIO("\n".join(lines).encode())), **options)


def args(backend: str = "auto", quantization: str = "None") -> str:
    return ARGS.format(b=backend, q=quantization)


def used(path: str) -> str:
    return f"Using MoE kernel config from {path}."


def default(path: str) -> str:
    return (
        f"Using default MoE kernel config. Performance might be sub-optimal! Config file not found at {path}, you can"
    )


def codes(answer: Diagnosis) -> list[str]:
    return [f.code for f in answer.findings]


# The two deployments that this was asked for.


def test_glm5_whose_backend_reads_no_file() -> None:
    answer = diagnose(LOGS / "sglang-glm5-nvfp4-flashinfer-cutlass.log", gpu_name=PRO)
    assert answer.code == "not_read" and answer.status == 1
    assert (answer.engine, answer.backend, answer.layers) == ("sglang", "flashinfer_cutlass", ())
    first = answer.findings[0]
    assert "no line about a config file is in the log" in first.message
    assert "modelopt_fp4 cannot run on the Triton kernel" in first.message
    assert [e.line for e in first.evidence] == [3, 3]
    assert "--moe-runner-backend flashinfer_cutlass" in answer.next[0]
    assert "without --disable-flashinfer-autotune" in answer.next[0]
    assert not any("moeopt tune" in command for command in answer.next)
    flags = {f.code: f for f in answer.findings}
    assert flags["allreduce_fusion"].severity == "warning" and "48 to 26" in flags["allreduce_fusion"].message
    assert flags["sum_all_reduce"].severity == "note"


def test_glm5_without_a_gpu_says_of_which_the_flags_speak() -> None:
    answer = diagnose(LOGS / "sglang-glm5-nvfp4-flashinfer-cutlass.log")
    assert next(f for f in answer.findings if f.code == "allreduce_fusion").severity == "note"


def test_qwen_without_a_file() -> None:
    answer = diagnose(LOGS / "sglang-qwen3.5-122b-no-file.log")
    assert answer.code == "default" and answer.status == 1
    (layer,) = answer.layers
    assert (layer.up, layer.down) == ("default", "default")
    assert layer.name is not None and (layer.name.num_experts, layer.name.intermediate_size) == (256, 256)
    assert layer.up_path is not None and layer.up_path.parent.name == "triton_3_6_0"
    assert "logged 8 times" in answer.findings[0].message
    assert [e.line for e in answer.findings[0].evidence] == [11, 13]
    assert answer.next == (
        "hf download Qwen/Qwen3.5-122B-A10B config.json --local-dir model",
        "moeopt tune --model model --engine sglang --tp 4 --experts 256 --intermediate 256 --export sglang:moe-configs",
        "SGLANG_MOE_CONFIG_DIR=$PWD/moe-configs python -m sglang.launch_server --model-path Qwen/Qwen3.5-122B-A10B "
        "--tp 4  # and your other options",
    )
    assert answer.to_dict()["verdict"]["text"] == answer.verdict == str(answer).splitlines()[0]


# SGLang


def test_in_use_and_tuned() -> None:
    answer = judge(args(), used(UP), used(DOWN), READY)
    assert answer.code == "tuned" and answer.status == 0 and answer.next == ()
    assert "In use and tuned" in answer.verdict


def test_a_file_of_another_triton_version() -> None:
    fallback = (
        f"Config file not found at {UP}. Fallback to triton version 3.5.1 and use MoE kernel config from "
        f"/c/x/{NAME}.json. Performance might be sub-optimal!"
    )
    answer = judge(args(), fallback, used(DOWN), READY)
    assert answer.code == "fallback" and answer.status == 1
    assert "Triton 3.5.1" in answer.findings[0].message
    assert (answer.layers[0].up, answer.layers[0].down) == ("fallback", "tuned")


def test_up_alone() -> None:
    answer = judge(
        args(), used(UP), f"Down MoE config file not found at {DOWN}; reusing the tuned up-projection", READY
    )
    assert answer.code == "down_reuses_up" and answer.status == 1
    assert (answer.layers[0].up, answer.layers[0].down) == ("tuned", "up_file")


def test_up_without_its_own_file_but_down_with_one() -> None:
    answer = judge(args(), default(UP), used(DOWN), READY)
    assert answer.code == "default" and answer.layers[0].down == "tuned"
    assert "the up projection" in answer.findings[0].message


def test_two_layers_one_of_which_is_not_tuned() -> None:
    other = UP.replace("N=256", "N=128")
    answer = judge(args(), used(UP), used(DOWN), default(other), default(other.replace(".json", "_down.json")), READY)
    assert [(layer.up, layer.down) for layer in answer.layers] == [("tuned", "tuned"), ("default", "default")]
    assert answer.code == "default"


def test_ranks_that_disagree() -> None:
    answer = judge(args(), "[TP0] " + used(UP), used(DOWN), "[TP4] " + default(UP), READY)
    assert "ranks_disagree" in codes(answer) and answer.code == "default"


def test_deterministic_inference_ignores_files() -> None:
    answer = judge(args(), "Deterministic inference is enabled, using default MoE kernel config.", READY)
    assert answer.code == "deterministic" and answer.status == 1
    assert answer.next[0].endswith("without --enable-deterministic-inference")


@pytest.mark.parametrize(
    ("backend", "quantization", "code", "command"),
    [
        ("flashinfer_cutlass", "None", "not_read", "--moe-runner-backend triton"),
        ("deep_gemm", "'fp8'", "not_read", "--moe-runner-backend triton"),
        ("triton_kernel", "None", "not_read", "--moe-runner-backend triton"),
        ("some_new_backend", "None", "not_read", "--moe-runner-backend triton"),
        ("auto", "'awq'", "not_read", "--quantization moe_wna16"),
        ("auto", "'gptq_marlin'", "not_read", "--quantization moe_wna16"),
        ("flashinfer_trtllm", "'modelopt_fp4'", "not_read", "--moe-runner-backend flashinfer_trtllm"),
        ("auto", "'modelopt_fp4'", "not_read", "FlashInfer autotune"),
        ("triton", "None", "no_config_line", "--moe-runner-backend triton"),
        ("auto", "None", "no_config_line", "--moe-runner-backend triton"),
    ],
)
def test_no_config_line_is_a_finding(backend: str, quantization: str, code: str, command: str) -> None:
    answer = judge(args(backend, quantization), READY)
    assert (answer.code, answer.status) == (code, 1)
    assert any(command in line for line in answer.next)


def test_a_log_that_ends_before_the_server_is_ready() -> None:
    answer = judge(args("triton"))
    assert answer.code == "no_config_line" and "may end too early" in answer.findings[0].message


def test_a_log_level_that_hides_the_line() -> None:
    answer = judge(args("triton").replace("'info'", "'warning'"), READY)
    assert "log level warning" in answer.findings[0].message


def test_flashinfer_that_tuned_itself() -> None:
    answer = judge(args("flashinfer_cutlass", "'modelopt_fp4'"), "FlashInfer autotune completed.", READY)
    assert "FlashInfer tuned itself at this start (line 2)" in answer.findings[0].message and answer.next == ()


def test_fp8_experts_under_a_flashinfer_backend_run_on_triton() -> None:
    line = "Fp8MoEMethod has no FLASHINFER_CUTLASS path; using triton for its fp8 experts."
    answer = judge(args("flashinfer_cutlass", "'modelopt_mixed'"), line, used(UP), used(DOWN), READY)
    assert answer.code == "tuned" and codes(answer) == ["mixed"] and answer.status == 0


def test_flags_do_not_matter_on_other_gpus() -> None:
    line = args().replace("'tp_size'", "'flashinfer_allreduce_fusion_backend': 'auto', 'tp_size'")
    assert "allreduce_fusion" in codes(judge(line, used(UP), used(DOWN), READY))
    assert "allreduce_fusion" not in codes(
        judge(line, used(UP.replace("RTX_PRO_6000_Blackwell_Server_Edition", "H200")), READY)
    )
    assert "allreduce_fusion" not in codes(judge(line, READY, gpu=GpuSpec.by_name("NVIDIA B200")))


def test_what_went_wrong_at_launch() -> None:
    answer = judge(
        args(),
        used(UP),
        used(DOWN),
        "OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing",
        "down_moe config BLOCK_SIZE_M=16 does not match up config BLOCK_SIZE_M=64 at M=512; overriding",
        "ValueError: invalid literal for int() with base 10: 'backup'",
        READY,
    )
    assert codes(answer) == ["out_of_resource", "bad_directory", "block_m"] and answer.status == 1
    assert "147,456" in answer.findings[0].message


def test_a_shape_that_the_server_does_not_ask_for() -> None:
    shape = MoEShape(257, 9, 3072, 256, shared_experts=1)
    answer = judge(args(), default(UP), READY, shape=shape)
    assert "other_shape" in codes(answer)
    assert "other_shape" not in codes(judge(args(), default(UP), READY, shape=MoEShape(256, 8, 3072, 256)))
    # The command is for the shape that was given.
    assert "--experts 257 --top-k 9 --hidden 3072 --intermediate 256 --dtype bf16" in answer.next[0]


def test_without_a_model_the_command_has_what_the_name_says() -> None:
    answer = judge(default("/c/configs/triton_3_6_0/E=8,N=64,device_name=NVIDIA_H200,dtype=int4_w4a16.json"))
    assert "--experts 8 --top-k TOP_K --hidden HIDDEN --intermediate 128 --dtype int4_w4a16" in answer.next[0]


# vLLM


def test_vllm_in_use() -> None:
    lines = [VLLM, "Using TRITON Unquantized MoE backend out of potential backends: ['TRITON'].",
             f"Using configuration from {FLAT} for MoE layer.", "Application startup complete."]  # fmt: skip
    answer = judge(*lines)
    assert (answer.engine, answer.code, answer.status, answer.backend) == ("vllm", "tuned", 0, "TRITON")


def test_vllm_without_a_file() -> None:
    answer = judge(
        VLLM, f"Using default MoE config. Performance might be sub-optimal! Config file not found at {FLAT}, /g/x.json"
    )
    assert answer.code == "default" and len(answer.findings) == 1
    assert answer.next[0] == (
        "moeopt tune --model /m --engine vllm --tp 2 --experts 256 --intermediate 512 --mode joint "
        "--export vllm:moe-configs"
    )
    assert answer.next[1] == (
        "VLLM_TUNED_CONFIG_FOLDER=$PWD/moe-configs vllm serve /m --tensor-parallel-size 2  # and your other options"
    )


@pytest.mark.parametrize(
    ("line", "backend", "command"),
    [
        ("Using FlashInfer CUTLASS Unquantized MoE backend out of potential backends: [].", "FlashInfer CUTLASS", True),
        ("Using VLLM_CUTLASS Fp8 MoE backend out of potential backends: [].", "VLLM_CUTLASS", None),
        ("Using 'MARLIN' WNA16 MoE backend.", "MARLIN", True),
        ("Using 'FLASHINFER_CUTLASS' NvFp4 MoE backend out of potential backends: [].", "FLASHINFER_CUTLASS", False),
    ],
)
def test_vllm_backends_that_read_no_file(line: str, backend: str, command: bool | None) -> None:
    answer = judge(VLLM, line, "Application startup complete.")
    assert answer.backend == backend and answer.status == 1
    if command is None:
        assert answer.code == "no_config_line"
    else:
        assert answer.code == "not_read"
        assert any("--moe-backend triton" in c for c in answer.next) == command


def test_vllms_marlin_warning_means_nothing() -> None:
    default_line = f"Using default MoE config. Performance might be sub-optimal! Config file not found at {FLAT}"
    answer = judge(VLLM, "Using 'MARLIN' WNA16 MoE backend.", default_line, "Application startup complete.")
    assert answer.code == "not_read" and "means nothing" in answer.findings[0].message


def test_older_vllm_lines() -> None:
    answer = judge(VLLM, "Using default MoE config. Performance might be sub-optimal! Config file not found at "
                   f"['{FLAT}', '/g/x.json']")  # fmt: skip
    assert answer.layers[0].up_path == Path(FLAT)
    assert judge(VLLM, "Using FlashInfer CUTLASS kernels for Fp8 MoE").backend == "FlashInfer CUTLASS"


def test_what_is_no_log() -> None:
    answer = judge("hello", "world")
    assert (answer.code, answer.status, answer.engine) == ("no_log", 1, None)


# A log and a directory


def test_the_file_lies_in_another_directory(tmp_path: Path) -> None:
    config = LaunchConfig(16, 64, 128, 1, 4, 3)
    export_configs(
        "sglang", tmp_path, MoEShape(256, 8, 3072, 256), PRO, "3.6.0", ConfigTable.of({1: config, 2: config})
    )
    log = tmp_path / "server.log"
    log.write_text("\n".join([args(), default(UP), default(DOWN), READY]))
    answer = diagnose(log, tmp_path)
    assert {"other_directory", "file_there"} <= set(codes(answer))
    assert f"SGLANG_MOE_CONFIG_DIR={tmp_path}" in next(
        f.message for f in answer.findings if f.code == "other_directory"
    )


def test_a_near_miss_lies_in_the_directory(tmp_path: Path) -> None:
    config = LaunchConfig(16, 64, 128, 1, 4, 3)
    export_configs(
        "sglang", tmp_path, MoEShape(257, 9, 3072, 256), PRO, "3.6.0", ConfigTable.of({1: config, 2: config})
    )
    log = tmp_path / "server.log"
    here = [line.replace("/c/", f"{tmp_path}/") for line in (default(UP), default(DOWN))]
    log.write_text("\n".join([args(), *here, READY]))
    answer = diagnose(log, tmp_path)
    assert "other_directory" not in codes(answer)
    assert any("with a fused shared expert" in f.message for f in answer.findings if f.code == "near_miss")


def test_releases_before_the_variable_say_where_files_go() -> None:
    """SGLang 0.4.3 with vLLM's words, and 0.4.6 with its own: neither has a directory for a Triton version."""
    folder = "/s/sglang/srt/layers/moe/fused_moe_triton/configs"
    for words in ("Using default MoE config. Performance might be sub-optimal! Config file not found at {}", None):
        path = f"{folder}/E=64,N=128,device_name=NVIDIA_H200.json"
        answer = judge(args(), words.format(path) if words else default(path), READY)
        assert (answer.engine, answer.code) == ("sglang", "default")
        (found,) = [f for f in answer.findings if f.code == "old_release"]
        assert f"looks in {folder} itself and knows no SGLANG_MOE_CONFIG_DIR" in found.message
    assert "old_release" not in codes(judge(args(), default(UP), READY))
