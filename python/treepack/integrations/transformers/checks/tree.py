"""What depends on the tree that a Hugging Face model is to run, beside the model: samples longer than its table of
positions, rotary embeddings that follow the longest sample of the row, and places for images.

Read on the host, from the arrays that the tree was packed into: no device is waited for, but for a tree that came to
its device in another way, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....tree.segments import sample_lengths
from ....tree.tree import PackedTree
from .positions import check_length

__all__ = ["check_ids", "check_ranges", "check_tree", "row_is_short", "row_rope"]


# Ids in the config of a model that stand in a sample for what another encoder makes.
_PLACEHOLDERS = [
    f"{what}{of}" for what in ("image", "video", "audio", "speech") for of in ("_token_id", "_token_index")
] + ["image_pad_token_id", "audio_pad_token_id", "image_patch_id"]


def check_tree(model: Any, tree: Any, *, by_range: bool = False) -> None:
    """Raises ValueError where a model that `check_model` passes would be wrong on this tree.

    Args:
        model: a Hugging Face model without its wrappers (what `check_model` returns).
        tree: a `PackedTree`, on any device.
        by_range: whether its ranges run one by one.
    """
    name = type(model).__name__
    if not isinstance(tree, PackedTree):
        raise TypeError(
            f"{name} wants to see the samples of the tree: a PackedTree is needed, not a {type(tree).__name__}"
        )
    if len(tree.cu_ranges) > 2 and not by_range:
        raise ValueError(
            f"the tree was packed with cut=True and has {len(tree.cu_ranges) - 1} ranges; one pass would take all "
            f"of its {tree.num_tokens} positions at once: loop over RangeRunner(model, tree), or pack without cut"
        )
    check_length(name, model, tree)
    rope = row_rope(model.config.get_text_config())
    if rope is not None:
        check_rope(name, *rope, tree)
    places = {}
    config = model.config
    encoders = config.get_text_config() is not config or any(
        getattr(config, f"{what}_config", None) is not None for what in ("vision", "audio", "speech")
    )
    for setting in _PLACEHOLDERS if encoders else ():
        token = getattr(config, setting, None)
        if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
            places[token] = setting
    if places:
        check_placeholders(name, places, tree)


def check_ranges(model: Any, tree: Any, *, parts: int, instead: str) -> None:
    """Raises ValueError where a range of the tree would be computed otherwise than the whole.

    Args:
        parts: how many ranges there are. instead: what to do, for the message.
    """
    rope = row_rope(model.config.get_text_config())
    host = tree.numpy()
    if rope is None or parts < 2:
        return
    longest = int(host.position_ids.max()) + 1
    if not _unscaled(*rope, longest):
        raise ValueError(
            f"{type(model).__name__} has {rope[0]} rotary embeddings, which change above {rope[1]} tokens, and the "
            f"tree has a sample of {longest}: ranges before and behind that place would get different ones; {instead}"
        )


def row_rope(config: Any) -> tuple[str, int] | None:
    """(kind, limit) of rotary embeddings whose frequencies follow the longest sample of the row, or None: "dynamic"
    and "longrope". Linear, YaRN and Llama 3 scaling are the same at any length."""
    for attribute in ("rope_parameters", "rope_scaling"):
        found = getattr(config, attribute, None)
        if not isinstance(found, Mapping):
            continue
        for one in (found, *found.values()):  # some configs have them by type of layer
            kind = (one.get("rope_type") or one.get("type")) if isinstance(one, Mapping) else None
            if not isinstance(kind, str):
                continue
            longest = getattr(config, "max_position_embeddings", None) or 0
            if "dynamic" in kind:
                return kind, longest
            if kind in ("longrope", "su"):
                original = one.get("original_max_position_embeddings")
                return kind, original or getattr(config, "original_max_position_embeddings", None) or longest
    return None


def row_is_short(config: Any, longest: int) -> bool:
    """Whether the rotary embeddings of a row whose longest sample has `longest` tokens are those of each sample."""
    rope = row_rope(config)
    return rope is None or _unscaled(*rope, longest)


def _unscaled(kind: str, limit: int, tokens: int) -> bool:
    """Whether a sample of so many tokens has the frequencies below the limit, which "dynamic" leaves at it and
    "longrope" above it."""
    return tokens < limit if "dynamic" in kind else tokens <= limit


def check_rope(name: str, kind: str, limit: int, tree: Any) -> None:
    """Refuse a tree on which frequencies that follow its longest sample are not those of each sample."""
    host = tree.numpy()
    if not host.num_samples:
        return
    length = sample_lengths(host)
    long, short = int(length.argmax()), int(length.argmin())
    sample = host.sample_index
    if _unscaled(kind, limit, length[long]):
        return
    if "dynamic" in kind:
        raise ValueError(
            f"{name} has {kind} rotary embeddings, whose frequencies follow the longest sample of a row from "
            f"max_position_embeddings = {limit} tokens on; sample {sample[long]} has {length[long]}, so samples would "
            "be computed with the frequencies of another one, or of an earlier call: keep samples below "
            f"{limit} tokens, or run them unpacked"
        )
    if _unscaled(kind, limit, length[short]):
        raise ValueError(
            f"{name} has {kind} rotary embeddings, which change above original_max_position_embeddings = {limit} "
            f"tokens for all samples of a row: sample {sample[short]} has {length[short]} tokens and sample "
            f"{sample[long]} {length[long]}, so one of them would be wrong; pack samples of up to {limit} tokens and "
            "longer ones in calls of their own"
        )


def check_placeholders(name: str, places: Mapping[int, str], tree: Any) -> None:
    """Refuse a tree with a token that stands for (a part of) an image, a video or a sound."""
    host = tree.numpy()
    ids = host.input_ids
    hit = np.isin(ids, list(places)) & (host.position_samples > 0)
    if not hit.any():
        return
    at = int(hit.argmax())
    token = int(ids[at])
    raise ValueError(
        f"{_sample_at(tree, at)}: token id {token} (packed position {at}) is {places[token]} of {name}, which stands "
        "for what an encoder makes of an image, a video or a sound; packed trees run text alone (the encoder's output, "
        "positions with several axes and attention both ways within an image would be lost), so run such samples "
        "unpacked"
    )


def check_ids(model: Any, tree: Any) -> None:
    """Raises ValueError for an id that the model has no embedding for; on the CPU alone, as a GPU would have to be
    waited for."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if rows is None or tree.input_ids.device.type != "cpu" or not len(tree.input_ids):
        return
    largest = int(tree.input_ids.max())
    if largest >= rows:
        at = int(tree.input_ids.argmax())
        raise ValueError(
            f"{_sample_at(tree, at)}: token id {largest} (packed position {at}), but {type(model).__name__} has {rows} "
            "embeddings; pack(vocab_size=...) looks at every id"
        )


def _sample_at(tree: Any, position: int) -> str:
    """The first sample that passes a packed position, for a message."""
    paths = zip(tree.path_index(), tree.sample_index.tolist(), strict=True)
    return next((f"sample {sample}" for path, sample in paths if position in path), "padding")
