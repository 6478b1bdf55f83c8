"""A model of Qwen3.5's shape at random for `gpu_hybrid.py`: three layers of gated delta net to one of attention.

Its configuration, the model, what a step of it costs in floating-point operations, and its layers with a state on
samples end to end by flash-linear-attention, which transformers alone does not run (its convolution wants another
package).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

CHUNK = 64  # tokens that the chunk form of the scan works on together


def hybrid_config(layers: int = 24, tiny: bool = False) -> Any:
    """24 layers of width 2048: 1.9 B parameters, half a billion of them in the tied embedding."""
    sizes: dict[str, Any] = {
        "vocab_size": 248_320, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }  # fmt: skip
    if tiny:
        sizes |= {
            "vocab_size": 151_936, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        }  # fmt: skip
    kinds = [("full_attention" if at % 4 == 3 else "linear_attention") for at in range(layers)]
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    return Qwen3_5TextConfig(
        **sizes, num_hidden_layers=layers, layer_types=kinds, linear_conv_kernel_dim=4, tie_word_embeddings=True,
        max_position_embeddings=262_144, rope_parameters=rope,
    )  # fmt: skip


def make_model(device: str, layers: int = 24, tiny: bool = False) -> Any:
    """The model in bfloat16, every layer checkpointed, in training mode."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3_5ForCausalLM._from_config(
            hybrid_config(layers, tiny), attn_implementation="treepack", dtype=torch.bfloat16
        )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def flops(config: Any, tokens: int, pairs: int, rows: int) -> dict[str, float]:
    """Floating-point operations of a training step with every layer checkpointed, the head computed twice, by part.

    Products of weights and scans: forward, again in the recomputation, twice backward. Attention as `model_rows.flops`.
    A scan, per token and head: three products with the state, and in the chunk three with keys and two with values.
    """
    width, size = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    attention_layers = sum(kind == "full_attention" for kind in config.layer_types)
    scan_layers = config.num_hidden_layers - attention_layers
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    k, v = config.linear_key_head_dim, config.linear_value_head_dim
    linear = 3 * width * config.intermediate_size * config.num_hidden_layers
    linear += attention_layers * width * size * (3 * heads + 2 * kv_heads)  # a gate beside each query head
    linear += scan_layers * width * (2 * keys + 3 * values + 2 * config.linear_num_value_heads)
    scan = config.linear_num_value_heads * (6 * k * v + 2 * CHUNK * (3 * k + 2 * v))
    convolution = 2 * config.linear_conv_kernel_dim * (2 * keys + values)
    return {
        "linear": 4.0 * 2 * (linear * tokens + width * config.vocab_size * rows),
        "attention": 4.5 * 4 * size * heads * attention_layers * pairs,
        "scan": 4.0 * scan_layers * (scan + convolution) * tokens,
    }


def run_samples_end_to_end() -> None:
    """Lets the layers with a state run samples end to end where `sample_cu` (S + 1,) comes through model(...): by
    flash-linear-attention's convolution and scan with `cu_seqlens`.

    Raises:
        ModuleNotFoundError: flash-linear-attention is not installed.
    """
    from fla.modules.causal_conv1d.ops import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    module = sys.modules[Qwen3_5ForCausalLM.__module__]
    conv_before, scan_before = module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule

    def convolution(x: Any, weight: Any, bias: Any = None, activation: Any = None, **kwargs: Any) -> Any:
        cu = kwargs.get("sample_cu")
        if cu is None:
            return conv_before(x, weight, bias, activation=activation, **kwargs)
        return causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation, cu_seqlens=cu)[0].transpose(1, 2)

    def scan(query: Any, key: Any, value: Any, **kwargs: Any) -> Any:
        cu = kwargs.get("sample_cu")
        if cu is None:
            return scan_before(query, key, value, **kwargs)
        gates = kwargs["g"], kwargs["beta"]
        return chunk_gated_delta_rule(query, key, value, *gates, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)

    module.causal_conv1d_fn, module.torch_chunk_gated_delta_rule = convolution, scan
