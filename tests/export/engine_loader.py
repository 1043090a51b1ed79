"""Runs an engine's own config loader: ``python engine_loader.py sglang|vllm TREE < jobs.json > answers.json``.

A job is one start of a server: a GPU's name, a Triton version, environment variables and layers.
Only the engine's config code is loaded from TREE. What it imports beyond that (kernels, distributed
state, platforms) is replaced by empty modules; the code under test is the published one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import logging
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

SGLANG_CONFIG = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config"
VLLM_MOE = "vllm.model_executor.layers.fused_moe"
VLLM_REAL = (
    f"{VLLM_MOE}.fused_moe",
    f"{VLLM_MOE}.config",
    "vllm.envs",
    "vllm.logger",
    "vllm.logging_utils",
    "vllm.utils.platform_utils",
)

Load = Callable[[dict[str, Any], int], Any]
DEVICE = {"name": ""}


class Records(logging.Handler):
    """Keeps what the engine logs: [level, text, how often]."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: dict[tuple[str, str], int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        key = record.levelname, record.getMessage()
        self.seen[key] = self.seen.get(key, 0) + 1


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of a package in TREE: the real one if it is on the list, an empty one if not."""

    def __init__(self, tree: Path, root: str, real: tuple[str, ...]) -> None:
        self.tree, self.root, self.real = tree, root, real

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != self.root:
            return None
        if any(name == real or name.startswith(real + ".") for real in self.real):
            return importlib.machinery.PathFinder.find_spec(name, path)
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        spec.submodule_search_locations = [str(self.tree / name.replace(".", "/"))]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Stub(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def sglang(tree: Path) -> tuple[Load, Callable[[], None]]:
    sys.meta_path.insert(0, Stubs(tree, "sglang", (SGLANG_CONFIG,)))
    runtime = importlib.import_module("sglang.srt.runtime_context")
    execution = MagicMock()
    execution.deterministic.enable_deterministic_inference = False
    runtime.get_exec = lambda: execution  # type: ignore[attr-defined]
    utils = importlib.import_module("sglang.srt.utils")
    utils.get_device_name = lambda: DEVICE["name"]  # type: ignore[attr-defined]
    utils.is_hip = lambda: False  # type: ignore[attr-defined]
    package = importlib.import_module(SGLANG_CONFIG.rpartition(".")[0])
    package.get_config = lambda: None  # type: ignore[attr-defined]
    logging.Logger.warning_once = logging.Logger.warning  # type: ignore[attr-defined]
    loader = importlib.import_module(SGLANG_CONFIG)

    def load(query: dict[str, Any], m: int) -> Any:
        dtype = loader.get_config_dtype_str(getattr(__import__("torch"), query["torch_dtype"]), **query["flags"])
        up, (down, _) = loader.try_get_optimal_moe_config(
            tuple(query["w1"]),
            tuple(query["w2"]),
            query["top_k"],
            dtype,
            m,
            block_shape=query["block_shape"],
            per_channel_quant=query["per_channel"],
            return_down_config=True,
        )
        return [up, down or up]

    return load, loader.get_moe_configs.cache_clear


def vllm(tree: Path) -> tuple[Load, Callable[[], None]]:
    sys.meta_path.insert(0, Stubs(tree, "vllm", VLLM_REAL))
    import triton
    from triton import language

    sys.modules.setdefault("regex", re)  # the device name's pattern means the same to both

    importlib.import_module("vllm.triton_utils").triton = triton  # type: ignore[attr-defined]
    importlib.import_module("vllm.triton_utils").tl = language  # type: ignore[attr-defined]
    platforms = importlib.import_module("vllm.platforms")
    platforms.current_platform = MagicMock()  # type: ignore[attr-defined]
    platforms.current_platform.get_device_name = lambda index=0: DEVICE["name"]
    importlib.import_module(VLLM_MOE).get_config = lambda: None  # type: ignore[attr-defined]
    loader = importlib.import_module(f"{VLLM_MOE}.fused_moe")
    dtype_of = importlib.import_module(f"{VLLM_MOE}.config")._get_config_dtype_str

    def load(query: dict[str, Any], m: int) -> Any:
        flags = {k: v for k, v in query["flags"].items() if k != "use_int8_w8a8"}
        dtype = dtype_of(getattr(__import__("torch"), query["torch_dtype"]), **flags)
        config = loader.try_get_optimal_moe_config(
            tuple(query["w1"]), tuple(query["w2"]), query["top_k"], dtype, m, query["block_shape"]
        )
        return [config, config]

    names = importlib.import_module("vllm.utils.platform_utils").get_device_name_as_file_name

    log = importlib.import_module("vllm.logger")

    def forget() -> None:
        for cached in (loader.get_moe_configs, names, log._print_info_once, log._print_warning_once):
            cached.cache_clear()

    return load, forget


def main() -> None:
    engine, tree = sys.argv[1], Path(sys.argv[2])
    sys.path.insert(0, str(tree))
    import triton

    load, forget = {"sglang": sglang, "vllm": vllm}[engine](tree)
    records = Records()
    for logger in (logging.getLogger(), logging.getLogger("vllm")):
        logger.addHandler(records)
        logger.setLevel(logging.DEBUG)
    answers = []
    for job in json.load(sys.stdin):
        DEVICE["name"] = job["device"]
        triton.__version__ = job["triton_version"]
        os.environ.update(job["environment"])
        forget()
        records.seen.clear()
        layers = []
        for query in job["queries"]:
            runs: list[list[Any]] = []  # [first M, [up, down]] wherever the answer changes
            for m in range(1, job["largest"] + 1):
                answer = load(query, m)
                if not runs or runs[-1][1] != answer:
                    runs.append([m, json.loads(json.dumps(answer))])
            layers.append(runs)
        answers.append({"layers": layers, "log": [[*key, count] for key, count in records.seen.items()]})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
