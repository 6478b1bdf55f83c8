"""Tree attention by FlashAttention-4."""
