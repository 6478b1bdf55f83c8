"""What a packing run was told, and whether a run that continues it was told the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from treepack import PackError

from ..packing import options

#: Raw tokens of a window. docs/offline.md has the measured effect on the ratio.
WINDOW = 1 << 22
#: A shard is closed at the end of the first window with which it holds this many packed tokens.
SHARD_TOKENS = 1 << 24

Placement = Literal["shared", "first_fit", "stream"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an offline packing: those of `treepack.pack`, and how the input is cut.

    max_tokens, max_terms, max_kept, vocab_size, branching, order, overlong, pad_to_multiple_of: as for `treepack.pack`.
    placement: "shared" or "first_fit" within each window, or "stream": sample by sample through `treepack.Packer`.
    window: raw tokens that are packed together; samples in different windows share nothing. Bounds the memory.
    shard_tokens: packed tokens of a shard, give or take a window.
    pairs: the input holds preference pairs; the two samples of a pair stay in one tree.
    non_finite_log_probs: NaN or infinite `old_log_probs` and `ref_log_probs` at trained tokens raise, or are kept.
    """

    max_tokens: int
    max_terms: int | None = None
    max_kept: int | None = None
    vocab_size: int | None = None
    branching: Literal["token", "label"] = "token"
    order: Literal["largest_first", "first_seen"] = "largest_first"
    placement: Placement = "shared"
    overlong: Literal["raise", "skip"] = "raise"
    pad_to_multiple_of: int | None = None
    window: int = WINDOW
    shard_tokens: int = SHARD_TOKENS
    pairs: bool = False
    non_finite_log_probs: Literal["raise", "keep"] = "raise"

    def __post_init__(self) -> None:
        """PackError or TypeError for what is not allowed. Integers of other types become int: the manifest is JSON."""
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None or name in _NEEDED:
                object.__setattr__(self, name, options._count(name, value))
        if self.placement not in ("shared", "first_fit", "stream"):
            raise PackError(f"placement is {self.placement!r}; allowed is 'shared', 'first_fit' or 'stream'")
        options._choice("non_finite_log_probs", self.non_finite_log_probs, ("raise", "keep"))
        stream = {"placement": "shared"} if self.placement == "stream" else {}
        options.keywords(**(self.pack_keywords() | stream), ranks=1)
        if self.pairs and self.placement == "stream":
            raise PackError("placement is 'stream'; pairs stay together by 'shared' and 'first_fit' alone")
        for name in ("max_terms", "max_kept"):
            if self.pairs and getattr(self, name) is not None:
                raise PackError(
                    f"{name} is {getattr(self, name)}; with pairs max_tokens is the one budget: leave it out"
                )

    def of_trees(self) -> dict[str, Any]:
        """What the trees depend on, for the manifest; a run that continues is told the same."""
        return {name: value for name, value in asdict(self).items() if name != "non_finite_log_probs"}

    def pack_keywords(self) -> dict[str, Any]:
        """The keywords of `treepack.pack`."""
        own = ("window", "shard_tokens", "pairs", "non_finite_log_probs")
        return {name: value for name, value in asdict(self).items() if name not in own}


_NEEDED = ("max_tokens", "window", "shard_tokens")
_COUNTS = (*_NEEDED, "max_terms", "max_kept", "vocab_size", "pad_to_multiple_of")


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """ "max_tokens 8192 (now 16384)" of every option that is not as it was; '' where all are."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)!r} (now {now.get(name)!r})" for name in names)
