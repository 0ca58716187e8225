import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from training.config import SourceConfig
from training.data.formats import Example
from training.data.sources import read_examples
from training.errors import BadInput

SHARED = Path(os.environ.get("GRADELINE_SHARED", Path(__file__).parents[4] / "shared"))
GSM8K = SHARED / "data" / "gsm8k"


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def source(**settings: object) -> SourceConfig:
    return SourceConfig(**{"kind": "file", **settings})


def bad(config: SourceConfig) -> str:
    with pytest.raises(BadInput) as caught:
        list(read_examples(config, seed=1))
    return str(caught.value)


def test_reasoning_gym_answers_are_right():
    config = source(
        kind="reasoning_gym", task="chain_sum", size=50, settings={"min_terms": 2, "max_terms": 2}
    )
    examples = list(read_examples(config, seed=3))
    assert len(examples) == 50
    for example in examples:
        expression = example.question.partition("problem: ")[2].removesuffix("=")
        assert int(example.answer) == eval(expression)
        assert example.solution == example.answer


def test_reasoning_gym_seed():
    def questions(seed: int, own: int | None = None) -> list[str]:
        config = source(kind="reasoning_gym", task="chain_sum", size=5, seed=own)
        return [example.question for example in read_examples(config, seed)]

    assert questions(1) == questions(1) != questions(2)
    assert questions(1, own=2) == questions(2)


def test_reasoning_gym_metadata_is_a_column():
    config = source(kind="reasoning_gym", task="gsm_symbolic", size=2, columns={"solution": "answer_cot"})
    for example in read_examples(config, seed=1):
        assert example.solution.endswith(f"#### {example.answer}")


def test_unknown_task_names_the_nearest():
    assert "'chain_smu': unknown; did you mean 'chain_sum'" in bad(
        source(kind="reasoning_gym", task="chain_smu", size=1)
    )


def test_unknown_and_refused_settings():
    task = {"kind": "reasoning_gym", "task": "chain_sum", "size": 1}
    message = bad(source(**task, settings={"max_term": 2}))
    assert "unknown setting 'max_term'" in message
    assert "max_terms" in message
    assert "min_terms must be positive" in bad(source(**task, settings={"min_terms": 0}))


def test_pattern_solution_and_numbers(tmp_path):
    path = jsonl(
        tmp_path / "a.jsonl",
        {"q": " 2 * 3? ", "a": "2 * 3 = <<2*3=6>>6\n#### 6"},
        {"q": "1 + 1?", "a": "#### 1,002 "},
    )
    config = source(
        path=str(path),
        columns={"question": "q", "answer": "a"},
        answer_pattern=r"####\s*(.+)",
        solution_remove="<<[^>]*>>",
    )
    assert list(read_examples(config, seed=1)) == [
        Example("2 * 3?", "2 * 3 = 6\n#### 6", "6"),
        Example("1 + 1?", "#### 1,002", "1,002"),
    ]


def test_numbers_are_written_plainly(tmp_path):
    pq.write_table(pa.table({"question": ["a", "b"], "answer": [18.0, 0.5]}), tmp_path / "a.parquet")
    assert [e.answer for e in read_examples(source(path=str(tmp_path / "a.parquet")), 1)] == ["18", "0.5"]


def test_size_limits_the_rows_read(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *({"question": f"q{i}", "answer": i} for i in range(5)))
    assert [e.answer for e in read_examples(source(path=str(path), size=3), 1)] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"question": "q", "answer": None}, "column 'answer' is null"),
        ({"question": "q", "answer": float("nan")}, "column 'answer' is null"),
        ({"question": "q", "answer": "  "}, "column 'answer' is empty"),
        ({"question": None, "answer": "1"}, "column 'question' is null"),
        (
            {"question": "q", "answer": ["1"]},
            "column 'answer' holds a list, ['1']; accepted: a text or a number",
        ),
        ({"question": "q\ud800", "answer": "1"}, "column 'question' holds '\\ud800'"),
    ],
)
def test_unusable_cell_names_file_line_and_column(tmp_path, row, expected):
    path = jsonl(tmp_path / "a.jsonl", {"question": "fine", "answer": "1"}, row)
    assert f"{path}, line 2: {expected}" in bad(source(path=str(path)))


def test_null_in_parquet_names_the_row(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"question": ["a", "b", "c"], "answer": ["1", "2", None]}), path)
    assert f"{path}, row 3: column 'answer' is null" in bad(source(path=str(path)))


def test_pattern_that_finds_nothing_names_the_row(tmp_path):
    path = jsonl(
        tmp_path / "a.jsonl", {"question": "q", "answer": "#### 1"}, {"question": "r", "answer": "none"}
    )
    message = bad(source(path=str(path), answer_pattern=r"####\s*(.+)"))
    assert "line 2" in message
    assert "finds no answer in column 'answer', 'none'" in message


@pytest.mark.parametrize(
    ("pattern", "expected"), [("(", "is not a regular expression"), ("####", "has no group")]
)
def test_pattern_is_checked_before_any_reading(pattern, expected):
    with pytest.raises(ValidationError, match=expected):
        source(path="a.jsonl", answer_pattern=pattern)


def test_file_with_blank_lines_only(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    assert "holds no rows" in bad(source(path=str(tmp_path / "a.jsonl")))


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A data set in a local folder, which `load_dataset` takes where it takes a hub id."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    jsonl(
        tmp_path / "set" / "train.jsonl", {"question": "q", "answer": "1"}, {"question": "r", "answer": "2"}
    )
    return tmp_path / "set"


def test_hub(hub):
    config = source(kind="hub", path=str(hub), revision="v1")
    assert list(read_examples(config, 1)) == [Example("q", "1", "1"), Example("r", "2", "2")]


def test_hub_with_unknown_split_or_column(hub):
    config = {"kind": "hub", "path": str(hub), "revision": "v1"}
    assert "split 'dev'" in bad(source(**config, hub_split="dev"))
    assert "no column 'key'; it has 'question', 'answer'" in bad(source(**config, columns={"answer": "key"}))


def test_hub_needs_a_revision():
    with pytest.raises(ValidationError, match="needs revision"):
        source(kind="hub", path="openai/gsm8k")


@pytest.mark.skipif(
    not GSM8K.is_dir(), reason=f"{GSM8K} is not there (GRADELINE_SHARED names the folder around data/)"
)
@pytest.mark.parametrize(("name", "rows"), [("train", 7473), ("test", 1319)])
def test_gsm8k_in_full(name, rows):
    config = source(
        path=str(GSM8K / f"{name}.jsonl"), answer_pattern=r"####\s*(.+)", solution_remove="<<[^>]*>>"
    )
    examples = list(read_examples(config, seed=1))
    assert len(examples) == rows
    assert all(example.solution.endswith(f"#### {example.answer}") for example in examples)
    assert not any("<<" in example.solution for example in examples)
    assert all(
        float(example.answer.replace(",", "")) == int(example.answer.replace(",", "")) for example in examples
    )
