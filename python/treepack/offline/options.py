"""The options that a packing run was given, and whether a run that continues it was given the same."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from .._core import PackError
from ..packing.options import PackOptions

#: Raw tokens of a window. docs/offline.md has the measured effect on the ratio.
WINDOW = 1 << 22
#: A shard is closed at the end of the first window with which it holds this many packed tokens.
SHARD_TOKENS = 1 << 24

#: What of NaN and infinite log-probs at trained tokens.
NonFinite = Literal["raise", "keep"]


@dataclass(frozen=True, kw_only=True)
class Options(PackOptions):
    """Options of an offline packing: those of `treepack.pack`, and how the input is cut.

    max_tokens, max_terms, max_kept, vocab_size, branching, order, overlong, pad_to_multiple_of: as for `treepack.pack`.
    placement: "shared" or "first_fit" within each window, or "stream": sample by sample through `treepack.Packer`.
    window: raw tokens that are packed together; samples in different windows share nothing. Bounds the memory.
    shard_tokens: packed tokens of a shard, give or take a window.
    pairs: the input holds preference pairs; the two samples of a pair stay in one tree.
    non_finite_log_probs: NaN or infinite `old_log_probs` and `ref_log_probs` at trained tokens raise, or are kept.
    """

    ranks: int = field(default=1, init=False, repr=False)  # of the loader, which is given their number
    window: int = WINDOW
    shard_tokens: int = SHARD_TOKENS
    pairs: bool = False
    non_finite_log_probs: NonFinite = "raise"

    CHOICES: ClassVar = {
        **PackOptions.CHOICES,
        "placement": ("shared", "first_fit", "stream"),
        "non_finite_log_probs": ("raise", "keep"),
    }
    NUMBERS: ClassVar = (*PackOptions.NUMBERS, "window", "shard_tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs and self.placement == "stream":
            raise PackError("placement is 'stream'; pairs stay together by 'shared' and 'first_fit' alone")
        for name in ("max_terms", "max_kept"):
            if self.pairs and getattr(self, name) is not None:
                raise PackError(
                    f"{name} is {getattr(self, name)}; with pairs max_tokens is the one budget: leave it out"
                )

    def for_manifest(self) -> dict[str, Any]:
        """The options by name, as the manifest has them: those that the trees depend on."""
        names = (each.name for each in fields(self) if each.init and each.name != "non_finite_log_probs")
        return {name: getattr(self, name) for name in names}


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """ "max_tokens 8192 (now 16384)" of every option that is not as it was; '' where all are."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)!r} (now {now.get(name)!r})" for name in names)
