"""Commands that the doctor says to run next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from moeopt import engines
from moeopt.core.shape import MoEShape
from moeopt.engines import EngineSpec
from moeopt.engines.log import FlashInferTuning, LogFacts
from moeopt.engines.serving import Checkpoint
from moeopt.errors import InvalidInputError
from moeopt.export.names import ConfigName
from moeopt.models.request import ModelRequest

OUTPUT = "moe-configs"
# A shell comment: the line can be pasted as it is.
OTHER_OPTIONS = "  # and your other options"
# Layers of one server for which commands are given: a target and a draft, or two kinds of weights.
_MOST_LAYERS = 3
_OFF = frozenset({"", "0", "1", "none", "false", "auto"})


def tune_commands(
    spec: EngineSpec,
    facts: LogFacts | None,
    names: Sequence[ConfigName | None],
    shape: MoEShape | None,
    request: ModelRequest | None,
) -> tuple[str, ...]:
    """Tunes the layers that the server asked for, and starts the server with the files.

    Run as printed, each command tunes the file of that name: where the model's config and the layout do not
    give it, the numbers of the name are given by hand.
    """
    facts = facts or LogFacts()
    deployment = spec.log.deployment(facts)
    path = facts.setting("model_path", "model")
    fetch: list[str] = []
    if request is None and path is not None and shape is None:
        local = _local(path, "model", fetch)
        request = ModelRequest(local, spec.name).laid_out(deployment)
    mode = "" if spec.split else " --mode joint"
    commands: list[str] = []
    for name in list(dict.fromkeys(names))[:_MOST_LAYERS] or [None]:
        if shape is not None and request is None:
            what = _shape_options(shape)
        elif request is not None:
            what = (request if name is None else _for_layer(request, name, names[0], deployment.draft, fetch)).options()
        elif name is not None:
            what = _name_options(name)
        else:
            what = f"--model MODEL_DIR --engine {spec.name} --tp {deployment.tp}"
        commands.append(f"moeopt tune {what}{mode} --export {spec.name}:{OUTPUT}")
    option = None if facts.lines else _option(spec, shape, request)
    return (*fetch, *dict.fromkeys(commands), start_command(spec, facts, f"$PWD/{OUTPUT}", option, model=request))


def _for_layer(
    request: ModelRequest, name: ConfigName, first: ConfigName | None, draft: str | None, fetch: list[str]
) -> ModelRequest:
    """The request of one layer: of the draft model, where there is one and the layer is not the target's.

    Of a target that is not on this machine, it is taken that the first layer is its own, and those of that size.
    """
    wanted = fitted(request, name)
    if wanted is not None or draft is None:
        return wanted or request.named(name)
    alike = first is not None and (first.num_experts, first.intermediate_size) == (
        name.num_experts,
        name.intermediate_size,
    )
    if alike and not Path(request.path).exists():
        return request.named(name)
    other = replace(request, path=_local(draft, "draft", fetch), fuse_shared=None, dtype=None, overrides={})
    return fitted(other, name) or other.named(name)


def fitted(request: ModelRequest, name: ConfigName) -> ModelRequest | None:
    """The request, or one that differs from it in what a log does not say, that derives a file of this name.

    None where the model cannot be read here, or none derives it.
    """
    for candidate in _candidates(request, name):
        try:
            shape, _ = candidate.derive()
            found = ConfigName.of(candidate.engine, shape, name.device)
        except InvalidInputError:
            continue
        if replace(found, device=name.device) == name.for_role("up"):
            return candidate
    return None


def _candidates(request: ModelRequest, name: ConfigName) -> Iterator[ModelRequest]:
    yield request
    plain = name.dtype or "bf16"
    scheme = {"block_shape": name.block_shape, "per_channel": name.per_channel or None}
    given = {key: value for key, value in scheme.items() if value}
    for dtype, overrides in ((request.dtype, {}), (plain, {}), (plain, given)):
        for fuse in (request.fuse_shared, False, True):
            yield replace(request, dtype=dtype, fuse_shared=fuse, overrides={**request.overrides, **overrides})


def start_command(
    spec: EngineSpec,
    facts: LogFacts | None,
    directory: str | None,
    option: str | None = None,
    without: str = "",
    model: ModelRequest | None = None,
) -> str:
    """The server's start with the files of a directory, with one more option and without another."""
    facts = facts or LogFacts()
    kept = []
    for key in spec.server.kept:
        value = facts.setting(key)
        if value is None or value.lower() in _OFF or option_of(key) in (option or "") or option_of(key) == without:
            continue
        kept.append(option_of(key) + ("" if value.lower() == "true" else f" {value}"))
    named = facts.setting("model_path", "model") or (str(model.path) if model is not None else None)
    tp = spec.log.deployment(facts).start_tp if facts.lines or model is None else model.tp
    line = spec.start(named, f"{spec.server.tp_option} {tp}", *kept, option, directory=directory)
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


def _local(path: str, folder: str, fetch: list[str]) -> str:
    """A model's path here; that of a hub is fetched into a folder by the command that is added."""
    if path.startswith(("/", ".", "~")):
        return path
    fetch.append(f"hf download {shlex.quote(path)} config.json --local-dir {folder}")
    return folder


def _option(spec: EngineSpec, shape: MoEShape | None, request: ModelRequest | None) -> str | None:
    """The option with which the Triton kernel runs, where no log says that it does."""
    rules, checkpoint = spec.serving, Checkpoint(shape) if shape is not None else None
    if request is not None:
        try:
            checkpoint = request.derive()[1].checkpoint
        except InvalidInputError:
            checkpoint = None
    if checkpoint is None or (rules.triton_first and rules.serving(checkpoint, None).reads == "all"):
        return None
    return rules.option(checkpoint, None)


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
