"""vLLM's fused MoE kernel, as vLLM launches it.

By feature, on vLLM 0.11 to 0.33: BLOCK_SIZE_K clamped to the scales' blocks, fewer programs where
tokens are fewer than a tile's rows, no sorting where pairs are few among the experts, operands
swapped on compute capability 9, grouped weight-only schemes through its wna16 Triton kernel (vLLM
serves small batches of 4-bit weights with a CUDA kernel instead, which reads no config). With expert
parallelism, vLLM 0.11 gives pairs of other ranks' experts tiles that write zeros. Later versions leave
those pairs out of the alignment and their rows unwritten, but for activations that are scaled per
tensor: such a scale is taken over all rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape, Role
from moeopt.kernels.engine import EngineKernel, LaunchContext

if TYPE_CHECKING:
    from torch import Tensor

    from moeopt.engines.module import KernelNames
    from moeopt.kernels.layer import Layer, RoutedBatch

# vLLM leaves sorting out where pairs times this are not more than the experts.
_SPARSITY: Final = 4


class VllmKernel(EngineKernel):
    """The kernel that ``--moe-backend triton`` serves with."""

    name = "vllm"

    @classmethod
    def stand_ins(cls, context: LaunchContext) -> Mapping[str, Any]:
        return {
            "init_logger": lambda _: _Silent(),
            "current_platform": _Platform(context),
            "enable_swap_ab": lambda m, n: context.capability == (9, 0) and m < 64 <= n,
            "resolve_moe_use_td": lambda: False,
            "warn_if_moe_use_td_ineffective": lambda *_, **__: None,
            "set_triton_allocator": lambda *_: None,
        }

    @classmethod
    def overrides(cls) -> Mapping[str, Any]:
        return {"should_moe_wna16_use_cuda": lambda *_, **__: False}

    def launching_function(self, module: KernelNames, shape: MoEShape) -> str:
        wanted = "invoke_fused_moe_wna16_triton_kernel" if shape.group_size else "invoke_fused_moe_triton_kernel"
        return wanted if module.get(wanted) else "invoke_fused_moe_kernel"

    def illegal_reason(self, config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec) -> str | None:
        if config.use_tma:
            return "USE_TMA is set: vLLM's kernel takes no such key"
        if shape.block_shape and config.block_size_k > min(shape.block_shape):
            return f"BLOCK_SIZE_K {config.block_size_k} is launched as {min(shape.block_shape)}: vLLM clamps it"
        return super().illegal_reason(config, shape, role, gpu)

    def skips_remote_experts(self, shape: MoEShape) -> bool:
        scale_of_all_rows = shape.spec.compute == "fp8" and shape.scales == "tensor"
        return shape.ep_size > 1 and not scale_of_all_rows and _names(self.source.path, "ignore_invalid_experts")

    def launch_values(
        self, layer: Layer, role: Role, batch: RoutedBatch, config: LaunchConfig, out: Tensor
    ) -> dict[str, Any]:
        values = self.common_values(layer, role, batch, config, out)
        # The key is missing in tuned files and every kernel of vLLM's takes it.
        values["config"]["SPLIT_K"] = 1
        # Versions with this function launch from ``TritonExperts.apply``, which gives the first projection none.
        if role == "up" and _names(self.source.path, "invoke_fused_moe_triton_kernel"):
            values["topk_weights"] = None
        sorted_ids, expert_ids, num_padded = self._assignment(layer.shape, batch, config.block_size_m)
        return {
            **values,
            "sorted_token_ids": sorted_ids,
            "expert_ids": expert_ids,
            "num_tokens_post_padded": num_padded,
            "B_bias": None,
        }

    def _assignment(self, shape: MoEShape, batch: RoutedBatch, block_m: int) -> tuple[Tensor | None, Tensor, Tensor]:
        import torch

        from moeopt.kernels.engine_align import align_to, aligned_rows

        names, pairs = self.arg_names(), batch.num_pairs
        unsorted = "naive_block_assignment" in names
        if unsorted and shape.ep_size == 1 and not shape.group_size and pairs * _SPARSITY <= shape.num_experts:
            used = torch.full((1,), pairs * block_m, dtype=torch.int32, device=batch.topk_ids.device)
            return None, batch.topk_ids.view(-1), used
        # All ranks' experts are aligned here.
        experts = shape.num_experts * shape.ep_size
        rows = aligned_rows(pairs, experts, block_m, few_pairs_rule=unsorted)
        skip = self.skips_remote_experts(shape)
        return align_to(batch.topk_ids, shape.num_experts, block_m, rows, skip_absent=skip)


@functools.cache
def _names(path: Path, word: str) -> bool:
    """Whether this version's kernel file has a feature, told by a name in it."""
    return word in path.read_text(encoding="utf-8")


class _Platform:
    """vLLM's ``current_platform`` while a launch is recorded."""

    simple_compile_backend = "inductor"

    def __init__(self, context: LaunchContext) -> None:
        self._context = context

    def is_cuda(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_device_capability"):
            return lambda wanted, *_: self._context.capability == _pair(wanted)
        if name.startswith("has_device_capability"):
            return lambda wanted, *_: self._context.capability >= _pair(wanted)
        if name.startswith("is_"):
            return lambda: False
        raise AttributeError(name)


def _pair(capability: int | tuple[int, int]) -> tuple[int, int]:
    return capability if isinstance(capability, tuple) else divmod(capability, 10)


class _Silent:
    """A logger that the engine's launch may call."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None
