from __future__ import annotations

from moeopt.models import FAMILIES, family_table
from moeopt.models.families import TABLE_HEADER, Fusion, find_family


def test_each_family_of_the_issue_has_a_row() -> None:
    text = " ".join(" ".join(row) for row in family_table())
    for name in (
        "Mixtral", "DBRX", "Jamba", "Qwen2", "Qwen3", "Qwen3-Next", "Qwen3-VL", "Qwen3.5", "DeepSeek V2", "DeepSeek V3",
        "V3.2", "DeepSeek V4", "GLM-4.5", "4.6", "4.7", "GLM-5", "Kimi K2", "Kimi VL", "Kimi Linear", "MiniMax M2",
        "MiniMax M3", "Llama 4", "gpt-oss", "Grok", "Bailing", "Ling", "Ring", "Hunyuan", "Nemotron-H", "Gemma 4",
        "LFM2", "Ernie 4.5", "Granite", "OLMoE", "Phi-3.5-MoE", "Step", "Mistral Large 3",
    ):  # fmt: skip
        assert name in text, name


def test_table_has_one_row_of_text_per_family() -> None:
    rows = family_table()
    assert len(rows) == len(FAMILIES)
    assert all(len(row) == len(TABLE_HEADER) and all(isinstance(cell, str) for cell in row) for row in rows)


def test_names_are_unique_and_no_architecture_is_in_two_rows_of_one_type() -> None:
    assert len({f.name for f in FAMILIES}) == len(FAMILIES)
    pairs = [(a, t) for f in FAMILIES for a in f.architectures for t in f.model_types]
    assert len(pairs) == len(set(pairs))


def test_find_family_prefers_both_names_then_the_architecture() -> None:
    def name(architecture: str | None, *types: str) -> str | None:
        family = find_family(architecture, types)
        return family.name if family else None

    assert name("DeepseekV3ForCausalLM", "deepseek_v3") == "DeepSeek V3, V3.2"
    assert name("DeepseekV3ForCausalLM", "kimi_k2") == "Kimi K2"
    assert name("DeepseekV3ForCausalLM") == "DeepSeek V3, V3.2"
    assert name("MixtralForCausalLM", "qwen3_moe") == "Mixtral"
    assert name("SomethingNew", "qwen3_moe") == "Qwen3 MoE"
    assert name(None, "glm_moe_dsa") == "GLM-5"
    assert name("SomethingNew", "new") is None
    assert name(None) is None


def test_fusion_obstacles_one_by_one() -> None:
    fusion = Fusion(("A",), routed=(256,), shared=1, int4=False, same_size=True)
    ok = {"architecture": "A", "routed": 256, "shared": 1, "same_size": True, "ep": 1, "int4": False}

    def obstacle(**changes: object) -> str | None:
        return fusion.obstacle(**{**ok, **changes})  # type: ignore[arg-type]  # one value at a time is changed

    assert obstacle() is None
    assert obstacle(architecture=None) is None
    for change in (
        {"architecture": "B"}, {"routed": 384}, {"shared": 2}, {"same_size": False}, {"ep": 2}, {"int4": True},
    ):  # fmt: skip
        assert obstacle(**change), change
    assert "256 routed" in str(fusion) and "not int4" in str(fusion)
