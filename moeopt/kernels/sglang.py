"""SGLang's fused MoE kernel, as SGLang launches it.

By feature, on SGLang 0.5.5 to 0.5.23: dependent launches on compute capability 9 and more, operands
swapped on compute capability 9 (fp8, BLOCK_SIZE_M < 64 <= BLOCK_SIZE_N), grouped weight-only schemes
through its gptq/awq kernel, activations and weights of the down projection through TMA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from moeopt.core.config import LaunchConfig
from moeopt.core.gpu import GpuSpec
from moeopt.core.shape import MoEShape, Role
from moeopt.errors import UnsupportedShapeError
from moeopt.kernels.engine import EngineKernel, LaunchContext

if TYPE_CHECKING:
    from torch import Tensor

    from moeopt.engines.module import KernelNames
    from moeopt.kernels.layer import Layer, RoutedBatch

_TMA_MAX_BOX: Final = 256
# Functions that quantise activations on the launch path.
_QUANTISING: Final = (
    "scaled_fp8_quant",
    "per_token_group_quant",
    "per_token_group_quant_fp8",
    "sglang_per_token_group_quant_fp8",
    "per_token_quant_int8",
    "per_token_group_quant_int8",
    "sglang_per_token_group_quant_int8",
)


class SglangKernel(EngineKernel):
    """The kernel that ``--moe-runner-backend triton`` serves with."""

    name = "sglang"

    @classmethod
    def stand_ins(cls, context: LaunchContext) -> Mapping[str, Any]:
        quantising = dict.fromkeys(_QUANTISING, context.quantised)
        return {
            **quantising,
            "is_cuda": lambda: True,
            "is_batch_invariant_mode_enabled": lambda: False,
            # SGLang 0.5.6 to 0.5.10 swap operands on an H20 alone.
            "get_device_name": lambda *_: _device_name(),
            "is_sm90_supported": lambda *_: context.capability[0] == 9,
            "is_arch_support_pdl": lambda *_: context.capability[0] >= 9,
        }

    @classmethod
    def overrides(cls) -> Mapping[str, Any]:
        # Weights here are not padded, whatever SGLANG_MOE_PADDING says; no descriptor outlives its launch, or it
        # would keep a layer's weights.
        return {"padding_size": 0, "_B_DESC_CACHE_MAX": 0}

    def launching_function(self, module: KernelNames, shape: MoEShape) -> str:
        return "invoke_fused_moe_kernel"

    def check(self, shape: MoEShape, gpu: GpuSpec) -> None:
        if shape.spec.compute == "int8" and shape.scales == "tensor":
            raise UnsupportedShapeError(
                "SGLang's int8_w8a8 has scales per channel or per block: give per_channel or a block_shape"
            )
        super().check(shape, gpu)

    def illegal_reason(self, config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec) -> str | None:
        reason = super().illegal_reason(config, shape, role, gpu)
        if reason:
            return reason
        block_n = shape.block_shape[0] if shape.block_shape else 0
        if config.block_size_n <= block_n and block_n % config.block_size_n:
            return f"BLOCK_SIZE_N {config.block_size_n} does not divide block_n {block_n}: one scale per tile is read"
        return self._illegal_tma(config, shape, role, gpu) if config.use_tma else None

    def _illegal_tma(self, config: LaunchConfig, shape: MoEShape, role: Role, gpu: GpuSpec) -> str | None:
        if not self.can_use_tma(shape, role):
            return "USE_TMA is set: SGLang loads through TMA in the down projection of block-wise fp8 alone"
        if not gpu.architecture.dependent_launch:
            return f"USE_TMA is set and {gpu.name} has no tensor memory accelerator"
        if max(config.block_size_m, config.block_size_n, config.block_size_k) > _TMA_MAX_BOX:
            return f"USE_TMA is set: a TMA box has at most {_TMA_MAX_BOX} elements along each axis"
        return None

    def can_use_tma(self, shape: MoEShape, role: Role) -> bool:
        # SGLang's kernel asserts block-wise fp8; TMA strides are multiples of 16 bytes.
        return (
            role == "down"
            and shape.spec.compute == "fp8"
            and shape.block_shape is not None
            and shape.reduction(role) % 16 == 0
            and "a_desc" in self.arg_names()
        )

    def space_extras(self, shape: MoEShape, gpu: GpuSpec) -> Sequence[str]:
        tma = gpu.architecture.dependent_launch and self.can_use_tma(shape, "down")
        return ("maxnreg", "USE_TMA") if tma else ("maxnreg",)

    def launch_values(
        self, layer: Layer, role: Role, batch: RoutedBatch, config: LaunchConfig, out: Tensor
    ) -> dict[str, Any]:
        from moeopt.kernels.engine_align import align_to, aligned_rows

        shape, block_m = layer.shape, config.block_size_m
        # One run more, for pairs whose expert is on another GPU. The bound by pairs came with swap_ab.
        rows = aligned_rows(
            batch.num_pairs, shape.num_experts + 1, block_m, few_pairs_rule="swap_ab" in self.arg_names()
        )
        sorted_ids, expert_ids, num_padded = align_to(batch.topk_ids, shape.num_experts, block_m, -(-rows // 4) * 4)
        values = {
            **self.common_values(layer, role, batch, config, out),
            "bias": None,
            "sorted_token_ids": sorted_ids,
            "expert_ids": expert_ids,
            "num_tokens_post_padded": num_padded,
            "filter_expert": shape.ep_size > 1,
        }
        if role == "down":
            values["router_topk"] = shape.top_k
        if config.use_tma and self.can_use_tma(shape, role):
            values |= {"a_use_tma": True, "b_use_tma": True}
            padding = min(batch.num_pairs, shape.num_experts + 1) * (block_m - 1)
            values["A"], values["A_scale"] = _expert_sorted(batch, sorted_ids, batch.num_pairs + padding)
        return values


def _device_name() -> str:
    """Name of the first GPU as the driver has it, without touching CUDA."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except pynvml.NVMLError:
        return "no GPU"


def _expert_sorted(batch: RoutedBatch, sorted_ids: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
    """Activations and scales in the order of the sorted ids, which SGLang's up projection writes for a TMA down."""
    import torch

    tensors = (batch.a, batch.a_scale)
    if sorted_ids.is_meta:
        a, scale = (t if t is None else torch.empty((rows, t.shape[1]), dtype=t.dtype, device="meta") for t in tensors)
    else:
        index = sorted_ids[:rows].clamp_max(batch.num_pairs - 1)
        index = torch.nn.functional.pad(index, (0, rows - index.numel()))
        # Row by row of bytes: indexing is not defined for every 8-bit dtype.
        a, scale = (t if t is None else t.view(torch.uint8)[index.long()].view(t.dtype) for t in tensors)
    assert a is not None
    return a, scale
