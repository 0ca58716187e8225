import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.config import PromptConfig
from training.data.shots import Shots
from training.data.splits import Row
from training.data.table import SCHEMA, write_table
from training.data.text import fill, unfill


def rows(number: int) -> list[tuple[str, Row]]:
    return [
        (f"{i:08x}", Row("train", i % 2, f"What is {{{i}}}?", f"it is {i}", str(i))) for i in range(number)
    ]


def test_round_trip_and_equal_bytes(tmp_path):
    prompt = PromptConfig(template="Q: {question} {{x}}", completion="{solution}\n#### {answer}")
    for name in ("a", "b"):
        write_table(tmp_path / name, rows(20_000), ["one", "two"], Shots(prompt, []))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    table = pq.read_table(tmp_path / "a")
    assert table.num_rows == 20_000
    assert table.slice(17_001, 1).to_pylist()[0] == {
        "id": "00004269",
        "prompt": "Q: What is {17001}? {{x}}",
        "completion": "it is 17001\n#### 17001",
        "answer": "17001",
        "source": "two",
        "level": None,
        "subject": None,
        "context": [],
    }


def test_an_empty_split_keeps_its_columns(tmp_path):
    write_table(tmp_path / "a", [], [], Shots(PromptConfig(), []))
    table = pq.read_table(tmp_path / "a")
    assert table.num_rows == 0
    assert table.schema.equals(SCHEMA)


@given(st.text(), st.text())
def test_texts_are_filled_in_as_they_are(solution, answer):
    assert (
        fill("{answer}|{solution}|{other}", solution=solution, answer=answer)
        == f"{answer}|{solution}|{{other}}"
    )


def test_braces_in_a_question_are_no_fields():
    assert fill("{question}{question}", question="{question} {0} {") == "{question} {0} {{question} {0} {"


@pytest.mark.parametrize(
    ("template", "question"),
    [("{question}", "a {b}?"), ("Q: {question}\nThink.", "Q: a?"), ("{question}, again: {question}", None)],
)
def test_a_question_is_found_in_its_prompt(template, question):
    prompt = fill(template, question=question or "a?")
    assert unfill(template, prompt) == (question or prompt)
    assert unfill("Q: {question}", "another prompt") == "another prompt"
