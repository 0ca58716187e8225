"""What becomes of a row of each format: rows worked by hand, the real sets in full, and rows that can't be used."""

import gzip
import json
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.shared import SHARED, needs_shared
from training.config import SourceConfig
from training.config.data import SourceFormat
from training.data.formats import FORMATS, Example, license_of
from training.data.sources import Account, read_examples
from training.errors import BadInput
from training.rewards.math import MathReward

NESTED_MATH = {
    "format": "math",
    "columns": {
        "question": "reward_model.ground_truth.question",
        "solution": "reward_model.ground_truth.solution",
    },
    "question_remove": r" Let's think step by step and output the final answer within \\boxed{}\.$",
}


def source(path="rows.jsonl", **settings) -> SourceConfig:
    return SourceConfig(kind="file", path=str(path), **settings)


def read(tmp_path: Path, *rows: object, **settings: object) -> list[Example]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_examples(source(**settings), 1, {"rows.jsonl": path}))


def said(role, content):
    return {"role": role, "content": content}


def test_every_format_that_settings_accept_is_there():
    assert set(FORMATS) == set(get_args(SourceFormat))


BRIEF = said("system", "Be brief.")
EARLIER = (said("user", "Hi"), said("assistant", "Hello"))


@pytest.mark.parametrize(
    ("name", "row", "example"),
    [
        (
            "gsm8k",
            {"question": "2 * 3?", "answer": "2 * 3 = <<2*3=6>>6\n#### 6"},
            Example("2 * 3?", "2 * 3 = 6\n#### 6", "6"),
        ),
        (
            "math",
            {"problem": "1/2?", "level": "Level 2", "type": "Algebra", "solution": r"\boxed{\frac{1}{2}}."},
            Example("1/2?", r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}", "Level 2", "Algebra"),
        ),
        (
            "math500",
            {"problem": "p", "solution": "s", "answer": "3", "subject": "Algebra", "level": 2},
            Example("p", "s", "3", "Level 2", "Algebra"),
        ),
        ("aime", {"id": 60, "problem": "p", "answer": "025"}, Example("p", "025", "025")),
        ("amc", {"question": "p", "answer": 27.0}, Example("p", "27", "27")),
        (
            "countdown",
            {"nums": [44, 19, 35], "target": 98},
            Example(
                "Using the numbers [44, 19, 35], create an equation that equals 98. You can use basic arithmetic "
                "operations (+, -, *, /) and each number must be used exactly once.",
                None,
                '{"numbers": [44, 19, 35], "target": 98}',
            ),
        ),
        (
            "openai",
            {"messages": [BRIEF, *EARLIER, said("user", "2+2?"), said("assistant", "4")]},
            Example("2+2?", "4", None, context=(BRIEF, *EARLIER)),
        ),
        (
            "openai",
            {"messages": [said("user", [{"type": "text", "text": "2+2?"}]), said("assistant", "4")]},
            Example("2+2?", "4", None),
        ),
        (
            "sharegpt",
            {
                "conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}],
                "system": "Be brief.",
            },
            Example("2+2?", "4", None, context=(BRIEF,)),
        ),
        (
            "alpaca",
            {"instruction": "Translate.", "input": "yes", "output": "oui"},
            Example("Translate.\nyes", "oui", None),
        ),
        (
            "alpaca",
            {"instruction": "2+2?", "input": "", "output": "4", "system": "Be brief.", "history": [["Hi", "Hello"]]},
            Example("2+2?", "4", None, context=(BRIEF, *EARLIER)),
        ),
    ],
)  # fmt: skip
def test_a_row_becomes(tmp_path, name, row, example):
    assert read(tmp_path, row, format=name) == [example]


def test_chats_may_have_answers(tmp_path):
    row = {"messages": [said("user", "2+2?"), said("assistant", "It is 4.")], "key": 4, "hard": 3}
    [example] = read(tmp_path, row, format="openai", columns={"answer": "key", "level": "hard"})
    assert (example.solution, example.answer, example.level) == ("It is 4.", "4", "3")


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("gsm8k", {"question": "q", "answer": "no mark"}, r"answer_pattern '####\\s*(.+)' finds no answer in column 'answer'"),
        ("gsm8k", {"question": "q"}, "no column 'answer'; it has 'question'"),
        ("math", {"problem": "p", "solution": "it is 3"}, r"column 'solution': no answer in a \boxed{} in 'it is 3'"),
        ("math", {"problem": "p", "solution": ["s"]}, "column 'solution' holds a list, ['s']; accepted: a text or a number"),
        ("math500", {"problem": "p", "solution": "s", "answer": ""}, "column 'answer' is empty"),
        ("aime", {"answer": 1}, "no column 'problem' or 'question'; it has 'answer'"),
        ("aime", {"problem": "p\ud800", "answer": 1}, "column 'problem' holds '\\ud800', half of a surrogate pair"),
        ("countdown", {"nums": ["a"], "target": 1}, "column 'nums' holds ['a']; accepted: a list of whole numbers"),
        ("countdown", {"nums": [], "target": 1}, "column 'nums' holds []"),
        ("countdown", {"nums": [1, True], "target": 1}, "column 'nums' holds [1, True]"),
        ("countdown", {"nums": [1], "target": 1.5}, "column 'target' holds 1.5; accepted: a whole number"),
        ("humaneval", {"prompt": 3, "canonical_solution": "", "test": "", "entry_point": "f"}, "column 'prompt' holds 3; accepted: a text"),
        ("mbpp", {"prompt": "p", "code": "def (", "test_imports": [], "test_list": ["assert f()"]}, "not such a row as the format says"),
        ("mbpp", {"prompt": "p", "code": "", "test_imports": [], "test_list": [1]}, "column 'test_list' holds [1]"),
        ("openai", {"messages": "hi"}, "column 'messages': holds 'hi'; expected a list of messages"),
        ("openai", {"messages": []}, "column 'messages': holds an empty list"),
        ("openai", {"messages": ["hi"]}, "column 'messages': holds 'hi'; expected a text, or messages with role"),
        ("openai", {"messages": [said("tool", "x")]}, "a message's role is 'tool'; accepted: system, user"),
        ("openai", {"messages": [said(None, "x")]}, "a message's role is None"),
        ("openai", {"messages": [said(["user"], "x")]}, "a message's role is ['user']"),
        ("openai", {"messages": [said("user", "a"), said("assistant", " ")]}, "column 'messages': holds ' '"),
        ("openai", {"messages": [said("user", "a"), said("assistant", None)]}, "column 'messages': holds None"),
        ("openai", {"messages": [said("user", "\ud800"), said("assistant", "b")]}, "half of a surrogate pair"),
        ("openai", {"messages": [said("user", [{"type": "image_url"}]), said("assistant", "b")]}, "holds [{'type': 'image_url'}]"),
        ("openai", {"messages": [said("user", "a")]}, "its last message is the user's, expected the assistant's"),
        ("openai", {"messages": [said("assistant", "a")]}, "message 1 is the assistant's, expected the user's"),
        ("openai", {"messages": [said("user", "a"), said("user", "b"), said("assistant", "c")]}, "message 2 is the user's, expected the assistant's"),
        ("openai", {"messages": [BRIEF]}, "its last message is the system's"),
        ("sharegpt", {"conversations": [{"from": "observation", "value": "x"}]}, "a message's role is 'observation'"),
        ("alpaca", {"instruction": "", "output": "x"}, "column 'instruction' is empty"),
        ("alpaca", {"instruction": "a", "output": "x", "history": "no"}, "column 'history' holds 'no'; accepted: pairs"),
        ("alpaca", {"instruction": "a", "output": "x", "history": [["one"]]}, "column 'history' holds ['one']"),
    ],
)  # fmt: skip
def test_a_bad_row_names_file_line_column_and_value(tmp_path, name, row, expected):
    with pytest.raises(BadInput) as caught:
        read(tmp_path, row, format=name)
    assert str(caught.value).startswith("rows.jsonl, line 1: ")
    assert expected in str(caught.value)


def test_bad_rows_may_be_left_out_up_to_a_number(tmp_path):
    rows = [{"problem": f"p{i}", "solution": f"\\boxed{{{i if i % 4 else ''}}}"} for i in range(8)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    account = Account()
    allowed = source(path, format="math", skip_bad_rows=2)
    assert len(list(read_examples(allowed, 1, None, account))) == 6
    assert (account.rows_read, account.bad_rows, len(account.bad_examples)) == (8, 2, 2)
    assert "line 1: column 'solution'" in account.bad_examples[0]
    with pytest.raises(BadInput, match=r"line 5: .*one more than skip_bad_rows = 1"):
        list(read_examples(source(path, format="math", skip_bad_rows=1), 1))


def test_rows_by_level_and_type(tmp_path):
    rows = [
        {"problem": f"{t} {n}", "solution": r"\boxed{1}", "level": f"Level {n}", "type": t}
        for n in (1, 2, 3)
        for t in ("Algebra", "Geometry")
    ]
    found = read(tmp_path, *rows, format="math", where={"level": ["Level 1", "Level 3"], "type": ["Algebra"]})
    assert [(e.level, e.subject) for e in found] == [("Level 1", "Algebra"), ("Level 3", "Algebra")]
    with pytest.raises(
        BadInput, match=r"where.type: no row has 'Algbra' in column 'type'; there are 'Algebra'"
    ):
        read(tmp_path, *rows, format="math", where={"type": ["Algebra", "Algbra"]})
    with pytest.raises(BadInput, match=r"line 1: no column 'kind'; it has 'problem'"):
        read(tmp_path, *rows, format="math", where={"kind": ["Algebra"]})
    assert len(read(tmp_path, *rows, format="math", size=1, where={"type": ["Geometry"]})) == 1


def test_columns_by_part_and_within_cells(tmp_path):
    row = {"extra": {"q": "2+2?", "list": [{"a": 4}]}}
    columns = {"question": "extra.q", "answer": "extra.list.0.a"}
    assert read(tmp_path, row, columns=columns) == [Example("2+2?", "4", "4")]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    [example] = read_examples(source(tmp_path / "rows.parquet", columns=columns), 1)
    assert example.answer == "4"
    with pytest.raises(BadInput, match=r"no column 'extra.b.c'; at 'extra' it has 'q', 'list'"):
        read(tmp_path, row, columns={**columns, "answer": "extra.b.c"})
    with pytest.raises(
        BadInput, match=r"columns.answr: format columns has no such part; accepted: question, answer"
    ):
        read(tmp_path, row, columns={"answr": "a"})


@pytest.mark.parametrize("ending", ["jsonl.gz", "json.gz", "csv.gz"])
def test_every_text_format_may_be_compressed(tmp_path, ending):
    text = {
        "jsonl.gz": '{"nums": [1, 2], "target": 3}\n',
        "json.gz": '[{"nums": [1, 2], "target": 3}]',
        "csv.gz": 'nums,target\n"[1, 2]",3\n',
    }[ending]
    (tmp_path / f"rows.{ending}").write_bytes(gzip.compress(text.encode()))
    [example] = read_examples(source(tmp_path / f"rows.{ending}", format="countdown"), 1)
    assert example.answer == '{"numbers": [1, 2], "target": 3}'


def test_licences_are_the_formats_unless_stated():
    assert license_of(source(format="gsm8k")) == "MIT"
    assert license_of(source(format="gsm8k", license="mine")) == "mine"
    assert license_of(source(format="openai")) is None


def test_a_tasks_format_needs_the_task():
    with pytest.raises(ValueError, match="format reasoning_gym is for kind reasoning_gym"):
        source(format="reasoning_gym")


@needs_shared
@pytest.mark.parametrize(
    ("path", "rows", "settings"),
    [
        ("gsm8k/train.jsonl", 7473, {"format": "gsm8k"}),
        ("gsm8k/test.jsonl", 1319, {"format": "gsm8k"}),
        ("math/train.parquet", 7498, {**NESTED_MATH, "skip_bad_rows": 2}),
        ("math/test.parquet", 5000, NESTED_MATH),
        ("math500/test.jsonl", 500, {"format": "math500"}),
        ("competition/aime24.jsonl", 30, {"format": "aime"}),
        ("competition/aime25.jsonl", 30, {"format": "aime"}),
        ("competition/amc23.jsonl", 40, {"format": "amc"}),
    ],
)
def test_the_real_sets_in_full(path, rows, settings):
    """Every answer is the one that the grader finds in the solution."""
    examples = list(read_examples(source(SHARED / path, **settings), 1))
    assert len(examples) == rows
    assert not any("think step by step" in example.question for example in examples)
    solutions, answers = [str(e.solution) for e in examples], [str(e.answer) for e in examples]
    scores = MathReward(5)([""] * rows, solutions, answer=answers)
    assert scores.count(1.0) == rows


@needs_shared
def test_math_by_level_and_type_has_the_sets_own_counts():
    settings = {**NESTED_MATH, "where": {"level": ["Level 5"], "type": ["Algebra"]}}
    examples = list(read_examples(source(SHARED / "math/test.parquet", **settings), 1))
    assert len(examples) == 307
    assert {(e.level, e.subject) for e in examples} == {("Level 5", "Algebra")}
