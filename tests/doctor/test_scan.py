"""Logs are read once, whatever is in them."""

from __future__ import annotations

import io
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeopt import engines
from moeopt.doctor.scan import COMMON_LINES, scan, scan_log
from moeopt.doctor.verdict import judge_log
from moeopt.engines.log import LogFacts
from moeopt.errors import InvalidInputError

PATH = "/c/configs/triton_3_6_0/E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
USED = f"Using MoE kernel config from {PATH}."
DEFAULT = f"Using default MoE kernel config. Performance might be sub-optimal! Config file not found at {PATH}, you"
FALLBACK = (
    f"Config file not found at {PATH}. Fallback to triton version 3.5.1 and use MoE kernel config from "
    f"{PATH.replace('3_6_0', '3_5_1')}. Performance might be sub-optimal!"
)


def read(text: str | bytes) -> LogFacts:
    return scan(io.BytesIO(text.encode() if isinstance(text, str) else text))


def kinds(facts: LogFacts) -> list[tuple[str, int, int]]:
    return [(e.kind, e.line, e.count) for e in facts.events]


def test_messages_are_counted_with_their_first_line() -> None:
    facts = read(f"a\n[TP0] {USED}\nb\n[TP1] {USED}\n[TP0] {FALLBACK}\n")
    assert kinds(facts) == [("tuned", 2, 2), ("fallback", 5, 1)]
    assert facts.lines == 5
    assert facts.events[0].values["path"] == PATH
    assert facts.events[1].values == {
        "asked": PATH,
        "version": "3.5.1",
        "path": PATH.replace("3_6_0", "3_5_1"),
    }


def test_two_ranks_in_one_line() -> None:
    assert kinds(read(f"[TP0] {USED}[TP1] {DEFAULT}\n")) == [("tuned", 1, 1), ("default", 1, 1)]


def test_prefixes_and_colours_do_not_matter() -> None:
    line = f"moe-0  | 2026-01-01T00:00:00Z stderr F \x1b[33m[2026-01-01 00:00:00 TP0]\x1b[0m {USED}\r\n"
    (event,) = read(line).events
    assert event.values["path"] == PATH and "\x1b" not in event.text


@pytest.mark.parametrize(
    "args",
    [
        "server_args={'model_path': '/m', 'tp_size': 8, 'quantization': None, 'moe_runner_backend': 'triton'}",
        "server_args=ServerArgs(model_path='/m', tp_size=8, quantization=None, moe_runner_backend='triton')",
    ],
)
def test_settings_of_both_spellings(args: str) -> None:
    facts = read(f"[x] {args}\n")
    assert facts.setting("model_path") == "/m"
    assert facts.setting("tp_size") == "8"
    assert facts.setting("quantization") is None
    assert facts.setting("moe_runner_backend") == "triton"


def test_settings_are_not_taken_from_requests() -> None:
    facts = read("POST {'model': 'moe', 'quantization': 'fp8'} moe\n")
    assert facts.settings == {}


def test_only_the_last_start_counts() -> None:
    facts = read(f"server_args={{'model_path': '/a'}}\n{DEFAULT}\nserver_args={{'model_path': '/b'}}\n{USED}\n")
    assert (facts.starts, facts.start_line) == (2, 3)
    assert facts.setting("model_path") == "/b"
    assert [e.kind for e in facts.events] == ["tuned"]


def test_warnings_before_the_start_line_belong_to_it() -> None:
    facts = read("--enable-flashinfer-allreduce-fusion is deprecated.\nserver_args={'model_path': '/a'}\n")
    assert [e.kind for e in facts.events] == ["allreduce_flag"]


def test_utf16_as_some_shells_redirect() -> None:
    text = f"x\n{USED}\n"
    for codec in ("utf-16", "utf-16-le"):
        raw = text.encode(codec) if codec == "utf-16" else b"\xff\xfe" + text.encode(codec)
        assert kinds(read(raw)) == [("tuned", 2, 1)]


def test_broken_bytes_around_a_message() -> None:
    assert kinds(read(b"\xff\xfe\xfa\n".replace(b"\xff\xfe", b"\x80") + USED.encode() + b"\xc3\x28\n")) == [
        ("tuned", 2, 1)
    ]


def test_lines_longer_than_a_block() -> None:
    filler = "x" * 3_000_000
    facts = read(f"{filler}\n{filler}{USED}{filler}\n{DEFAULT}\n")
    assert [(e.kind, e.line) for e in facts.events] == [("tuned", 2), ("default", 3)]
    assert all(len(e.text) < 1000 for e in facts.events)


def test_a_message_that_lies_across_two_blocks() -> None:
    for shift in range(0, 200, 17):
        head = "y" * ((1 << 20) - 100 + shift - 1) + "\n"
        (event,) = read(head + "z" * 50 + USED + "\n").events
        assert (event.line, event.values["path"]) == (2, PATH)


def test_memory_does_not_grow_with_the_log() -> None:
    """24 MiB of log, in it 1,440 different messages."""

    class Endless(io.RawIOBase):
        left = 24

        def readable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            self.left -= 1
            if self.left < 0:
                return b""
            line = f"Using MoE kernel config from /c/{self.left}/%d.json.\n"
            return b"".join((line % i).encode() for i in range(60)) + b"n" * (1 << 20)

    tracemalloc.start()
    facts = scan(Endless())  # type: ignore[arg-type]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20
    assert len(facts.events) == 24 * 60


def test_ever_new_messages_are_dropped_beyond_a_bound() -> None:
    facts = read("".join(f"Using MoE kernel config from /c/{i}.json.\n" for i in range(5000)))
    assert len(facts.events) == 4096 and facts.dropped == 904


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot be read"):
        scan_log(tmp_path / "no.log")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        scan_log(tmp_path)


WORDS = [
    *(USED, DEFAULT, FALLBACK, "server_args={", "'moe_runner_backend': '", "non-default args: {", "\n", "\x00", "'"),
    *("Using TRITON Fp8 MoE backend", "Using default MoE config. Performance", "Config file not found at ", ".json"),
    *("E=1,N=2,device_name=X", "moe", "out of resource: shared memory, Required: ", "The server is fired up and ready"),
    "down_moe config BLOCK_SIZE_M=16 does not match up config BLOCK_SIZE_M=32 at M=4",
    "Deterministic inference is enabled, using default MoE kernel config",
]


@given(st.lists(st.sampled_from(WORDS).map(str.encode) | st.binary(max_size=40), max_size=30).map(b"".join))
def test_no_bytes_crash_it(raw: bytes) -> None:
    facts = read(raw)
    answer = judge_log(facts)
    assert answer.status in (0, 1)
    assert "\n" not in answer.verdict
    assert str(answer).startswith(answer.verdict)


def test_random_bytes_in_bulk() -> None:
    raw = random.Random(0).randbytes(3 << 20)
    assert judge_log(read(raw)).code == "no_log"


NOT_FOUND = "Config file not found at"
EARLY = "/s/sglang/srt/layers/moe/fused_moe_triton/configs/E=1,N=2,device_name=X.json"
MESSAGES = [
    ("sglang", "tuned", USED),
    ("sglang", "fallback", FALLBACK),
    ("sglang", "up_file", f"Down MoE config file not found at {PATH}; reusing the tuned up-projection config"),
    ("sglang", "default", DEFAULT),
    ("sglang", "ignored", "Deterministic inference is enabled, using default MoE kernel config."),
    (
        "sglang",
        "block_m",
        "down_moe config BLOCK_SIZE_M=16 does not match up config BLOCK_SIZE_M=32 at M=4; overriding",
    ),
    ("sglang", "mixed", "Fp8MoEMethod has no FLASHINFER_CUTLASS path; using triton for its fp8 experts."),
    ("sglang", "backend", "Use flashinfer_cutlass as MoE runner backend on SM110/SM120 for modelopt_fp4"),
    ("", "autotune_done", "FlashInfer autotune completed."),
    ("", "autotune_begun", "Running FlashInfer autotune with cache: /c"),
    ("sglang", "allreduce_flag", "--enable-flashinfer-allreduce-fusion is deprecated."),
    ("sglang", "sum_allreduce_flag", "+ sglang serve --enable-fused-moe-sum-all-reduce"),
    ("vllm", "tuned", "Using configuration from /c/E=1,N=2,device_name=X.json for MoE layer."),
    (
        "vllm",
        "default",
        "Using default MoE config. Performance might be sub-optimal! Config file not found at /c/E=1.json",
    ),
    ("vllm", "backend", "Using 'MARLIN' WNA16 MoE backend."),
    ("vllm", "backend", "Using Triton backend for Unquantized MoE"),
    ("vllm", "version", "Initializing a V1 LLM engine (v0.33.0) with config: model='/m'"),
    ("", "out_of_resource", "out of resource: shared memory, Required: 147456, Hardware limit: 101376"),
    ("", "autotune_off", "Skipping FlashInfer autotune because it is disabled."),
    ("", "autotune_disagree", "FlashInfer autotune: per-rank caches disagree, discarding them and tuning"),
    (
        "",
        "autotune_mismatch",
        "[Autotuner]: Cache file /c/r0.json was created in a different environment (gpu: x). Ignoring",
    ),
    ("", "autotune_loaded", "[Autotuner]: Loaded 42 configs from /c/rank_tp0.json"),
    ("", "dense", f"Using default W8A8 Block FP8 kernel config. Performance might be sub-optimal! {NOT_FOUND} {PATH}"),
    ("", "mamba", "Using default Mamba SSU config. Performance might be sub-optimal!"),
    ("", "lora", "Using default LoRA kernel configs"),
    ("", "bad_number", "ValueError: invalid literal for int() with base 10: 'old'"),
    ("", "unknown_key", "KeyError: 'Keyword argument waves_per_eu was specified but unrecognised'"),
    ("sglang", "no_configs", "FileNotFoundError: [Errno 2] No such file or directory: '/x/configs/configs'"),
    ("sglang", "ct_marlin", "Using CompressedTensorsWNA16MarlinMoEMethod"),
    (
        "sglang",
        "up_file",
        f"Using MoE kernel config with down_moe=False. Performance might be sub-optimal! {NOT_FOUND} {PATH}",
    ),
    ("sglang", "tuned", f"Using configuration from {EARLY} for MoE layer."),
    (
        "sglang",
        "default",
        f"Using default MoE config. Performance might be sub-optimal! Config file not found at {EARLY}",
    ),
    ("vllm", "marlin", "Using CompressedTensorsWNA16MarlinMoEMethod"),
    ("vllm", "marlin", "The model is convertible to awq_marlin during runtime. Using awq_marlin kernel."),
    ("vllm", "refined", "FP8 MoE block scales refined from [128, 128] to [64, 64] to fit the TP-sharded size 192."),
    ("vllm", "padded", "FP8 deep_gemm TP loading uses complete checkpoint blocks: local allocation 256, without"),
    ("sglang", "ready", "The server is fired up and ready to roll!"),
    ("", "ready", "INFO:     Application startup complete."),
]


def test_every_message_has_an_example() -> None:
    lines = [("", line.kind) for line in COMMON_LINES]
    lines += [(spec.name, line.kind) for spec in engines.every() for line in spec.log.lines]
    assert sorted(lines) == sorted((engine, kind) for engine, kind, _ in MESSAGES)


@pytest.mark.parametrize(("engine", "kind", "text"), MESSAGES)
def test_every_message_is_found(engine: str, kind: str, text: str) -> None:
    """A word that marks its line, and a pattern that reads it."""
    assert (engine, kind) in [(e.engine, e.kind) for e in read(f"x\n[2026-01-01 00:00:00 TP0] {text}\n").events]
