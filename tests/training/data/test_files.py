import csv
import gzip
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from training.data.files import download, read_records
from training.errors import BadInput

ROWS = [
    {"question": 'Twice "3",\nin {braces}?', "answer": "6"},
    {"question": "¿Cuánto es 1 + 1?", "answer": "2"},
    {"question": "line\u2028separator", "answer": "1"},
]
COLUMNS = ("question", "answer")


def write(path: Path, rows: list[dict]) -> Path:
    """Write rows in the format that the name says."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    match "".join(path.suffixes):
        case ".jsonl":
            path.write_text(text, encoding="utf-8")
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(text.encode()))
        case ".json":
            path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case ".json.gz":
            path.write_bytes(gzip.compress(json.dumps(rows).encode()))
        case ".csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, rows[0].keys())
                writer.writeheader()
                writer.writerows(rows)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.parquet", "a.csv"])
def test_every_format_gives_the_same_records(tmp_path, name):
    records = list(read_records(write(tmp_path / name, ROWS), COLUMNS))
    assert [values for _, values in records] == ROWS


def test_places_are_lines_or_rows(tmp_path):
    lines = [place for place, _ in read_records(write(tmp_path / "a.jsonl", ROWS), COLUMNS, "mine")]
    assert lines == ["mine, line 1", "mine, line 2", "mine, line 3"]
    # The first CSV record spans lines 2 and 3 of the file.
    assert [place[-6:] for place, _ in read_records(write(tmp_path / "a.csv", ROWS), COLUMNS)] == [
        "line 3",
        "line 4",
        "line 5",
    ]


def test_byte_order_mark_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "q", "answer": "1"}\n\n{"question": "r", "answer": "2"}')
    assert [place[-6:] for place, _ in read_records(path, COLUMNS)] == ["line 1", "line 3"]


def bad(path: Path) -> str:
    with pytest.raises(BadInput) as caught:
        list(read_records(path, COLUMNS))
    assert path.name in str(caught.value)
    return str(caught.value)


def test_missing_file(tmp_path):
    assert "no such file" in bad(tmp_path / "a.jsonl")
    (tmp_path / "folder.csv").mkdir()
    assert "is a folder" in bad(tmp_path / "folder.csv")


def test_unknown_format_lists_the_accepted_ones(tmp_path):
    path = tmp_path / "a.xlsx"
    path.write_text("x")
    message = bad(path)
    assert ".jsonl" in message
    assert ".parquet" in message


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv", "a.jsonl.gz"])
def test_empty_file(tmp_path, name):
    path = tmp_path / name
    path.touch()
    assert "empty" in bad(path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'{"question": "q", "answer": "1"}\n{"question": "q2", \n', "line 2: not valid JSON"),
        ("b.jsonl", b'{"question": "q", "answer": "1"}\n[1, 2]\n', "line 2: a JSON list, expected an object"),
        ("c.jsonl", b'{"question": "q", "answer": "1"}\n\n{"question": "\xff"}\n', "line 3: not UTF-8"),
        ("a.json", b'[{"question": "q"},\n{"question" "r"}]', "line 2: not valid JSON"),
        ("b.json", b'{"question": "q"}', "holds a JSON dict, expected a list"),
        ("a.csv", b"question,answer\nq,1\nq2\n", "line 3: 1 fields, the header has 2"),
        ("b.csv", b'question,answer\nq,1\n"q2" x,2\n', "line 3: not valid CSV"),
        ("a.parquet", b"PAR1 and then nothing", "not a whole parquet file"),
        ("a.jsonl.gz", b"not gzip", "not a whole gzip file"),
        (
            "b.jsonl.gz",
            gzip.compress(b'{"question": "q", "answer": "1"}\n' * 9, mtime=0)[:-9],
            "not a whole gzip file",
        ),
    ],
)
def test_malformed(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content)
    assert expected in bad(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv"])
def test_lacking_column_lists_those_there(tmp_path, name):
    message = bad(write(tmp_path / name, [{"question": "q", "solution": "1"}]))
    assert "no column 'answer'; it has 'question', 'solution'" in message


def test_truncated_parquet(tmp_path):
    path = write(tmp_path / "a.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    assert "not a whole parquet file" in bad(path)


@pytest.fixture
def server(tmp_path) -> Iterator[tuple[str, Path]]:
    folder = tmp_path / "served"
    folder.mkdir()
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder))
    ) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}", folder
        http.shutdown()


def test_download(server, tmp_path):
    url, folder = server
    write(folder / "a.jsonl.gz", ROWS)
    path = download(f"{url}/a.jsonl.gz?download=true", tmp_path / "scratch")
    assert [values for _, values in read_records(path, COLUMNS)] == ROWS


def test_download_of_what_is_not_there(server, tmp_path):
    url, _ = server
    with pytest.raises(BadInput, match=r"b\.jsonl: the server answered 404"):
        download(f"{url}/b.jsonl", tmp_path)


def test_unreachable_server_is_worth_another_try(tmp_path):
    with pytest.raises(OSError, match="refused"):
        download("http://127.0.0.1:9/a.jsonl", tmp_path)
