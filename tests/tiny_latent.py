"""What families whose values have another head size than their queries and keys bring beside the sizes of
`tiny_models.py`: multi-head latent attention, and MiMo. Hybrids with it are in `tiny_hybrids.py`."""

from __future__ import annotations

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Queries and keys of 12: 8 without a position and 4 with one, which is what `head_dim` counts. Values of 6.
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "head_dim": 4,
}
DEEPSEEK = MLA | {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
}
LONGCAT = MLA | {
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 16,
    "num_layers": 2,
}
# Queries are scaled by their depth too.
MISTRAL = DEEPSEEK | {
    "head_dim": 12,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0, "original_max_position_embeddings": 4,
        "llama_4_scaling_beta": 0.5,
    },
}  # fmt: skip
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
# No latent: values are projected by themselves. Sinks in the layers with a window, which have twice the K/V heads.
MIMO = WINDOW | {
    "num_key_value_heads": 1,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
DOTS = DEEPSEEK | WINDOW | {"use_dsa": False}
DOTS |= {f"swa_{name}": value for name, value in MLA.items()} | {"swa_head_dim": 12, "swa_num_attention_heads": 4}
LATENT = {
    "deepseek_v2": DEEPSEEK,
    "deepseek_v2_lite": DEEPSEEK | {"q_lora_rank": None},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3_wide": DEEPSEEK | {"v_head_dim": 16},
    "glm4_moe_lite": DEEPSEEK,
    "axk1": DEEPSEEK,
    "youtu": MLA,
    "minicpm3": MLA,
    "longcat_flash": LONGCAT,
    "mistral4": MISTRAL,
    "mimo_v2_flash": MIMO,
    "dots3_note_text": DOTS,
}
#: Families whose keys are chosen by an indexer.
INDEXED = ("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4")


def there(kind: str) -> bool:
    """Whether the installed transformers has a family."""
    return kind in CONFIG_MAPPING or kind.rpartition("_")[0] in CONFIG_MAPPING


RUN = [kind for kind in LATENT if there(kind)]
