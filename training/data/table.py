"""The table of a split: `data/prepared/{train,validation,test}.parquet`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from training.data.shots import Shots
from training.data.splits import Row
from training.data.text import fill_row

REQUIRED = ("id", "prompt", "source")
COLUMNS = ("id", "prompt", "completion", "answer", "source")
"""`prompt` is the user message, before any chat template; `completion` the reference one, null where there is none, and
`answer` what the grader needs, null where nothing can be graded. All are texts."""
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.string(), nullable=name not in REQUIRED) for name in COLUMNS),
        pa.field("level", pa.string()),
        pa.field("subject", pa.string()),
        pa.field("context", pa.list_(_MESSAGE)),
    ]
)
"""Beside COLUMNS: how hard a question is and what it is about, where the source says so, and the messages before it."""
_ROW_GROUP = 16_384


def write_table(path: Path, rows: Iterable[tuple[str, Row]], sources: Sequence[str], shots: Shots) -> int:
    """Write (id, row) pairs in their order; `sources` are the sources' names by number. Returns their number.

    Equal rows give equal bytes. Memory: one row group.
    """
    iterator = iter(rows)
    number = 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        while group := list(islice(iterator, _ROW_GROUP)):
            records = []
            for key, row in group:
                user, completion = fill_row(row, shots.prompt)
                context, message = shots.shown(row, user)
                records.append(
                    {
                        "id": key,
                        "prompt": message,
                        "completion": completion,
                        "answer": row.answer,
                        "source": sources[row.source],
                        "level": row.level,
                        "subject": row.subject,
                        "context": context,
                    }
                )
            writer.write_table(pa.Table.from_pylist(records, schema=SCHEMA))
            number += len(group)
    return number
