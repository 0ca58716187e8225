"""Records of data files: JSONL, JSON and CSV (each plain or .gz) and parquet, from a path or a URL."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from training.errors import BadInput

Record = tuple[str, dict[str, Any]]
"""Where a record stands (`train.jsonl, line 3`) and its values by column."""


class Column(NamedTuple):
    """A column by its name, or the first of several names that is there; dots lead into nested cells."""

    names: tuple[str, ...]
    optional: bool = False

    def within(self, present: Collection[str]) -> str | None:
        """The name that is there: whole, or its beginning up to a dot that is; None where there is none."""
        for name in self.names:
            if name in present or name.partition(".")[0] in present:
                return name
        return None


def is_url(path: str) -> bool:
    """Whether `path` is an http(s) URL."""
    return path.startswith(("http://", "https://"))


def download(url: str, folder: Path) -> Path:
    """Fetch `url` into `folder`, whole or not at all; the file keeps the suffixes that tell its format.

    Raises BadInput when the server refuses (4xx) and OSError when it can't be reached or stops half-way, which
    is worth another try.
    """
    name = Path(urllib.parse.urlsplit(url).path).name
    target = folder / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{name}"
    partial = target.with_name(f".{target.name}.part")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with urllib.request.urlopen(url, timeout=60) as response, partial.open("wb") as file:
            shutil.copyfileobj(response, file, 1 << 20)
            expected = response.headers["Content-Length"]
    except urllib.error.HTTPError as error:
        if 400 <= error.code < 500 and error.code != 429:
            raise BadInput(
                f"{url}: the server answered {error.code} {error.reason}; give the URL of a file it serves"
            ) from None
        raise
    if expected is not None and partial.stat().st_size != int(expected):
        raise OSError(f"{url}: got {partial.stat().st_size} of {expected} bytes; the connection broke off")
    return partial.replace(target)


def read_records(path: Path, columns: Sequence[str | Column], name: str | None = None) -> Iterator[Record]:
    """Yield the records of a file one by one; `columns` are those that each record must have, unless optional.

    `name` stands for the path in errors. Raises BadInput when the file is missing, of an unknown format,
    malformed (with the line) or lacks a column (with those it has).
    """
    name = name or str(path)
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in _READERS:
        raise BadInput(
            f"{name}: can't tell the format from {path.name!r}; accepted endings are .jsonl, .json, .csv (also with .gz) and .parquet"
        )
    if not path.is_file():
        raise BadInput(
            f"{name}: {'is a folder' if path.is_dir() else 'no such file'}; give the path or URL of a data file"
        )
    if path.stat().st_size == 0:
        raise BadInput(f"{name}: the file is empty; at least one row is needed")
    return _READERS[suffix](path, columns, name)


def require_columns(wanted: Sequence[str | Column], present: Collection[str], place: str) -> list[str]:
    """The top-level columns that hold those of `wanted` that are there.

    Raises BadInput naming the first that `present` lacks though it isn't optional, and the columns that are there.
    """
    found: dict[str, None] = {}
    for column in wanted:
        column = Column((column,)) if isinstance(column, str) else column
        name = column.within(present)
        if name is not None:
            found[name if name in present else name.partition(".")[0]] = None
        elif not column.optional:
            names = " or ".join(map(repr, column.names))
            raise BadInput(
                f"{place}: no column {names}; it has {', '.join(map(repr, present)) or 'none'} "
                "(the source's settings say which column holds what)"
            )
    return list(found)


def cell(record: dict[str, Any], column: Column, place: str) -> Any:
    """The value of a column in a record; None where an optional one isn't there.

    Raises BadInput when a dotted name leads nowhere.
    """
    name = column.within(record)
    if name is None:
        return None
    if name in record:
        return record[name]
    value: Any = record
    for number, part in enumerate(name.split(".")):
        try:
            value = value[int(part) if isinstance(value, list) else part]
        except (IndexError, KeyError, TypeError, ValueError):
            at = ".".join(name.split(".")[:number])
            held = ", ".join(map(repr, value)) if isinstance(value, dict) else f"a {type(value).__name__}"
            raise BadInput(f"{place}: no column {name!r}; at {at!r} it has {held}") from None
    return value


def _jsonl(path: Path, columns: Sequence[str | Column], name: str) -> Iterator[Record]:
    for number, line in _lines(path, name):
        if line.strip():
            place = f"{name}, line {number}"
            yield place, _object(_parse(line, place), columns, place)


def _json(path: Path, columns: Sequence[str | Column], name: str) -> Iterator[Record]:
    records = _parse("".join(line for _, line in _lines(path, name)), name)
    if not isinstance(records, list):
        raise BadInput(f"{name}: holds a JSON {type(records).__name__}, expected a list of objects")
    for number, record in enumerate(records, 1):
        place = f"{name}, row {number}"
        yield place, _object(record, columns, place)


def _csv(path: Path, columns: Sequence[str | Column], name: str) -> Iterator[Record]:
    reader = csv.reader((line for _, line in _lines(path, name)), strict=True)
    try:
        header = next(reader, [])
        require_columns(columns, header, f"{name}, line 1")
        for fields in reader:
            place = f"{name}, line {reader.line_num}"
            if fields and len(fields) != len(header):
                raise BadInput(f"{place}: {len(fields)} fields, the header has {len(header)}")
            if fields:
                yield place, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise BadInput(f"{name}, line {reader.line_num}: not valid CSV: {error}") from None


def _parquet(path: Path, columns: Sequence[str | Column], name: str) -> Iterator[Record]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            present = require_columns(columns, file.schema_arrow.names, name)
            for batch in file.iter_batches(batch_size=4096, columns=present):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{name}, row {number}", record
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(f"{name}: not a whole parquet file (after row {number}): {error}") from None


_READERS: dict[str, Callable[[Path, Sequence[str | Column], str], Iterator[Record]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _lines(path: Path, name: str) -> Iterator[tuple[int, str]]:
    """Numbered lines (from 1) of a UTF-8 file, line ends kept; decoded one by one so that errors name theirs."""
    number = 0
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, 1):
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{name}, line {number}: not UTF-8: {error.reason} at byte {error.start} of the line"
        ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadInput(f"{name}: not a whole gzip file (damaged after line {number}): {error}") from None


def _open(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "\n" in text.rstrip("\n") else ""
        raise BadInput(
            f"{place}{line}: not valid JSON: {error.msg} at column {error.colno}: {_excerpt(error.doc, error.pos)}"
        ) from None
    except RecursionError:
        raise BadInput(f"{place}: not valid JSON: nested too deeply") from None


def _object(record: Any, columns: Sequence[str | Column], place: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        names = [repr(column if isinstance(column, str) else column.names[0]) for column in columns]
        raise BadInput(f"{place}: a JSON {type(record).__name__}, expected an object with {', '.join(names)}")
    require_columns(columns, record, place)
    return record


def _excerpt(text: str, position: int) -> str:
    return repr(text[max(0, position - 30) : position + 30].strip("\r\n"))
