"""The commands that the doctor says to run next."""

from __future__ import annotations

import shlex

from moeopt.core.shape import MoEShape
from moeopt.doctor.backends import FLASHINFER
from moeopt.doctor.scan import LogFacts
from moeopt.engines.names import Engine
from moeopt.export.install import VARIABLES
from moeopt.export.names import ConfigName

OUTPUT = "moe-configs"
# A shell comment: the line can be pasted as it is.
OTHER_OPTIONS = "  # and your other options"


def tune_commands(
    engine: Engine, facts: LogFacts | None, name: ConfigName | None, shape: MoEShape | None, model: str | None
) -> tuple[str, ...]:
    """Tunes the layer that the server asked for, and starts the server with the files."""
    path = model or (facts.setting("model_path", "model") if facts else None)
    tp, ep = parallel_sizes(facts, engine)
    fetch: tuple[str, ...] = ()
    if shape is not None and model is None:
        what = _shape_options(shape)
    elif path is not None:
        local = path
        if model is None and not path.startswith(("/", ".", "~")):
            local = "model"
            fetch = (f"hf download {shlex.quote(path)} config.json --local-dir model",)
        what = f"--model {shlex.quote(local)} --engine {engine} --tp {tp}" + (f" --ep {ep}" if ep > 1 else "")
    elif name is not None:
        what = _name_options(name)
    else:
        what = f"--model MODEL_DIR --engine {engine} --tp {tp}"
    mode = " --mode joint" if engine == "vllm" else ""
    tune = f"moeopt tune {what}{mode} --export {engine}:{OUTPUT}"
    option = "--moe-backend triton" if engine == "vllm" else None
    return (*fetch, tune, start_command(engine, facts, f"$PWD/{OUTPUT}", option))


def start_command(engine: Engine, facts: LogFacts | None, directory: str | None, option: str | None = None) -> str:
    """The server's start with the files of a directory, and with one more option."""
    prefix = f"{VARIABLES[engine]}={directory} " if directory is not None else ""
    model = facts.setting("model_path", "model") if facts else None
    tp, _ = parallel_sizes(facts, engine)
    name = shlex.quote(model) if model else "MODEL"
    if engine == "vllm":
        line = f"{prefix}vllm serve {name} --tensor-parallel-size {tp}"
    else:
        line = f"{prefix}python -m sglang.launch_server --model-path {name} --tp {tp}"
        quantization = facts.setting("quantization") if facts else None
        if quantization and "--quantization" not in (option or ""):
            line += f" --quantization {quantization}"
    return line + (f" {option}" if option else "") + OTHER_OPTIONS


def flashinfer_commands(facts: LogFacts) -> tuple[str, ...]:
    """SGLang's start with FlashInfer tuning its own kernels, as it does unless it is told not to, and the proof."""
    backend = facts.setting("moe_runner_backend", "backend_option") or ""
    option = f"--moe-runner-backend {backend if backend in FLASHINFER else 'flashinfer_cutlass'} 2>&1 | tee server.log"
    start = start_command("sglang", facts, None, option)
    return start.replace(OTHER_OPTIONS, OTHER_OPTIONS + ", without --disable-flashinfer-autotune"), (
        "grep 'FlashInfer autotune' server.log"
    )


def parallel_sizes(facts: LogFacts | None, engine: Engine) -> tuple[int, int]:
    """Tensor- and expert-parallel size of the server, 1 where the log does not say."""

    def number(*keys: str) -> int:
        text = (facts.setting(*keys) if facts else None) or "1"
        return int(text) if text.isascii() and text.isdigit() and 0 < len(text) < 6 else 1

    tp = number("tp_size", "tensor_parallel_size")
    if engine == "vllm":
        return tp, tp if facts is not None and facts.is_on("enable_expert_parallel") else 1
    return tp, number("ep_size")


def _shape_options(shape: MoEShape) -> str:
    words = [f"--experts {shape.num_experts} --top-k {shape.top_k} --hidden {shape.hidden_size}"]
    words.append(f"--intermediate {shape.intermediate_size} --dtype {shape.dtype}")
    if shape.block_shape:
        words.append("--block-shape {},{}".format(*shape.block_shape))
    if shape.per_channel:
        words.append("--per-channel")
    if shape.group_size:
        words.append(f"--group-size {shape.group_size}")
    return " ".join(words)


def _name_options(name: ConfigName) -> str:
    size = name.intermediate_size * (2 if name.engine == "sglang" and name.dtype == "int4_w4a16" else 1)
    words = [f"--experts {name.num_experts} --top-k TOP_K --hidden HIDDEN --intermediate {size}"]
    words.append(f"--dtype {name.dtype or 'bf16'}")
    if name.block_shape:
        words.append("--block-shape {},{}".format(*name.block_shape))
    if name.per_channel:
        words.append("--per-channel")
    return " ".join(words)
