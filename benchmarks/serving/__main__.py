"""What tuned files do in a real engine: decode and prefill tokens per second, default and tuned in turn.

    python -m benchmarks.serving --engine vllm --model qwen3-30b --dtype bf16
    python -m benchmarks.serving --engine vllm --model glm5-tp8 --dtype fp8 --routings uniform,zipf:0.6

Tunes the model's MoE layer with the engine's own kernel (or takes ``--tuned DIR`` and ``--tune-json FILE``),
starts the engine twice on one GPU, once with nothing and once with the exported file, and lets them take turns,
so that drift does not decide. Weights are made up, tokens are ids: nothing is downloaded. Experts come from
tables drawn for each routing (:class:`benchmarks.serving.vllm_engine.TableRouting`), so that both engines route
alike; ``--loads`` shows what the engine's own routers do.

The gain predicted for a decode step is the time of both projections that the tune measured, default less tuned,
times the layers, taken off the default's step; it stands beside the measured one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu_run import RESULTS, machine_facts, table, write_json
from benchmarks.serving.models import MODELS, ServedModel
from moeopt.core.gpu import GpuSpec

VARIANTS = ("default", "tuned")
# Prompt tokens of one prefill.
PREFILL = 16 * 1024
FILE_LINES = re.compile(r"Using configuration from \S+|Using default MoE config\S*.*? at \S+")


class Child:
    """An engine process: commands in, results out, everything else into a log."""

    def __init__(self, name: str, argv: list[str], env: dict[str, str], log: Path) -> None:
        self.name, self.log_path = name, log
        self.log = log.open("w")
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=env
        )

    def result(self) -> dict[str, Any]:
        """The next result; the process must still live."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return found
            self.log.write(line)
        self.log.flush()
        tail = "".join(self.log_path.read_text(errors="replace").splitlines(keepends=True)[-25:])
        raise SystemExit(f"the {self.name} engine ended with status {self.process.wait()}:\n{tail}")

    def ask(self, do: str, **values: Any) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"do": do, **values}) + "\n")
        self.process.stdin.flush()
        return self.result()

    def quit(self) -> None:
        assert self.process.stdin
        self.process.stdin.write('{"do": "quit"}\n')
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()

    def file_line(self) -> str | None:
        """The line in which the engine says which file it took."""
        self.log.flush()
        found = FILE_LINES.search(" ".join(self.log_path.read_text(errors="replace").split()))
        return found.group() if found else None


def start(args: argparse.Namespace, variant: str, work: Path, **extra: Any) -> Child:
    """Starts one engine."""
    env = dict(os.environ)
    env.pop("VLLM_TUNED_CONFIG_FOLDER", None)
    if variant == "tuned":
        env["VLLM_TUNED_CONFIG_FOLDER"] = str(args.tuned.resolve())
    argv = [sys.executable, "-m", f"benchmarks.serving.{args.engine}_engine", "--model", args.model]
    argv += ["--config", str(work / "model"), "--layers", str(args.layers), "--kv-gib", str(args.kv_gib)]
    argv += ["--sizes", ",".join(map(str, args.concurrency))]
    if not args.shipped:
        argv.append("--no-shipped")
    for name, value in extra.items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return Child(variant, argv, env, work / f"{variant}.log")


def tune(args: argparse.Namespace, model: ServedModel, work: Path) -> None:
    """Tunes the layer with the engine's kernel and exports the file."""
    shape = model.shape(args.dtype)
    argv = [sys.executable, "-m", "moeopt.cli", "tune", "--kernel", args.engine, "--mode", "joint"]
    argv += ["--experts", str(shape.num_experts), "--top-k", str(shape.top_k), "--hidden", str(shape.hidden_size)]
    argv += ["--intermediate", str(shape.intermediate_size), "--dtype", shape.dtype]
    if shape.block_shape:
        argv += ["--block-shape", ",".join(map(str, shape.block_shape))]
    args.tuned, args.tune_json = work / "tuned", work / "tune.json"
    argv += ["--storage", str(work / "study.db"), "--export", f"{args.engine}:{args.tuned}"]
    argv += ["--routing", args.tune_routing, "--json", str(args.tune_json)]
    with (work / "tune.log").open("w") as log:
        done = subprocess.run(argv, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit((work / "tune.log").read_text()[-3000:])


def loads(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Tokens per expert of the engine's own routers, gates drawn at random, in an engine without graphs."""
    child = start(args, "default", work, router="gates", eager=True)
    child.result()
    counts = {str(c): child.ask("loads", concurrency=c) for c in args.concurrency}
    child.quit()
    rows = [
        (c, f"{v['visited']:.1f}", f"{v['mean']:.2f}", f"{v['heaviest']:.1f}", f"{v['gini']:.3f}")
        for c, v in counts.items()
    ]
    print(table(("concurrency", "experts visited", "mean tokens", "heaviest", "Gini"), rows), flush=True)
    return counts


def measure(args: argparse.Namespace, work: Path, result: dict[str, Any], out: Path) -> None:
    """Both engines in turn, for every routing and concurrency. What is measured is written at once."""
    children = {variant: start(args, variant, work) for variant in VARIANTS}
    result["start"] = {name: child.result() for name, child in children.items()}
    result["log_lines"] = {name: child.file_line() for name, child in children.items()}
    print(json.dumps(result["log_lines"], indent=1), flush=True)
    result["routings"] = {}
    for routing in args.routings:
        for child in children.values():
            child.ask("route", routing=routing)
        found = result["routings"].setdefault(routing, {"ms": {}, "profiles": {}})
        for turn in range(args.turns + 1):
            order = VARIANTS if turn % 2 else VARIANTS[::-1]
            for concurrency in args.concurrency:
                for name in order:
                    got = children[name].ask("decode", concurrency=concurrency, steps=args.steps if turn else 8)
                    if turn:
                        found["ms"].setdefault(str(concurrency), {}).setdefault(name, []).append(got["step_ms"])
            for name in order:
                got = children[name].ask("prefill", prompts=16, length=1024)
                if turn:
                    ms = PREFILL / got["tokens_per_s"] * 1e3
                    found["ms"].setdefault("prefill", {}).setdefault(name, []).append(ms)
            write_json(out, result)
        for concurrency in args.concurrency:
            profiles = {name: child.ask("profile", concurrency=concurrency) for name, child in children.items()}
            found["profiles"][str(concurrency)] = profiles
        report(args, routing, found)
        write_json(out, result)
    binaries = {name: child.ask("kernels") for name, child in children.items()}
    for child in children.values():
        child.quit()
    result["binaries"] = {name: compare(args, name, seen) for name, seen in binaries.items()}


def compare(args: argparse.Namespace, variant: str, found: dict[str, Any]) -> dict[str, Any]:
    """The binaries that the engine launched beside those that moeopt's adapter compiles for the same sizes."""
    # Graphs, and what runs without one: prompts of 32 tokens for each request, chunks of 8192.
    sizes = sorted({*found["sizes"], *args.concurrency, *(32 * c for c in args.concurrency), 8192})
    argv = [sys.executable, "-m", "benchmarks.serving.adapter", "--engine", args.engine, "--model", args.model]
    argv += ["--dtype", args.dtype, "--sizes", ",".join(map(str, sizes))]
    if variant == "tuned":
        argv += ["--tuned", str(args.tuned)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"the adapter of {args.engine} failed:\n{done.stderr[-3000:]}", flush=True)
        return {"launched": found["kernels"]}
    adapter = json.loads(lines[0].removeprefix("RESULT "))
    launched = {kernel["hash"]: kernel for kernel in found["kernels"]}
    only = [launched[h] for h in launched.keys() - adapter["binaries"].keys()]
    same = len(launched) - len(only)
    print(
        f"{variant}: {same} of the engine's {len(launched)} binaries are the adapter's ({adapter['how']})", flush=True
    )
    for kernel in only[:4]:
        print(f"  only the engine's: {json.dumps(kernel)[:700]}", flush=True)
    missing = [about for h, about in adapter["binaries"].items() if h not in launched]
    return {
        "same": same,
        "launched": len(launched),
        "only_engine": only,
        "only_adapter": missing,
        "how": adapter["how"],
    }


def report(args: argparse.Namespace, routing: str, found: dict[str, Any]) -> None:
    """A table: default, tuned, gain, predicted gain, share of the two projections."""
    tuned = json.loads(args.tune_json.read_text())["batch_sizes"] if args.tune_json else {}
    rows = []
    for key, by_variant in found["ms"].items():
        default, best = (statistics.median(by_variant[name]) for name in VARIANTS)
        spread = max(max(times) / min(times) - 1 for times in by_variant.values())
        tokens = PREFILL if key == "prefill" else int(key)
        row = {"default_ms": default, "tuned_ms": best, "gain": default / best, "spread": spread}
        if (promise := tuned.get(key)) and promise.get("default_us"):
            saved = args.layers * (promise["default_us"] - promise["total_us"]) / 1e3
            row["predicted"] = default / (default - saved)
        if profile := found["profiles"].get(key):
            moe = {name: profile[name]["moe_us"] for name in VARIANTS}
            row["share"] = moe["default"] / profile["default"]["gpu_us"]
            row["kernel_gain"] = moe["default"] / moe["tuned"]
        found.setdefault("summary", {})[key] = row
        rows.append(
            (
                key,
                f"{tokens / default * 1e3:,.0f}",
                f"{tokens / best * 1e3:,.0f}",
                f"{row['gain']:.3f}",
                f"{row['predicted']:.3f}" if "predicted" in row else "-",
                f"{100 * row['share']:.0f} %" if "share" in row else "-",
                f"{row['kernel_gain']:.3f}" if "kernel_gain" in row else "-",
                f"{100 * spread:.1f} %",
            )
        )
    header = ("concurrency", "default tok/s", "tuned tok/s", "gain", "predicted", "MoE share", "kernels", "spread")
    print(f"\n{args.model} {args.dtype}, {routing} routing\n" + table(header, rows), flush=True)


def main() -> None:
    """Parses the command line, tunes, measures, prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm",), default="vllm")
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b")
    parser.add_argument("--dtype", choices=("bf16", "fp8"), default="bf16")
    parser.add_argument("--layers", type=int, help="Fewer decoder layers than the model has.")
    parser.add_argument("--concurrency", default="1,8,32,128,256")
    parser.add_argument("--routings", default="uniform,zipf:0.6")
    parser.add_argument("--tune-routing", default="uniform", help="Routing that the tune measures under.")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--kv-gib", type=float, default=4.0, help="GiB of KV cache of each engine.")
    parser.add_argument("--shipped", action="store_true", help="The default may be a file that the engine ships.")
    parser.add_argument("--tuned", type=Path, help="Directory of exported files. Default: tune now.")
    parser.add_argument("--tune-json", type=Path, help="The tune's --json, for the prediction.")
    parser.add_argument("--loads", action="store_true", help="Count tokens per expert of the engine's own routers.")
    parser.add_argument("--keep", type=Path, help="Directory for logs, study and exported files.")
    parser.add_argument("--out", type=Path, help="Default: benchmarks/results/serving-ENGINE-MODEL-DTYPE.json")
    args = parser.parse_args()
    model = MODELS[args.model]
    args.layers = args.layers or model.layers
    args.concurrency = [int(c) for c in args.concurrency.split(",")]
    args.routings = args.routings.split(",")
    with tempfile.TemporaryDirectory(prefix="moeopt-serving-") as folder:
        work = args.keep or Path(folder)
        (work / "model").mkdir(parents=True, exist_ok=True)
        (work / "model" / "config.json").write_text(json.dumps(model.config(args.dtype, args.layers)))
        result: dict[str, Any] = {
            "engine": args.engine,
            "model": args.model,
            "note": model.note,
            "layers": args.layers,
            "dtype": args.dtype,
            "tune_routing": args.tune_routing,
            "machine": machine_facts(GpuSpec.detect()),
        }
        if not args.tuned:
            tune(args, model, work)
        if args.loads:
            result["loads"] = loads(args, work)
        if args.tune_json:
            result["tune"] = json.loads(args.tune_json.read_text())
        out = args.out or RESULTS / f"serving-{args.engine}-{args.model}-{args.dtype}.json"
        measure(args, work, result, out)
        write_json(out, result)


if __name__ == "__main__":
    main()
