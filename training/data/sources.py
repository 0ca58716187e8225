"""Examples (question, solution, answer) from a source: a reasoning-gym task, a file or a hub data set."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Iterable, Iterator
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from training.config import SourceConfig
from training.data.code import FORMATS
from training.data.files import Record, read_records, require_columns
from training.errors import BadInput


class Example(NamedTuple):
    """One question with its known answer; `solution` is the worked one, or the answer where there is none."""

    question: str
    solution: str
    answer: str


def read_examples(source: SourceConfig, seed: int, file: Path | None = None) -> Iterator[Example]:
    """Yield the examples of `source` in its own order, one by one.

    `seed` makes reasoning-gym problems unless the source has its own; `file` is the local copy of a file
    source (default: its path as it stands). Raises BadInput naming the file, line or row, column and value.
    """
    if source.format == "columns":
        columns = {source.question_column, source.answer_column, source.solution_column} - {None}
    else:
        columns = set(FORMATS[source.format].columns)
    ordered = sorted(map(str, columns))
    if source.kind == "reasoning_gym":
        records = _reasoning_gym(source, seed, ordered)
    elif source.kind == "file":
        path = str(source.path)
        records = islice(read_records(file or Path(path), ordered, path), source.size)
    else:
        records = islice(_hub(source, ordered), source.size)
    return _examples(source, records)


def _examples(source: SourceConfig, records: Iterable[Record]) -> Iterator[Example]:
    pattern = None if source.answer_pattern is None else re.compile(source.answer_pattern)
    remove = None if source.solution_remove is None else re.compile(source.solution_remove)
    empty = True
    for place, record in records:
        empty = False
        if source.format != "columns":
            yield Example(*FORMATS[source.format].example(record, place))
            continue
        question = _text(record, source.question_column, place)
        whole = _text(record, source.answer_column, place)
        answer = whole if pattern is None else _extract(pattern, whole, source.answer_column, place)
        solution = whole if source.solution_column is None else _text(record, source.solution_column, place)
        if remove is not None:
            solution = remove.sub("", solution).strip()
        yield Example(question, solution, answer)
    if empty:
        raise BadInput(f"{source.label}: holds no rows; at least one is needed")


def _text(record: dict[str, Any], column: str, place: str) -> str:
    """The text in a cell, without space at its ends; numbers as they are written (18.0 is 18)."""
    value = record[column]
    if isinstance(value, str):
        text = value.strip()
        if not text:
            raise BadInput(f"{place}: column {column!r} is empty; every row needs a text or a number")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadInput(
                f"{place}: column {column!r} holds {value[error.start]!r}, half of a surrogate pair, which is no character"
            ) from None
        return text
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise BadInput(f"{place}: column {column!r} is null; every row needs a text or a number")
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if isinstance(value, int | float | Decimal):
        return str(value)
    raise BadInput(
        f"{place}: column {column!r} holds a {type(value).__name__}, {_short(value)}; accepted: a text or a number"
    )


def _extract(pattern: re.Pattern[str], text: str, column: str, place: str) -> str:
    match = pattern.search(text)
    answer = (match[1] or "").strip() if match else ""
    if not answer:
        raise BadInput(
            f"{place}: answer_pattern {pattern.pattern!r} finds no answer in column {column!r}, {_short(text)}"
        )
    return answer


def _reasoning_gym(source: SourceConfig, seed: int, columns: Collection[str]) -> Iterator[Record]:
    """The task's problems; a problem's metadata are further columns."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task = str(source.task)
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=1, cutoff=0.0)[0]
        raise BadInput(
            f"reasoning_gym task {task!r}: unknown; did you mean {close!r}? It knows {len(DATASETS)} tasks, reasoning_gym.factory.DATASETS lists them"
        )
    settings = [
        field.name for field in dataclasses.fields(DATASETS[task][1]) if field.name not in ("seed", "size")
    ]
    for name in source.settings:
        if name not in settings:
            raise BadInput(
                f"reasoning_gym task {task!r}: unknown setting {name!r}; accepted: {', '.join(settings)}"
            )
    try:
        seed = seed if source.seed is None else source.seed
        dataset = reasoning_gym.create_dataset(task, size=source.size, seed=seed, **source.settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise BadInput(f"reasoning_gym task {task!r}: settings {source.settings} refused: {error}") from error
    for index in range(len(dataset)):
        problem = dataset[index]
        record = {**problem["metadata"], "question": problem["question"], "answer": problem["answer"]}
        place = f"{source.label}, row {index + 1}"
        require_columns(columns, record, place)
        yield place, record


def _hub(source: SourceConfig, columns: Collection[str]) -> Iterator[Record]:
    """Rows of one split of a hub data set at a pinned revision; needs the hub or a copy in its local cache."""
    import datasets

    try:
        dataset = datasets.load_dataset(
            source.path, source.config, split=source.hub_split, revision=source.revision
        )
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        raise BadInput(
            f"hub data set {source.path!r} (config {source.config!r}, split {source.hub_split!r}, revision {source.revision!r}): {error}"
        ) from error
    require_columns(columns, dataset.column_names, source.label)
    for number, record in enumerate(dataset.select_columns(list(columns)), 1):
        yield f"{source.label}, row {number}", record


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
