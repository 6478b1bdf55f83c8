"""`treepack pack FILE --out DIR`: a file of rollouts or preference pairs -> Parquet shards, with a bar on the way."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import PackError, PackTypeError
from ..inputs.finite import NonFiniteError
from ..offline.options import SHARD_TOKENS, WINDOW, NonFinite, Options
from ..packing.options import Branching, Order, Overlong, Placement
from .inspect_command import columns_of
from .numbers import count_option
from .terminal import counted, printable, progress_bar

if TYPE_CHECKING:
    from ..offline.manifest import Manifest
    from ..offline.pair_files import Pairs
    from ..offline.writer import Progress
    from ..readers import Rollouts

_INTERRUPTED = 130


def pack(
    file: Annotated[
        str, typer.Argument(help="JSONL, Parquet, NPZ, a folder of datasets.save_to_disk, a folder or glob of shards.")
    ],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for the shards and their manifest.json.")],
    max_tokens: Annotated[int, count_option("Most positions of a tree, padding included.")] = 16384,
    placement: Annotated[
        Placement, typer.Option(help="Fewest tokens, first fit, or sample by sample without windows.")
    ] = "shared",
    window: Annotated[int, count_option("Raw tokens that are packed together; bounds the memory.")] = WINDOW,
    shard_tokens: Annotated[
        int,
        count_option("Packed tokens of a shard; a stopped run repeats at most one."),
    ] = SHARD_TOKENS,
    max_terms: Annotated[int | None, count_option("Most loss terms of a tree.")] = None,
    max_kept: Annotated[int | None, count_option("Most kept ids of a tree.")] = None,
    vocab_size: Annotated[int | None, count_option("All ids must be below it.")] = None,
    branching: Annotated[Branching, typer.Option(help="label: with shift_labels.")] = "token",
    order: Annotated[Order, typer.Option(help="Of siblings.")] = "largest_first",
    overlong: Annotated[Overlong, typer.Option(help="What of samples that fit no tree.")] = "raise",
    pad_to_multiple_of: Annotated[int | None, count_option("Pad each tree to a multiple of it.")] = None,
    non_finite_log_probs: Annotated[
        NonFinite, typer.Option(help="What of NaN and infinite log-probs at trained tokens.")
    ] = "raise",
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Rows are preference pairs (chosen, rejected): both stay in one tree.")
    ] = False,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COLUMN", help="Where a column is: input_ids=my_tokens, prompt_ids=steps[].prompt."),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="DIR", help="Tokenizer folder, for chat messages.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue what is in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop what is in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Pack a data set into Parquet shards, a row per tree, in bounded memory. A stopped run can be resumed."""
    given = dict(locals())
    from ..offline.files import open_input
    from ..offline.manifest import read
    from ..offline.writer import write

    started = time.perf_counter()
    if not out:  # an empty variable of a script; Path would take it for the folder one is in
        raise PackError("--out is empty; name a folder")
    options = Options.of(given)
    try:
        rows = open_input(file, pairs, columns_of(column), tokenizer)
        lines = [] if as_json or rows.account.plain else list(map(printable, rows.account.lines()))
        before = read(Path(out)) if resume else None
        with _Bar(rows) as bar:
            name = Path(file).name
            manifest = write(bar, out, options, source=name, resume=resume, overwrite=overwrite, progress=bar.show)
    except KeyboardInterrupt:
        found = read(Path(out))
        shards = len(found.shards) if found else 0
        done = f"{counted(shards, 'finished shard')} in {out}"
        print("treepack:", printable(f"stopped; {done}: go on with --resume"), file=sys.stderr)
        raise typer.Exit(_INTERRUPTED) from None
    except (PackError, PackTypeError) as error:
        _for_command_line(error, file, pairs)
        raise
    numbers = summary(manifest, Path(out), time.perf_counter() - started)
    numbers["account"] = rows.account.to_json()
    numbers["already_finished"] = before is not None and before.finished
    if numbers["already_finished"]:
        lines.insert(0, f"nothing was packed: {printable(out)} holds this packing, finished by an earlier run")
    print(json.dumps(numbers) if as_json else "\n".join([_line(numbers, pairs), *lines]))


def summary(manifest: Manifest, out: Path, seconds: float) -> dict[str, Any]:
    """The numbers of a finished packing, over all its shards."""
    total = {name: sum(getattr(shard, name) for shard in manifest.shards) for name in _TOTALS}
    raw, packed = total["raw_tokens"], total["packed_tokens"]
    return {
        "out": str(out),
        "rows": manifest.rows,
        **total,
        "packing_ratio": raw / packed if packed else 1.0,
        "skipped": manifest.skipped,
        "shards": len(manifest.shards),
        "seconds": round(seconds, 3),
    }


_TOTALS = (
    "samples",
    "raw_tokens",
    "packed_tokens",
    "padding",
    "trees",
    "terms",
    "attention_pairs",
    "attention_pairs_alone",
    "bytes",
)


def _line(numbers: dict[str, Any], pairs: bool) -> str:
    what = counted(numbers["rows"], "pair") if pairs else counted(numbers["samples"], "sample")
    skipped = f", {counted(numbers['skipped'], 'sample')} skipped" if numbers["skipped"] else ""
    shards = counted(numbers["shards"], "shard")
    return printable(
        f"{what}, {numbers['raw_tokens']:,} -> {numbers['packed_tokens']:,} tokens ({numbers['packing_ratio']:.2f} "
        f"times fewer), {counted(numbers['trees'], 'tree')} in {shards}, {numbers['bytes'] / 1e6:,.2f} MB"
        f"{skipped}: {numbers['out']}"
    )


def _for_command_line(error: PackError | PackTypeError, file: str, pairs: bool) -> None:
    """Say the file where the error is of samples in it, and what to do at the command line."""
    if error.sample is not None or error.source:
        error.source = f"{file}: {error.source}" if error.source else file
    if isinstance(error, NonFiniteError):
        error.remedy = "leave such samples out, train other tokens, or keep them with --non-finite-log-probs keep"
    elif error.budget is not None:
        what, option = "pairs" if pairs else "samples", "--" + error.budget.replace("_", "-")
        error.remedy = f"raise {option} to {error.needs} or more, or leave such {what} out with --overlong skip"


class _Bar:
    """The rows of an input, and a bar on stderr that moves as they are read; nothing where stderr is no terminal."""

    def __init__(self, rows: Rollouts | Pairs):
        self._bar = progress_bar()
        self._task = self._bar.add_task("packing", total=1.0, done="")
        self._rows = rows
        self.fingerprint, self.account = rows.fingerprint, rows.account

    def batches(self, samples: int = 1024, *, start: int = 0) -> Iterator[list[Any]]:
        for batch in self._rows.batches(samples, start=start):
            self._bar.update(self._task, completed=self._rows.fraction)
            yield list(batch)

    def show(self, now: Progress) -> None:
        ratio = now.raw_tokens / now.packed_tokens if now.packed_tokens else 1.0
        read = self._rows.fraction
        self._bar.update(
            self._task, completed=read, done=f"{now.rows:,} rows, {ratio:.2f} x, {counted(now.shards, 'shard')}"
        )

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
