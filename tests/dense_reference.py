"""Eager attention of unpacked rows in the dtype of its inputs: the independent side of parity tests in float64.

transformers' own eager attention takes the softmax in float32. Importing this registers "dense64", which reads nothing
of treepack: causal by index, window by index, softcap, sinks. Rows are single samples without padding.
"""

import torch
from transformers import AttentionInterface


def dense_attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    """query (B, H, L, D), key and value (B, H_kv, L, D) -> (output (B, L, H, D), None)."""
    assert attention_mask is None
    assert not dropout
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if kwargs.get("softcap") is not None:
        scores = kwargs["softcap"] * torch.tanh(scores / kwargs["softcap"])
    index = torch.arange(length, device=query.device)
    distance = index[:, None] - index[None, :]
    visible = distance >= 0
    if kwargs.get("sliding_window") is not None:
        visible &= distance < kwargs["sliding_window"]
    scores = scores.masked_fill(~visible, -torch.inf)
    if kwargs.get("s_aux") is not None:
        sinks = kwargs["s_aux"].to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        probabilities = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return (probabilities @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("dense64", dense_attention)
