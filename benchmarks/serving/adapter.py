"""Binaries that moeopt's adapter of an engine's kernel compiles for the batch sizes of a server.

A subprocess of :mod:`benchmarks.serving.__main__`: hashes of compiled kernels are compared with those that the
running engine launched (Triton's hash covers source, constants, specialisation, options and target).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.serving.models import MODELS
from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import ROLES
from moeopt.kernels import get_kernel
from moeopt.kernels.engine import EngineKernel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--tuned", type=Path, help="Directory of the exported file; omit for the engine's default.")
    parser.add_argument("--sizes", required=True, help="Batch sizes, such as 1,8,64.")
    args = parser.parse_args()
    shape, gpu, kernel = MODELS[args.model].shape(args.dtype), GpuSpec.detect(), get_kernel(args.engine)
    assert isinstance(kernel, EngineKernel)
    how = kernel.load(shape)
    entries: dict[int, LaunchConfig] = {}
    if args.tuned:
        (path,) = (p for p in args.tuned.rglob("*.json") if not p.stem.endswith("_down"))
        content = json.loads(path.read_text())
        entries = {int(key): LaunchConfig.from_dict(value) for key, value in content.items() if key.isdigit()}
    binaries: dict[str, Any] = {}
    for size in map(int, args.sizes.split(",")):
        for role in ROLES:
            if entries:
                config = entries[min(entries, key=lambda key: abs(key - size))]
            else:
                config = kernel.default_config(shape, role, size, gpu)
            compiled = kernel.meta_launch(shape, role, size, config, gpu.compute_capability).warmup()
            names = compiled.src.fn.arg_names
            about = {
                "launch": f"M={size} {role} {config}",
                "signature": {str(k): str(v) for k, v in compiled.src.signature.items()},
                "divisible": sorted(names[k[0]] for k, v in compiled.src.attrs.items() if v),
            }
            binaries.setdefault(compiled.hash, about)
    print("RESULT " + json.dumps({"how": how, "binaries": binaries}))


if __name__ == "__main__":
    main()
