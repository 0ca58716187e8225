"""`gradeline grade`'s work: rows in, rows out."""

import json
import tracemalloc

import pytest

from tasks.grade import grade_file
from training.config import MathRewardConfig, RewardsConfig
from training.errors import BadInput


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def grade(tmp_path, name, rows, config=None):
    output = tmp_path / "out.jsonl"
    said = grade_file(name, config or RewardsConfig(), write(tmp_path / "in.jsonl", rows), output)
    return said, [json.loads(line) for line in output.read_text().splitlines()]


def even(prompts, completions, level, **columns):
    return [None if one is None else float(one % 2 == 0) for one in level]


async def later(prompts, completions, **columns):
    return [float(len(prompt)) for prompt in prompts]


def test_a_row_that_takes_too_long_has_no_score_and_the_rest_goes_on(tmp_path):
    rows = [
        {"id": 7, "completion": "so x is \\boxed{2x}", "answer": "x+x", "level": [1]},
        {"completion": r"\boxed{\int_0^1 e^{-x^2\sin x}dx}", "answer": "0.8"},
        {"completion": "nothing", "answer": "1"},
        {"completion": "The answer is 1,234.", "answer": "$1234", "score": "old"},
    ]
    said, got = grade(tmp_path, "math", rows, RewardsConfig(math=MathRewardConfig(timeout=2.0)))
    assert got == [
        rows[0] | {"score": 1.0, "extracted": "2x", "reason": "equals 'x+x'"},
        rows[1] | {"score": None, "extracted": r"\int_0^1 e^{-x^2\sin x}dx", "reason": "not compared with '0.8' within 2 s"},
        rows[2] | {"score": 0.0, "extracted": None, "reason": "no answer found"},
        rows[3] | {"score": 1.0, "extracted": "1,234", "reason": "equals '$1234'"},
    ]  # fmt: skip
    assert said == {"rows": 4, "ungraded": 1, "mean": pytest.approx(2 / 3)}


def test_a_users_reward_without_reasons_works_sync_or_async(tmp_path):
    rows = [{"completion": "a", "level": 2, "prompt": "xyz"}, {"completion": "b", "level": 3}]
    _, got = grade(tmp_path, f"{__name__}:even", rows)
    assert [(row["score"], row["extracted"], row["reason"]) for row in got] == [
        (1.0, None, ""),
        (0.0, None, ""),
    ]
    assert [row["score"] for row in grade(tmp_path, f"{__name__}:later", rows)[1]] == [3.0, 0.0]


def test_bad_rows_are_named_by_their_lines_and_nothing_is_written(tmp_path):
    good = {"completion": "1", "answer": "1"}
    rows = [good, "{oops", "", {"completion": "1"}, [1], {"completion": 1, "answer": "1"}, good]
    with pytest.raises(BadInput) as error:
        grade(tmp_path, "math", rows)
    lines = str(error.value).replace(str(tmp_path), "").splitlines()
    assert lines == [
        "/in.jsonl line 2: not JSON: Expecting property name enclosed in double quotes at character 2",
        "/in.jsonl line 4: no 'answer'; it has completion",
        "/in.jsonl line 5: list, expected an object with completion, answer",
        "/in.jsonl line 6: 'completion' is int, expected text",
    ]
    assert not (tmp_path / "out.jsonl").exists()


def test_of_many_bad_rows_some_are_shown(tmp_path):
    with pytest.raises(BadInput, match=r"line 5: not JSON: .*\sand 7 more"):
        grade(tmp_path, "format", ["nonsense"] * 12)


def test_a_file_that_is_not_there_and_one_that_would_be_overwritten_are_refused(tmp_path):
    with pytest.raises(BadInput, match="no such file; expected rows as JSON"):
        grade_file("format", RewardsConfig(), tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    file = write(tmp_path / "in.jsonl", [{"completion": "a"}])
    with pytest.raises(BadInput, match="the file that is read"):
        grade_file("format", RewardsConfig(), file, file)


def test_overlong_asks_for_the_column_that_it_reads(tmp_path):
    with pytest.raises(BadInput, match="line 1: no 'completion_ids'; it has completion"):
        grade(tmp_path, "overlong", [{"completion": "a"}])
    config = RewardsConfig.model_validate({"overlong": {"max_length": 4, "buffer": 2}})
    _, got = grade(tmp_path, "overlong", [{"completion": "a", "completion_ids": [1, 2, 3]}], config)
    assert (got[0]["score"], got[0]["reason"]) == (-0.5, "3 tokens, 2 of 4 are free")


def test_memory_does_not_grow_with_the_file(tmp_path):
    file = write(tmp_path / "in.jsonl", ({"completion": f"{i} " * 100} for i in range(20_000)))
    assert file.stat().st_size > 10_000_000
    tracemalloc.start()
    said = grade_file("format", RewardsConfig(), file, tmp_path / "out.jsonl")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert said["rows"] == 20_000
    assert peak < 4_000_000
