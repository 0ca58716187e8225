"""The table of a split: `data/prepared/{train,validation,test}.parquet`, written and read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from training.config import PromptConfig
from training.data.splits import Row
from training.errors import BadInput

COLUMNS = ("id", "prompt", "completion", "answer", "source")
"""`prompt` is the user message, before any chat template; `completion` the reference one. All are texts."""
SCHEMA = pa.schema([pa.field(name, pa.string(), nullable=False) for name in COLUMNS])
_ROW_GROUP = 16_384


def write_table(path: Path, rows: Iterable[tuple[str, Row]], sources: Sequence[str], prompt: PromptConfig) -> None:
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
                    fill(prompt.completion, solution=row.solution, answer=row.answer),
                    row.answer,
                    sources[row.source],
                )
                for key, row in group
            ]
            writer.write_table(pa.table([pa.array(column, pa.string()) for column in zip(*records, strict=True)], schema=SCHEMA))


def read_table(path: Path, limit: int | None = None) -> dict[str, list[str]]:
    """Columns of a split by name, at most its first `limit` rows.

    Raises BadInput when the file is missing, cut short or lacks a column.
    """
    columns: dict[str, list[str]] = {name: [] for name in COLUMNS}
    try:
        with pq.ParquetFile(path) as file:
            missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
            if missing:
                raise BadInput(f"{path}: no column {missing[0]!r}; it has {', '.join(map(repr, file.schema_arrow.names))}")
            for batch in file.iter_batches(batch_size=min(limit or _ROW_GROUP, _ROW_GROUP), columns=list(COLUMNS)):
                for name in COLUMNS:
                    columns[name] += batch.column(name).to_pylist()
                if limit is not None and len(columns["id"]) >= limit:
                    return {name: values[:limit] for name, values in columns.items()}
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; stage prepare makes it") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path}: not a whole parquet file: {error}") from None
    return columns


def fill(template: str, **fields: str) -> str:
    """Put the fields' texts where `{name}` stands, all at once: braces in the texts, or other braces, stay as they are."""
    return re.sub(r"\{(" + "|".join(map(re.escape, fields)) + r")\}", lambda match: fields[match[1]], template)
