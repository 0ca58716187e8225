"""Rows of a prepared split, as the stages that read one see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from training.errors import BadInput


def read_rows(path: Path, having: str | None = None) -> list[dict[str, Any]]:
    """The rows in their order, each a value by column; `context` is a list of messages, empty where there is none.

    With `having` (`completion` or `answer`), those alone that have it; raises BadInput when none has.
    """
    rows = pq.read_table(path).to_pylist()
    for row in rows:
        row["context"] = list(row.get("context") or [])
    if having is None:
        return rows
    found = [row for row in rows if row.get(having) is not None]
    if not found:
        raise BadInput(
            f"{path.name}: none of its {len(rows)} rows has {'an' if having == 'answer' else 'a'} {having}; add a source whose "
            f"rows have one (docs/data.md says what becomes of each format)"
        )
    return found
