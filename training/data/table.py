"""The table of a split: `data/prepared/{train,validation,test}.parquet`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from training.config import PromptConfig
from training.data.splits import Row

COLUMNS = ("id", "prompt", "completion", "answer", "source")
"""`prompt` is the user message, before any chat template; `completion` the reference one. All are texts."""
SCHEMA = pa.schema([pa.field(name, pa.string(), nullable=False) for name in COLUMNS])
_ROW_GROUP = 16_384


def write_table(
    path: Path, rows: Iterable[tuple[str, Row]], sources: Sequence[str], prompt: PromptConfig
) -> None:
    """Write (id, row) pairs in their order; `sources` are the sources' names by number.

    Equal rows give equal bytes. Memory: one row group.
    """
    iterator = iter(rows)
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        while group := list(islice(iterator, _ROW_GROUP)):
            records = [
                (
                    key,
                    fill(prompt.template, question=row.question),
                    fill(prompt.completion, question=row.question, solution=row.solution, answer=row.answer),
                    row.answer,
                    sources[row.source],
                )
                for key, row in group
            ]
            writer.write_table(
                pa.table(
                    [pa.array(column, pa.string()) for column in zip(*records, strict=True)], schema=SCHEMA
                )
            )


def fill(template: str, **fields: str) -> str:
    """Put the fields' texts where `{name}` stands, all at once: braces in the texts, or other braces, stay as they are."""
    return re.sub(
        r"\{(" + "|".join(map(re.escape, fields)) + r")\}", lambda match: fields[match[1]], template
    )


def unfill(template: str, text: str) -> str:
    """The question in a prompt that `fill` made of a template; the text itself where that can't be told."""
    before, _, after = template.partition("{question}")
    if "{question}" in after or not text.startswith(before) or not text.endswith(after):
        return text
    return text[len(before) : len(text) - len(after)]
