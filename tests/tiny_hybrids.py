"""What families with layers that carry a state bring beside the sizes of `tiny_models.py`."""

from __future__ import annotations

import inspect

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ALTERNATE = ["linear_attention", "full_attention"]
EXPERTS = MOE | {"shared_expert_intermediate_size": 16}
# Values smaller than keys, two heads of values to one of keys.
DELTA = {
    "layer_types": ALTERNATE,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
KIMI = MOE | {
    "layer_types": ALTERNATE,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
}
BAILING = KIMI | {"num_local_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 12, "head_dim": 4}
CONVOLUTION = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
# Chunks shorter than the samples.
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}
ZAMBA = {
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "attention_head_dim": 16,
    "num_mem_blocks": 1,
    "n_mamba_heads": 4,
    "mamba_d_state": 8,
    "mamba_ngroups": 2,
    "mamba_headdim": 16,
    "mamba_expand": 2,
    "chunk_size": 8,
}
HYBRIDS = {
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "olmo_hybrid": DELTA | {"linear_allow_neg_eigval": True},
    "kimi_linear": KIMI,
    "bailing_hybrid": BAILING,
    "lfm2": CONVOLUTION,
    "lfm2_moe": CONVOLUTION | MOE | {"num_dense_layers": 1},
    "nemotron_h": NEMOTRON,
    "falcon_h1": MAMBA | {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA
    | {"layer_types": ALTERNATE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    "zamba2": ZAMBA,
    "lfm3": CONVOLUTION,
    "lara_mini": DELTA | EXPERTS,
}
#: In transformers 5.17 the layers of LFM2 are handed `seq_idx` and no other keyword argument.
OLD_LFM2 = "seq_idx" in inspect.signature(Lfm2ShortConv.forward).parameters
#: Families that the installed transformers has, and that run there.
RUN = [kind for kind in HYBRIDS if kind in CONFIG_MAPPING and not (OLD_LFM2 and kind.startswith("lfm2"))]
