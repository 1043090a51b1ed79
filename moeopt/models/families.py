"""The families of MoE models: which key of ``config.json`` holds what, and what SGLang fuses.

Keys as in the model classes of SGLang 0.5.23 and vLLM 0.33.0 and in transformers' config classes. One row
per family; :func:`moeopt.models.derive.shape_from_model` knows no model by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Fusion:
    """When SGLang appends the shared experts to the routed ones (E and top_k grow by their number).

    From ``shared_experts_fusion_disable_reason`` of SGLang 0.5.23's model classes, for CUDA, no
    all-to-all backend and default flags. vLLM fuses none on CUDA.

    Attributes:
        architectures: Fused for these only; empty for all of the family.
        routed: Fused for these numbers of routed experts only; empty for all.
        shared: Fused for this number of shared experts only; None for any.
        under_ep: Whether it is fused with expert parallelism too.
        int4: Whether it is fused where the routed experts are int4.
        same_size: Whether the shared expert must be of a routed expert's size.
    """

    architectures: tuple[str, ...] = ()
    routed: tuple[int, ...] = ()
    shared: int | None = 1
    under_ep: bool = False
    int4: bool = True
    same_size: bool = False

    def obstacle(
        self, *, architecture: str | None, routed: int, shared: int, same_size: bool, ep: int, int4: bool
    ) -> str | None:
        """Why the shared experts are not fused, or None."""
        if self.architectures and architecture is not None and architecture not in self.architectures:
            return f"fused only for {' and '.join(self.architectures)}"
        if self.routed and routed not in self.routed:
            return f"fused only with {' or '.join(map(str, self.routed))} routed experts"
        if self.shared is not None and shared != self.shared:
            return f"fused only with {self.shared} shared expert"
        if self.same_size and not same_size:
            return "fused only where the shared expert has a routed expert's size"
        if ep > 1 and not self.under_ep:
            return "not fused with expert parallelism"
        if int4 and not self.int4:
            return "not fused where the routed experts are int4"
        return None

    def __str__(self) -> str:
        parts = [f"{' or '.join(map(str, self.routed))} routed"] if self.routed else []
        if self.architectures:
            parts.append(", ".join(self.architectures))
        if self.same_size:
            parts.append("equal sizes")
        if not self.under_ep:
            parts.append("ep 1")
        if not self.int4:
            parts.append("not int4")
        return f"fused ({'; '.join(parts)})" if parts else "fused"


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        name: What people call it.
        architectures: Values of ``architectures[0]``.
        model_types: Values of ``model_type``, the root's or the language part's.
        experts: Dotted keys of the number of routed experts, in order of preference.
        top_k: The same for experts per token.
        intermediate: The same for an expert's intermediate size.
        hidden: The same for the size that experts read and write.
        shared: The same for the number of shared experts.
        shared_size: Key of the shared expert's intermediate size, where it alone says that there is one.
        fusion: When SGLang fuses the shared experts; None for never.
        gated: Whether experts have a gate projection.
        per_layer: What a list of values means: ``uniform`` (one per layer, all must agree) or
            ``first`` (one per kind of expert, the text's first).
        examples: Public models.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    experts: tuple[str, ...]
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    intermediate: tuple[str, ...] = ("moe_intermediate_size",)
    hidden: tuple[str, ...] = ("hidden_size",)
    shared: tuple[str, ...] = ()
    shared_size: str | None = None
    fusion: Fusion | None = None
    gated: bool = True
    per_layer: str = "uniform"
    examples: tuple[str, ...] = ()


_DEEPSEEK_FUSION: Final = Fusion(("DeepseekV3ForCausalLM",), routed=(256,), int4=False)
# Kimi's wrappers ask for their text_config, whose architecture is DeepSeek's.
_KIMI_FUSION: Final = Fusion(routed=(256,), int4=False)
_ROUTED: Final = ("n_routed_experts",)
_LOCAL: Final = ("num_local_experts", "num_experts")
_NUM: Final = ("num_experts", "num_local_experts")
_DENSE_NAME: Final = ("intermediate_size",)

FAMILIES: Final[tuple[Family, ...]] = (
    Family(
        "Mixtral", ("MixtralForCausalLM",), ("mixtral",), _LOCAL, intermediate=_DENSE_NAME,
        examples=("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x22B-Instruct-v0.1"),
    ),
    Family(
        "DBRX", ("DbrxForCausalLM",), ("dbrx",), ("ffn_config.moe_num_experts",),
        top_k=("ffn_config.moe_top_k",), intermediate=("ffn_config.ffn_hidden_size",), hidden=("d_model",),
        examples=("databricks/dbrx-instruct",),
    ),
    Family(
        "Jamba", ("JambaForCausalLM",), ("jamba",), _NUM, intermediate=_DENSE_NAME,
        examples=("ai21labs/AI21-Jamba-Mini-1.6",),
    ),
    Family(
        "Qwen2 MoE", ("Qwen2MoeForCausalLM",), ("qwen2_moe",), ("num_experts",),
        shared_size="shared_expert_intermediate_size", examples=("Qwen/Qwen2-57B-A14B-Instruct",),
    ),
    Family(
        "Qwen3 MoE", ("Qwen3MoeForCausalLM",), ("qwen3_moe",), _NUM,
        examples=("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"),
    ),
    Family(
        "Qwen3-VL MoE", ("Qwen3VLMoeForConditionalGeneration",), ("qwen3_vl_moe", "qwen3_vl_moe_text"), _NUM,
        examples=("Qwen/Qwen3-VL-235B-A22B-Instruct",),
    ),
    Family(
        "Qwen3-Omni MoE", ("Qwen3OmniMoeForConditionalGeneration",), ("qwen3_omni_moe", "qwen3_omni_moe_text"), _NUM,
        examples=("Qwen/Qwen3-Omni-30B-A3B-Instruct",),
    ),
    Family(
        "Qwen3-Next", ("Qwen3NextForCausalLM",), ("qwen3_next",), ("num_experts",),
        shared_size="shared_expert_intermediate_size", fusion=Fusion(under_ep=True, same_size=True),
        examples=("Qwen/Qwen3-Next-80B-A3B-Instruct",),
    ),
    Family(
        "Qwen3.5 MoE", ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
        ("qwen3_5_moe", "qwen3_5_moe_text"), ("num_experts",), shared_size="shared_expert_intermediate_size",
        examples=("Qwen/Qwen3.5-122B-A10B", "Qwen/Qwen3.5-397B-A17B"),
    ),
    Family(
        "DeepSeek V2", ("DeepseekV2ForCausalLM", "DeepseekVLV2ForCausalLM", "DeepseekOCRForCausalLM"),
        ("deepseek_v2", "deepseek_vl_v2"), _ROUTED, shared=("n_shared_experts",),
        examples=("deepseek-ai/DeepSeek-V2", "deepseek-ai/DeepSeek-V2-Lite"),
    ),
    Family(
        "DeepSeek V3, V3.2", ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"), ("deepseek_v3", "deepseek_v32"),
        _ROUTED, shared=("n_shared_experts",), fusion=_DEEPSEEK_FUSION,
        examples=("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3.2"),
    ),
    Family(
        "DeepSeek V4", ("DeepseekV4ForCausalLM",), ("deepseek_v4",), _ROUTED, shared=("n_shared_experts",),
        intermediate=("moe_intermediate_size",), examples=("deepseek-ai/DeepSeek-V4-Flash",),
    ),
    Family(
        "GLM-4.5, 4.6, 4.7", ("Glm4MoeForCausalLM",), ("glm4_moe",), _ROUTED, shared=("n_shared_experts",),
        fusion=Fusion(shared=None), examples=("zai-org/GLM-4.5", "zai-org/GLM-4.6", "zai-org/GLM-4.7"),
    ),
    Family(
        "GLM-4.7-Flash", ("Glm4MoeLiteForCausalLM",), ("glm4_moe_lite",), _ROUTED, shared=("n_shared_experts",),
        fusion=Fusion(), examples=("zai-org/GLM-4.7-Flash",),
    ),
    Family(
        "GLM-4.5V", ("Glm4vMoeForConditionalGeneration",), ("glm4v_moe", "glm4v_moe_text"), _ROUTED,
        shared=("n_shared_experts",), fusion=Fusion(), examples=("zai-org/GLM-4.5V",),
    ),
    Family(
        "GLM-5", ("GlmMoeDsaForCausalLM",), ("glm_moe_dsa",), _ROUTED, shared=("n_shared_experts",),
        fusion=Fusion(("GlmMoeDsaForCausalLM",), routed=(256,), int4=False), examples=("zai-org/GLM-5",),
    ),
    Family(
        "GLM-5 next", ("Glm5NextForConditionalGeneration",), ("glm5_next", "glm5_next_text"), _ROUTED,
        shared=("n_shared_experts",), fusion=Fusion(),
    ),
    Family(
        "Kimi K2", ("DeepseekV3ForCausalLM",), ("kimi_k2",), _ROUTED, shared=("n_shared_experts",),
        fusion=_DEEPSEEK_FUSION, examples=("moonshotai/Kimi-K2-Instruct",),
    ),
    Family(
        "Kimi K2.5, Kimi VL", ("KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration"),
        ("kimi_k25", "kimi_vl"), _ROUTED, shared=("n_shared_experts",), fusion=_KIMI_FUSION,
        examples=("moonshotai/Kimi-K2.5", "moonshotai/Kimi-VL-A3B-Instruct"),
    ),
    Family(
        "Kimi Linear", ("KimiLinearForCausalLM",), ("kimi_linear",), ("num_experts", "num_local_experts"),
        top_k=("num_experts_per_token", "num_experts_per_tok"), shared=("num_shared_experts",),
        examples=("moonshotai/Kimi-Linear-48B-A3B-Instruct",),
    ),
    Family(
        "Kimi K3", ("KimiK3ForConditionalGeneration", "KimiK3LinearForCausalLM"), ("kimi_k3",),
        ("num_experts", "num_local_experts"), top_k=("num_experts_per_token", "num_experts_per_tok"),
        hidden=("routed_expert_hidden_size", "hidden_size"), shared=("num_shared_experts",),
    ),
    Family(
        "LongCat-Flash", ("LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"), ("longcat_flash",), _ROUTED,
        top_k=("moe_topk", "num_experts_per_tok"), intermediate=("expert_ffn_hidden_size", "moe_intermediate_size"),
        examples=("meituan-longcat/LongCat-Flash-Chat",),
    ),
    Family(
        "MiMo-V2", ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM"),
        ("mimo_v2_flash", "mimo_v2"), _ROUTED, examples=("XiaomiMiMo/MiMo-V2-Flash",),
    ),
    Family(
        "MiniMax M1, Text-01", ("MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM", "MiniMaxForCausalLM"),
        ("minimax", "minimax_text_01", "minimax_m1"), ("num_local_experts",), intermediate=_DENSE_NAME,
        examples=("MiniMaxAI/MiniMax-M1-80k",),
    ),
    Family(
        "MiniMax M2", ("MiniMaxM2ForCausalLM",), ("minimax_m2",), ("num_local_experts",), intermediate=_DENSE_NAME,
        examples=("MiniMaxAI/MiniMax-M2",),
    ),
    Family(
        "MiniMax M3", ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM"),
        ("minimax_m3_vl", "minimax_m3", "minimax_m3_vl_text"), ("num_local_experts",), intermediate=_DENSE_NAME,
        shared=("n_shared_experts",), fusion=Fusion(), examples=("MiniMaxAI/MiniMax-M3",),
    ),
    Family(
        "Llama 4", ("Llama4ForConditionalGeneration", "Llama4ForCausalLM"), ("llama4", "llama4_text"),
        ("num_local_experts",), intermediate=_DENSE_NAME, examples=("meta-llama/Llama-4-Scout-17B-16E-Instruct",),
    ),
    Family(
        "gpt-oss", ("GptOssForCausalLM",), ("gpt_oss",), _LOCAL,
        top_k=("num_experts_per_tok", "experts_per_token"), intermediate=_DENSE_NAME,
        examples=("openai/gpt-oss-120b", "openai/gpt-oss-20b"),
    ),
    Family(
        "Grok", ("Grok1ForCausalLM", "Grok1ModelForCausalLM"), ("grok-1", "grok", "git"), ("num_local_experts",),
        intermediate=("moe_intermediate_size", "intermediate_size"), examples=("xai-org/grok-2",),
    ),
    Family(
        "Bailing, Ling, Ring", (
            "BailingMoeForCausalLM", "BailingMoEForCausalLM", "BailingMoeV2ForCausalLM", "BailingMoeV2_5ForCausalLM",
            "BailingMoeLinearForCausalLM", "BailingMoELinearForCausalLM", "BailingMoeLinearV2ForCausalLM",
        ), ("bailing_moe", "bailing_moe_v2", "bailing_moe_linear", "bailing_hybrid"), _NUM,
        shared=("num_shared_experts",), examples=("inclusionAI/Ling-flash-2.0", "inclusionAI/Ring-1T"),
    ),
    Family(
        "Bailing V3", ("BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
        ("bailing_moe_v3",), _NUM, shared=("num_shared_experts",),
        fusion=Fusion(("BailingMoeV3ForCausalLM",), under_ep=True),
    ),
    Family(
        "Hunyuan MoE", ("HunYuanMoEV1ForCausalLM",), ("hunyuan_v1_moe", "hunyuan"), ("num_experts",),
        top_k=("moe_topk",), intermediate=("moe_intermediate_size", "intermediate_size"),
        shared=("num_shared_expert",), examples=("tencent/Hunyuan-A13B-Instruct",),
    ),
    Family(
        "Hunyuan V3", ("HYV3ForCausalLM",), ("hy_v3",), ("num_experts",),
        intermediate=("moe_intermediate_size", "expert_hidden_dim"), shared=("num_shared_experts",),
    ),
    Family(
        "Nemotron-H", ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Nano_VL_V2"), ("nemotron_h",),
        _ROUTED, hidden=("moe_latent_size", "hidden_size"), shared=("n_shared_experts",), gated=False,
        examples=("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",),
    ),
    Family(
        "Gemma 4", ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"), ("gemma4", "gemma4_text"),
        ("num_experts",), top_k=("top_k_experts",), examples=("google/gemma-4-26B-A4B-it",),
    ),
    Family("LFM2 MoE", ("Lfm2MoeForCausalLM",), ("lfm2_moe",), ("num_experts",), examples=("LiquidAI/LFM2-8B-A1B",)),
    Family(
        "Ernie 4.5", ("Ernie4_5_MoeForCausalLM",), ("ernie4_5_moe",), ("moe_num_experts",), top_k=("moe_k",),
        shared=("moe_num_shared_experts",),
        examples=("baidu/ERNIE-4.5-21B-A3B-PT", "baidu/ERNIE-4.5-300B-A47B-PT"),
    ),
    Family(
        "Ernie 4.5 VL", ("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VLMoeForCausalLM"),
        ("ernie4_5_moe_vl", "ernie4_5_vl_moe", "ernie4_5_vl_moe_text"), ("moe_num_experts",), top_k=("moe_k",),
        shared=("moe_num_shared_experts",), per_layer="first", examples=("baidu/ERNIE-4.5-VL-28B-A3B-PT",),
    ),
    Family(
        "Granite MoE", (
            "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteMoeHybridForCausalLM",
            "GraniteMoeSWAForCausalLM",
        ), ("granitemoe", "granitemoeshared", "granitemoehybrid", "granitemoe_swa"), ("num_local_experts",),
        intermediate=_DENSE_NAME,
        examples=("ibm-granite/granite-3.1-3b-a800m-instruct", "ibm-granite/granite-4.0-h-small"),
    ),
    Family(
        "OLMoE", ("OlmoeForCausalLM",), ("olmoe",), _NUM, intermediate=_DENSE_NAME,
        examples=("allenai/OLMoE-1B-7B-0924",),
    ),
    Family(
        "Phi-3.5-MoE", ("PhiMoEForCausalLM", "PhimoeForCausalLM"), ("phimoe",), ("num_local_experts",),
        intermediate=_DENSE_NAME, examples=("microsoft/Phi-3.5-MoE-instruct",),
    ),
    Family(
        "Step", (
            "Step3VLForConditionalGeneration", "Step3TextForCausalLM", "Step3p5ForCausalLM",
            "Step3p7ForConditionalGeneration",
        ), ("step3_vl", "step3_text", "step3p5", "step3p7"), ("moe_num_experts", "n_routed_experts"),
        top_k=("moe_top_k", "num_experts_per_tok"), examples=("stepfun-ai/step3", "stepfun-ai/Step-3.5-Flash"),
    ),
    Family(
        "Mistral Large 3", ("MistralLarge3ForCausalLM",), ("mistral_large_3", "mistral4"),
        ("n_routed_experts", "moe.num_experts"),
        top_k=("num_experts_per_tok", "moe.num_experts_per_tok"),
        intermediate=("moe_intermediate_size", "moe.expert_hidden_dim"), hidden=("hidden_size", "dim"),
        shared=("n_shared_experts", "moe.num_shared_experts"), fusion=_DEEPSEEK_FUSION,
        examples=("mistralai/Mistral-Large-3-675B-Instruct-2512",),
    ),
)  # fmt: skip

# What is probed, in this order, where no row fits.
GENERIC: Final = Family(
    "not in the table",
    (),
    (),
    experts=(
        "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts", "num_routed_experts",
        "ffn_config.moe_num_experts", "moe.num_experts",
    ),
    top_k=(
        "num_experts_per_tok", "num_experts_per_token", "num_selected_experts", "experts_per_token", "moe_top_k",
        "moe_topk", "moe_k", "top_k_experts", "ffn_config.moe_top_k", "moe.num_experts_per_tok",
    ),
    intermediate=(
        "moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size", "expert_hidden_dim",
        "moe_ffn_hidden_size", "ffn_config.ffn_hidden_size", "moe.expert_hidden_dim",
    ),
    hidden=("hidden_size", "d_model", "n_embd", "dim"),
    shared=("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    shared_size="shared_expert_intermediate_size",
)  # fmt: skip

EXPERT_KEYS: Final[tuple[str, ...]] = tuple(
    dict.fromkeys(key for family in (*FAMILIES, GENERIC) for key in family.experts)
)


def find_family(architecture: str | None, model_types: tuple[str, ...]) -> Family | None:
    """The row of a model: both names fit, else the architecture, else the model type; None where none fits."""
    by_architecture = [f for f in FAMILIES if architecture in f.architectures]
    by_type = [f for f in FAMILIES if set(f.model_types) & set(model_types)]
    both = [f for f in by_architecture if f in by_type]
    for found in (both, by_architecture, by_type):
        if found:
            return found[0]
    return None


TABLE_HEADER: Final = (
    "family",
    "architectures",
    "experts",
    "top_k",
    "intermediate",
    "shared expert in SGLang",
    "example",
)


def family_table() -> tuple[tuple[str, ...], ...]:
    """One row of text per family, under :data:`TABLE_HEADER`."""
    rows = []
    for family in FAMILIES:
        shared = str(family.fusion) if family.fusion else "apart" if family.shared or family.shared_size else "-"
        rows.append(
            (
                family.name,
                ", ".join(family.architectures),
                " | ".join(family.experts),
                " | ".join(family.top_k),
                " | ".join(family.intermediate),
                shared,
                ", ".join(family.examples),
            )
        )
    return tuple(rows)
