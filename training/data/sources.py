"""Examples from a source: a reasoning-gym task, files or a hub data set, read by the source's format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.config import SourceConfig
from training.data.files import Column, Record, cell, read_records, require_columns
from training.data.formats import FORMATS, Example, Row
from training.data.gym import read_task
from training.errors import BadInput

SHOWN_BAD_ROWS = 3


@dataclass
class Account:
    """What was read of a source, and what was left out."""

    rows_read: int = 0
    """Rows that passed the source's `where`."""
    elsewhere: int = 0
    """Rows that did not."""
    bad_rows: int = 0
    """Rows left out because they can't be used."""
    bad_examples: list[str] = field(default_factory=list)
    """Why, for the first of them."""


def read_examples(
    source: SourceConfig,
    seed: int,
    files: Mapping[str, Path] | None = None,
    account: Account | None = None,
) -> Iterator[Example]:
    """Yield the examples of `source` in its own order, one by one.

    `seed` makes reasoning-gym problems unless the source has its own; `files` are the local copies of a file
    source by name (default: its path as it stands). `account` is filled in as rows are read. Raises BadInput naming
    the file, line or row, column and value.
    """
    form = FORMATS[source.format]
    parts = form.parts(source)
    wanted = [*parts.values(), *(Column((name,)) for name in source.where)]
    account = account or Account()
    rules = form.rules(source)
    for place, record in _matching(source, _records(source, seed, files, wanted), account):
        if source.kind != "reasoning_gym" and account.rows_read == source.size:
            break
        account.rows_read += 1
        try:
            yield form.make(Row(record, parts, place), rules)
        except BadInput as error:
            account.bad_rows += 1
            if account.bad_rows > source.skip_bad_rows:
                allowed = f" (one more than skip_bad_rows = {source.skip_bad_rows})"
                raise BadInput(f"{error}{allowed if source.skip_bad_rows else ''}") from None
            if len(account.bad_examples) < SHOWN_BAD_ROWS:
                account.bad_examples.append(str(error))
    if account.rows_read == 0:
        raise BadInput(f"{source.label}: holds no rows; at least one is needed")


def _records(
    source: SourceConfig, seed: int, files: Mapping[str, Path] | None, wanted: Sequence[Column]
) -> Iterator[Record]:
    path = str(source.path)
    if source.kind == "reasoning_gym":
        yield from read_task(source, seed, wanted)
    elif source.kind == "hub":
        yield from read_hub(path, source.config, source.hub_split, str(source.revision), wanted)
    else:
        for name, file in (files or {path: Path(path)}).items():
            yield from read_records(file, wanted, name)


def _matching(source: SourceConfig, records: Iterator[Record], account: Account) -> Iterator[Record]:
    """The records that have one of the wanted values in each column of `where`.

    Raises BadInput at the end for a value that no record had, with those that they had.
    """
    wanted = {name: {str(value) for value in values} for name, values in source.where.items()}
    seen: dict[str, Counter[str]] = {name: Counter() for name in wanted}
    for place, record in records:
        values = {name: str(cell(record, Column((name,)), place)) for name in wanted}
        for name, value in values.items():
            seen[name][value] += 1
        if all(values[name] in accepted for name, accepted in wanted.items()):
            yield place, record
        else:
            account.elsewhere += 1
    for name, accepted in wanted.items():
        for value in sorted(accepted - seen[name].keys()):
            found = ", ".join(f"{text!r}" for text, _ in seen[name].most_common(12))
            raise BadInput(
                f"{source.label}: where.{name}: no row has {value!r} in column {name!r}; there are {short_list(found)}"
            )


def short_list(text: str) -> str:
    """A list for a message, cut where it is long."""
    return text if len(text) <= 400 else text[:399] + "…"


def read_hub(
    path: str, config: str | None, split: str, revision: str, columns: Sequence[str | Column]
) -> Iterator[Record]:
    """Rows of one split of a hub data set at a pinned revision; needs the hub or a copy in its local cache."""
    import datasets

    name = f"hub:{path}"
    try:
        dataset: Any = datasets.load_dataset(path, config, split=split, revision=revision)
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        raise BadInput(
            f"hub data set {path!r} (config {config!r}, split {split!r}, revision {revision!r}): {error}"
        ) from error
    present = require_columns(columns, dataset.column_names, name)
    for number, record in enumerate(dataset.select_columns(present), 1):
        yield f"{name}, row {number}", record
