"""Commands that the doctor says to run next."""

from __future__ import annotations

import shlex

from moeopt import engines
from moeopt.core.shape import MoEShape
from moeopt.engines import EngineSpec
from moeopt.engines.log import FlashInferTuning, LogFacts
from moeopt.export.names import ConfigName

OUTPUT = "moe-configs"
# A shell comment: the line can be pasted as it is.
OTHER_OPTIONS = "  # and your other options"


def tune_commands(
    spec: EngineSpec, facts: LogFacts | None, name: ConfigName | None, shape: MoEShape | None, model: str | None
) -> tuple[str, ...]:
    """Tunes the layer that the server asked for, and starts the server with the files."""
    path = model or (facts.setting("model_path", "model") if facts else None)
    tp, ep = spec.log.parallel(facts or LogFacts())
    fetch: tuple[str, ...] = ()
    if shape is not None and model is None:
        what = _shape_options(shape)
    elif path is not None:
        local = path
        if model is None and not path.startswith(("/", ".", "~")):
            local = "model"
            fetch = (f"hf download {shlex.quote(path)} config.json --local-dir model",)
        what = f"--model {shlex.quote(local)} --engine {spec.name} --tp {tp}" + (f" --ep {ep}" if ep > 1 else "")
    elif name is not None:
        what = _name_options(name)
    else:
        what = f"--model MODEL_DIR --engine {spec.name} --tp {tp}"
    mode = "" if spec.split else " --mode joint"
    tune = f"moeopt tune {what}{mode} --export {spec.name}:{OUTPUT}"
    return (*fetch, tune, start_command(spec, facts, f"$PWD/{OUTPUT}", spec.server.tuned))


def start_command(
    spec: EngineSpec, facts: LogFacts | None, directory: str | None, option: str | None = None, without: str = ""
) -> str:
    """The server's start with the files of a directory, with one more option and without another."""
    facts = facts or LogFacts()
    kept = [
        f"--{key} {value}"
        for key in spec.server.kept
        if (value := facts.setting(key)) and f"--{key}" not in (option or "")
    ]
    tp, _ = spec.log.parallel(facts)
    line = spec.start(
        facts.setting("model_path", "model"), f"{spec.server.tp_option} {tp}", *kept, option, directory=directory
    )
    return line + OTHER_OPTIONS + (f", without {without}" if without else "")


def flashinfer_commands(spec: EngineSpec, facts: LogFacts, tuning: FlashInferTuning) -> tuple[str, ...]:
    """The start with FlashInfer tuning its own kernels, as it does unless it is told not to, and the proof."""
    asked = facts.setting(tuning.setting, "backend_option")
    backend = asked if asked in tuning.backends else tuning.backends[0]
    start = start_command(
        spec, facts, None, f"{option_of(tuning.setting)} {backend} 2>&1 | tee server.log", option_of(tuning.off)
    )
    return start, "grep 'FlashInfer autotune' server.log"


def option_of(setting: str) -> str:
    """A setting as the command line has it."""
    return "--" + setting.replace("_", "-")


def _shape_options(shape: MoEShape) -> str:
    words = f"--experts {shape.num_experts} --top-k {shape.top_k} --hidden {shape.hidden_size} "
    words += f"--intermediate {shape.intermediate_size} --dtype {shape.dtype}" + _scales(shape)
    return words + (f" --group-size {shape.group_size}" if shape.group_size else "")


def _name_options(name: ConfigName) -> str:
    size = engines.get(name.engine).names.elements(name)
    words = f"--experts {name.num_experts} --top-k TOP_K --hidden HIDDEN --intermediate {size} "
    return words + f"--dtype {name.dtype or 'bf16'}" + _scales(name)


def _scales(of: MoEShape | ConfigName) -> str:
    block = " --block-shape {},{}".format(*of.block_shape) if of.block_shape else ""
    return block + (" --per-channel" if of.per_channel else "")
