"""`treepack inspect FILE`: what packing would save on these rollouts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from .._core import PackError
from .._version import __version__
from ..offline.options import WINDOW, Options
from ..offline.pair_files import Pairs, open_pairs
from ..offline.pairs import Pair, samples_of
from ..packing.options import Placement
from ..readers import ReadError, Rollouts, open_rollouts
from ..readers.chat import load_tokenizer
from . import tables
from .numbers import count_option, numbers_in
from .pair_survey import PairSurvey
from .quality import COLUMNS as LOOKED_AT
from .quality import Quality, positions_of
from .said import Place, said
from .survey import COLUMNS, Survey
from .terminal import printable, progress_bar, stdout

_FORMATS = "JSONL, Parquet, NPZ, a folder of datasets.save_to_disk, or a folder or glob of shards"


def inspect(
    file: Annotated[str, typer.Argument(help=f"Rollouts: {_FORMATS}.", show_default=False)],
    max_tokens: Annotated[
        str,
        typer.Option(metavar="N[,N...]", help="Most tokens of a tree, 16384 or 16k; several (8k,16k,32k) to compare."),
    ] = "16384",
    max_terms: Annotated[int | None, count_option("Most loss terms of a tree.")] = None,
    placement: Annotated[Placement, typer.Option(help="The one that the summary and the page are about.")] = "shared",
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Rows are preference pairs (chosen, rejected): both stay in one tree.")
    ] = False,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COLUMN", help="Where a column is: input_ids=my_tokens, prompt_ids=steps[].prompt."),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="DIR", help="Tokenizer folder, for chat messages.")] = None,
    max_positions: Annotated[
        int | None,
        count_option(
            "Positions of the model: longer samples are counted. Else from the tokenizer's folder.",
        ),
    ] = None,
    limit: Annotated[int | None, count_option("Read this many samples, or pairs, at most.")] = None,
    window: Annotated[int, count_option("Raw tokens that are placed together; bounds the memory.")] = WINDOW,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    html: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Draw the trees as a page that needs no network.")
    ] = None,
) -> None:
    """Show what packing would save: tokens, attention work, and what each placement keeps of it."""
    rollouts: Rollouts | Pairs
    survey: Survey
    budgets = numbers_in("--max-tokens", max_tokens)
    most = budgets[-1]
    more = budgets if len(budgets) > 1 else ()
    if pairs:
        Options(max_tokens=most, max_terms=max_terms, placement=placement, pairs=True)  # says what does not go
        rollouts = open_pairs(file, columns=columns_of(column), tokenizer=tokenizer)
        survey = PairSurvey(most, window, placement if html else None, more, placement)
    else:
        rollouts = open_rollouts(file, columns=columns_of(column), tokenizer=tokenizer)
        survey = Survey(most, max_terms, window, placement if html else None, more, placement)
    if html is not None:
        _check_page(html, rollouts)
    text = load_tokenizer(tokenizer) if html is not None and tokenizer is not None else None
    quality = Quality(max_positions if max_positions is not None else positions_of(tokenizer))
    try:
        for row, place in _read(rollouts, limit, None if html else (*COLUMNS, *LOOKED_AT)):
            samples = samples_of(row) if isinstance(row, Pair) else (row,)
            for sample in samples:
                quality.add(sample)
            survey.add(row, said(samples[0], place, len(rollouts.files) > 1) if survey.drawing else None)
        numbers = survey.finish() | {"quality": quality.finish()}
    except (PackError, TypeError) as error:  # what `pack` raises for samples
        raise ReadError(f"{file}: {error}") from None
    if not numbers["samples"]:
        raise ReadError(f"{file}: {_none_fits(numbers)}")
    if html is not None:
        _draw(survey, numbers, rollouts, html, text)
    chosen = numbers["placements"][placement]
    expected = {"placement": placement, "linear": chosen["packing_ratio"], "attention": chosen["attention_ratio"]}
    source = {"file": file, "format": rollouts.format, "columns": rollouts.columns, "limit": limit}
    source["account"] = rollouts.account.to_json()
    numbers = {"treepack": __version__, **source, **numbers, "expected": expected, "html": html}
    if as_json:
        print(json.dumps(numbers))
    else:
        tables.print_survey(stdout(), numbers)


def columns_of(options: list[str] | None) -> dict[str, str]:
    """`["input_ids=my_ids"]` as a dict.

    Raises:
        ReadError: an option without a name on the left of an equals sign.
    """
    columns = {}
    for option in options or []:
        name, equals, column = option.partition("=")
        if not name or not equals:
            raise ReadError(f"--column {option}: needed is NAME=COLUMN, say --column input_ids=my_tokens")
        columns[name] = column
    return columns


def _read(rollouts: Rollouts | Pairs, limit: int | None, names: Sequence[str] | None) -> Iterator[tuple[Any, Place]]:
    """The samples or pairs and where each lies, with a bar on stderr where that is a terminal."""
    rows = "samples" if isinstance(rollouts, Rollouts) else "pairs"
    with progress_bar() as bar:
        task = bar.add_task("reading", total=1.0, done="")

        def progress(samples: int) -> None:
            share = max(rollouts.fraction, samples / limit if limit else 0.0)
            bar.update(task, completed=min(share, 1.0), done=f"{samples:,} {rows}")

        batches = rollouts.batches(min(limit or 1024, 1024), names=names, progress=progress)
        yield from islice((pair for batch in batches for pair in zip(batch, rollouts.places, strict=True)), limit)
        if limit is not None:
            rollouts.check_terms(whole=False)


def _check_page(html: str, rollouts: Rollouts | Pairs) -> None:
    """ReadError for a page that cannot be written there, before the file is read for minutes."""
    page = Path(html)
    if not html or page.is_dir():
        raise ReadError(f"--html {html!r} is {'a folder' if html else 'empty'}; name a file, say report.html")
    if not os.access(page.absolute().parent, os.W_OK):
        raise ReadError(f"--html {html}: its folder is not there or cannot be written to")
    if page.exists() and any(page.samefile(source) for source in rollouts.files):
        raise ReadError(f"--html {html} is the file that is read; name another one, say report.html")


def _none_fits(numbers: dict[str, Any]) -> str:
    skipped = numbers["skipped"]
    return (
        f"none of the {skipped['samples']} samples fits into a tree ({skipped['first'][0]['reason']}); they have "
        f"{skipped['shortest']} to {skipped['longest']} tokens: all fit with {tables.what_fits(numbers)}"
    )


def _draw(survey: Survey, numbers: dict[str, Any], rollouts: Rollouts | Pairs, html: str, tokenizer: Any) -> None:
    from ..reports import report

    part = "" if survey.drawn_samples == numbers["samples"] else f", the first {survey.drawn_samples:,} samples"
    report(
        survey.drawn,
        title=f"{rollouts.path}{part}",
        columns=rollouts.account,
        samples=survey.said_of,
        tokenizer=tokenizer,
        details={"The file": _source(numbers, rollouts), "Data quality": tables.quality_lines(numbers["quality"])},
    ).save(html)


def _source(numbers: dict[str, Any], rollouts: Rollouts | Pairs) -> list[tuple[str, str, str]]:
    """The file and the options, for the page."""
    rows = [("file", printable(str(rollouts.path)), rollouts.format)]
    rows += [("samples read", f"{numbers['samples']:,}", f"{numbers['skipped']['samples']:,} do not fit")]
    names = ("max_tokens", "max_terms", "window_tokens")
    return rows + [(name, f"{numbers[name]:,}", "option") for name in names if numbers[name] is not None]
