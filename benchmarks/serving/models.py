"""Architectures that are served with made-up weights: nothing is downloaded.

Every one is a Qwen3-MoE for the engine, as that is the plainest decoder with routed experts that both engines
know. ``qwen3-30b`` is the whole model. The others are slices: the MoE layer of another model, at the sizes
that one rank of a tensor-parallel server has, in so few decoder layers that one GPU holds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moeopt.core.shape import MoEShape

BLOCK = (128, 128)


@dataclass(frozen=True)
class ServedModel:
    """A decoder with routed experts in every layer.

    Attributes:
        layers: Decoder layers.
        hidden: Hidden size, K.
        heads: Query heads on this GPU.
        kv_heads: Key and value heads on this GPU.
        head_dim: Size of a head.
        experts: Routed experts, E.
        top_k: Experts per token.
        intermediate: Expert intermediate size on this GPU, N.
        note: What it is.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    intermediate: int
    note: str
    vocabulary: int = 151_936

    def shape(self, dtype: str) -> MoEShape:
        """The MoE layer: ``bf16``, or ``fp8`` in blocks of 128 x 128."""
        layer = self.experts, self.top_k, self.hidden, self.intermediate
        return MoEShape(*layer, "fp8_w8a8", BLOCK) if dtype == "fp8" else MoEShape(*layer)

    def config(self, dtype: str, layers: int) -> dict[str, Any]:
        """What stands in the model's config.json."""
        config: dict[str, Any] = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "torch_dtype": "bfloat16",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "max_position_embeddings": 40_960,
            "max_window_layers": layers,
            "moe_intermediate_size": self.intermediate,
            "norm_topk_prob": True,
            "num_attention_heads": self.heads,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": layers,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
            "router_aux_loss_coef": 0.001,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocabulary,
        }
        if dtype == "fp8":
            # Gates and head stay in bf16, as in published checkpoints: made-up fp8 gates tie all experts.
            config["quantization_config"] = {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "weight_block_size": list(BLOCK),
                "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(layers))],
            }
        return config


MODELS = {
    "qwen3-30b": ServedModel(48, 2048, 32, 4, 128, 128, 8, 768, "Qwen3-30B-A3B's architecture, whole"),
    "qwen3.5-tp4": ServedModel(
        16, 3072, 8, 1, 256, 256, 8, 256, "slice: the MoE layer of Qwen3.5-122B-A10B at TP 4, plain attention"
    ),
    "glm5-tp8": ServedModel(
        12, 6144, 8, 1, 128, 256, 8, 256, "slice: the MoE layer of GLM-5 at TP 8, plain attention, no shared expert"
    ),
}
