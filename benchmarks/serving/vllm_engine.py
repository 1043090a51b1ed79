"""One vLLM engine in a process of its own: reads a command per line, answers with a line ``RESULT {json}``.

Started by :mod:`benchmarks.serving.__main__`. The engine runs in this very process, so that its weights,
routers and compiled kernels can be reached.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
STRATEGY = "moeopt_table"

import torch  # noqa: E402
import vllm  # noqa: E402
import vllm.model_executor.layers.fused_moe.fused_moe as fused_moe  # noqa: E402
from vllm.model_executor.layers.fused_moe.router import routing_simulator_router as simulator  # noqa: E402

from benchmarks.serving.models import MODELS  # noqa: E402
from moeopt.kernels.routing import Routing  # noqa: E402


class TableRouting(simulator.RoutingStrategy):
    """Experts from tables drawn beforehand: one table per decoder layer, rewritten between measurements.

    The engine's own top-k runs, too, and gives the weights, so that a step costs what it costs.
    """

    def __init__(self, layers: int, rows: int, top_k: int) -> None:
        self.tables = torch.zeros((layers, rows, top_k), dtype=torch.int32, device="cuda")
        self.calls = 0

    def fill(self, model: str, routing: str, seed: int) -> None:
        layers, rows, _ = self.tables.shape
        drawn = Routing.parse(routing).draw(MODELS[model].shape("bf16"), rows, layers, seed)
        self.tables.copy_(torch.from_numpy(drawn))

    def route_tokens(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        top_k: int,
        indices_type: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

        # A graph holds one call per layer, in order.
        table = self.tables[self.calls % len(self.tables)]
        self.calls += 1
        weights, *_ = fused_topk(hidden_states, router_logits, top_k, renormalize=True)
        ids = table[: hidden_states.shape[0]]
        return weights, ids if indices_type in (None, torch.int32) else ids.to(indices_type)


class Engine:
    """The engine, with made-up weights whose values look like a checkpoint's."""

    def __init__(self, args: argparse.Namespace) -> None:
        if args.no_shipped:
            # Shipped files are looked for beside this file: the engine's own default is wanted.
            fused_moe.__file__ = "/nonexistent/fused_moe.py"
        self.args = args
        self.table: TableRouting | None = None
        if args.router == "table":
            self.table = TableRouting(args.layers, args.max_tokens, MODELS[args.model].top_k)
            simulator.RoutingSimulator.register_strategy(STRATEGY, self.table)
            os.environ["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = STRATEGY
            self.table.fill(args.model, "uniform", 0)
        self.llm = vllm.LLM(
            model=str(args.config),
            load_format="dummy",
            skip_tokenizer_init=True,
            generation_config="vllm",
            moe_backend="triton",
            attention_backend="FLASH_ATTN",
            enable_prefix_caching=False,
            max_model_len=args.max_model_len,
            max_num_batched_tokens=args.max_tokens,
            max_num_seqs=args.max_seqs,
            # Given, not profiled: two engines that start at once would count each other's memory.
            kv_cache_memory_bytes=int(args.kv_gib * 2**30),
            gpu_memory_utilization=0.45,
            enforce_eager=args.eager,
            compilation_config={} if args.eager else {"cudagraph_capture_sizes": args.sizes},
            seed=0,
            disable_log_stats=True,
        )
        self.engine = self.llm.llm_engine
        self.model = self.engine.apply_model(lambda model: model)[0]
        self.number = 0
        fill_weights(self.model)

    def _start(self, count: int, prompt: int, tokens: int) -> None:
        generator = torch.Generator().manual_seed(self.number)
        for _ in range(count):
            ids = torch.randint(10, 50_000, (prompt,), generator=generator).tolist()
            params = vllm.SamplingParams(
                temperature=0.0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
            )
            self.engine.add_request(str(self.number), {"prompt_token_ids": ids}, params)
            self.number += 1

    def _step(self) -> int:
        return sum(len(request.outputs[0].token_ids) for request in self.engine.step())

    def _drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def _decoding(self, concurrency: int, steps: int, prompt: int) -> None:
        """Starts requests and steps until every one has been prefilled."""
        self._start(concurrency, prompt, steps + 24)
        for _ in range(1_000):
            if self._step() == concurrency:
                break
        for _ in range(4):
            self._step()

    def decode(self, concurrency: int, steps: int, prompt: int = 32) -> dict[str, Any]:
        """Milliseconds of a decode step and tokens per second, prefill not counted."""
        self._decoding(concurrency, steps, prompt)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        tokens = sum(self._step() for _ in range(steps))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        self._drain()
        assert tokens == steps * concurrency, f"{tokens} tokens in {steps} steps of {concurrency}"
        return {"step_ms": seconds * 1e3 / steps, "tokens_per_s": tokens / seconds}

    def prefill(self, prompts: int, length: int) -> dict[str, Any]:
        """Prompt tokens per second."""
        torch.cuda.synchronize()
        self._start(prompts, length, 1)
        begin = time.perf_counter()
        self._drain()
        torch.cuda.synchronize()
        return {"tokens_per_s": prompts * length / (time.perf_counter() - begin)}

    def profile(self, concurrency: int, steps: int = 8) -> dict[str, Any]:
        """GPU microseconds of a decode step by kernel."""
        from torch.profiler import ProfilerActivity, profile

        self._decoding(concurrency, steps + 8, 32)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                self._step()
            torch.cuda.synchronize()
        self._drain()
        rows = [
            (event.key, event.self_device_time_total / steps, event.count / steps)
            for event in profiler.key_averages()
            if event.self_device_time_total > 0
        ]
        rows.sort(key=lambda row: -row[1])
        moe = [row for row in rows if row[0].startswith("fused_moe_kernel")]
        return {
            "gpu_us": sum(us for _, us, _ in rows),
            "moe_us": sum(us for _, us, _ in moe),
            "moe_launches": sum(count for *_, count in moe),
            "kernels": [[re.sub(r"<.*", "", key)[:70], round(us, 1), count] for key, us, count in rows[:14]],
        }

    def route(self, routing: str, seed: int = 0) -> dict[str, Any]:
        """Fills the tables."""
        assert self.table is not None, "the engine's own router is in use"
        self.table.fill(self.args.model, routing, seed)
        return {}

    def loads(self, concurrency: int, steps: int = 4) -> dict[str, Any]:
        """Tokens per expert as the engine's routers choose them; needs an engine without graphs."""
        found = [getattr(module, "router", None) for module in self.model.modules()]
        layers = list({id(router): router for router in found if hasattr(router, "capture_fn")}.values())
        assert layers, "no router was found"
        seen: list[list[torch.Tensor]] = [[] for _ in layers]
        self._decoding(concurrency, steps, 32)
        for router, ids in zip(layers, seen, strict=True):
            router.set_capture_fn(lambda topk_ids, ids=ids: ids.append(topk_ids.detach().cpu()))
        for _ in range(steps):
            self._step()
        for router in layers:
            router.set_capture_fn(None)
        self._drain()
        experts = MODELS[self.args.model].experts
        counts = torch.stack(
            [torch.bincount(one.flatten().long(), minlength=experts) for ids in seen for one in ids]
        ).double()
        ordered = counts.sort(dim=1).values
        ranks = torch.arange(1, experts + 1).double()
        gini = ((2 * ranks - experts - 1) * ordered).sum(1) / (experts * ordered.sum(1))
        return {
            "layers": len(layers),
            "visited": counts.gt(0).sum(1).double().mean().item(),
            "heaviest": counts.max(1).values.mean().item(),
            "mean": counts.mean().item(),
            "gini": gini.mean().item(),
        }

    def kernels(self) -> dict[str, Any]:
        """Hash, launch parameters and constants of every binary of the fused MoE kernel that was launched."""
        out = []
        for name in ("fused_moe_kernel", "fused_moe_kernel_gptq_awq"):
            for caches in getattr(fused_moe, name).device_caches.values():
                for kernel in caches[0].values():
                    constants = {
                        "_".join(map(str, key)) if isinstance(key, tuple) else str(key): value
                        for key, value in kernel.src.constants.items()
                        if isinstance(value, int | str | None)
                    }
                    names = kernel.src.fn.arg_names
                    constants = {names[int(k)] if k.isdigit() else k: v for k, v in constants.items()}
                    out.append(
                        {
                            "kernel": name,
                            "hash": kernel.hash,
                            "num_warps": kernel.metadata.num_warps,
                            "num_stages": kernel.metadata.num_stages,
                            "launch_pdl": getattr(kernel.metadata, "launch_pdl", None),
                            "constants": constants,
                            "signature": {str(k): str(v) for k, v in kernel.src.signature.items()},
                            "divisible": sorted(names[k[0]] for k, v in kernel.src.attrs.items() if v),
                        }
                    )
        sizes = self.engine.vllm_config.compilation_config.cudagraph_capture_sizes
        return {"kernels": out, "sizes": list(sizes or ())}


@torch.no_grad()
def fill_weights(model: torch.nn.Module) -> None:
    """Values that look like a checkpoint's: the engine's dummy fp8 weights are nearly all 0, its norms too.

    Zeros run faster than real values on a GPU, and gates that tie send every token to the same experts.
    """
    generator = torch.Generator(device="cuda").manual_seed(0)
    for name, param in model.named_parameters():
        if name.endswith("norm.weight"):
            param.fill_(1.0)
        elif name.endswith("gate.weight"):
            param.normal_(generator=generator)
        elif param.dtype == torch.float8_e4m3fn:
            for part in param.data if param.ndim == 3 else [param.data]:
                part.copy_(torch.randn(part.shape, device=part.device, generator=generator))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--router", choices=("table", "gates"), default="table")
    parser.add_argument("--kv-gib", type=float, default=4.0)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--max-seqs", type=int, default=256)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--no-shipped", action="store_true")
    begin = time.perf_counter()
    engine = Engine(parser.parse_args())
    print("RESULT " + json.dumps({"start_s": time.perf_counter() - begin, "version": vllm.__version__}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if (do := command.pop("do")) == "quit":
            break
        print("RESULT " + json.dumps(getattr(engine, do)(**command)), flush=True)


if __name__ == "__main__":
    main()
