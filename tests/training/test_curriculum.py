"""Solve rates choose and order RL's problems: by hand, and in the loop."""

import json

import pytest

from tests.training.test_rl import make
from training.config import CurriculumConfig
from training.curriculum import SolveRate, choose, histogram, in_order, read_rates, write_rates
from training.errors import BadInput

SOLVED = {"never": 0, "seldom": 1, "half": 4, "mostly": 7, "always": 8}
RATES = {id_: SolveRate(id_, solved, 8) for id_, solved in SOLVED.items()}
IDS = ["mostly", "always", "unknown", "seldom", "never", "half"]


def kept(**settings):
    indices, counts = choose(IDS, RATES, CurriculumConfig(enabled=True, **settings))
    return [IDS[i] for i in indices], counts


def test_problems_never_and_always_solved_are_left_out_and_counted():
    assert kept() == (
        ["mostly", "seldom", "half"],
        {"kept": 3, "too_hard": 1, "too_easy": 1, "unrated": 1},
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"order": "easy_first"}, ["mostly", "half", "seldom"]),
        ({"order": "hard_first"}, ["seldom", "half", "mostly"]),
        ({"above": 0.125, "below": 0.875}, ["half"]),
        ({"above": None, "below": 0.5}, ["seldom", "never"]),
        ({"unrated": "keep", "order": "easy_first"}, ["mostly", "unknown", "half", "seldom"]),
        (
            {"above": None, "below": None, "order": "hard_first"},
            ["never", "seldom", "half", "mostly", "always"],
        ),
    ],
)
def test_bounds_and_orders(settings, expected):
    assert kept(**settings)[0] == expected


def test_nothing_left_is_refused_with_the_histogram():
    with pytest.raises(BadInput) as error:
        kept(above=0.9, below=0.95)
    assert "kept 0, too_hard 4, too_easy 1, unrated 1" in str(error.value)
    assert "problems by solve rate: 0: 1, 0.1: 1, 0.5: 1, 0.8: 1, 1: 1" in str(error.value)
    assert histogram([]) == "problems by solve rate: none"


@pytest.mark.parametrize(
    ("rows", "steps", "size"), [(100, 5, 4), (20, 5, 4), (7, 5, 4), (5, 3, 4), (4, 3, 4)]
)
def test_batches_go_through_the_rows_in_order(rows, steps, size):
    batches = [in_order(step, size, steps, rows) for step in range(steps)]
    seen = [row for batch in batches for row in batch]
    assert all(len(set(batch)) == size for batch in batches)
    first_round = seen[: min(rows, steps * size)]
    assert first_round == sorted(first_round)
    if rows > steps * size:
        assert len(set(seen)) == steps * size
        assert seen[-1] >= rows - rows / (steps * size) - 1  # the last batches reach the last rows
    else:
        assert set(seen) == set(range(rows))
        assert max(seen.count(row) for row in range(rows)) - min(seen.count(row) for row in range(rows)) <= 1


def test_rates_are_read_as_written_and_from_single_samples(tmp_path):
    write_rates(tmp_path / "rates.parquet", RATES.values())
    assert read_rates(tmp_path / "rates.parquet") == RATES
    assert RATES["seldom"].rate == 0.125
    samples = [{"id": "a", "solved": right, "samples": 1} for right in (1, 0, 0)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    assert read_rates(tmp_path / "samples.jsonl") == {"a": SolveRate("a", 1, 3)}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"id": "a", "solved": 3, "samples": 2},
            "line 1: solved 3 of samples 2; expected at least one sample",
        ),
        ({"id": "a", "solved": 0, "samples": 0}, "solved 0 of samples 0"),
        ({"id": "a", "solved": "x", "samples": 1}, "column 'solved': holds 'x', expected a whole number"),
        ({"id": "a", "solved": -1, "samples": 1}, "column 'solved': holds -1"),
        ({"id": "a", "samples": 1}, "no column 'solved'"),
    ],
)
def test_other_rates_are_refused(tmp_path, row, message):
    (tmp_path / "rates.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(BadInput, match=message):
        read_rates(tmp_path / "rates.jsonl")


def test_the_loop_sees_the_problems_in_their_order(tokenizer, tmp_path):
    """Eight problems, three steps of two: every 8/6th; without an order they are drawn."""
    ordered = make(tokenizer, tmp_path, curriculum=CurriculumConfig(enabled=True, order="easy_first"))
    seen = [problem.prompt for step in range(3) for problem in ordered.roll_out(step).problems]
    assert seen == [f"{i} + {i + 1} =" for i in (0, 1, 2, 4, 5, 6)]
    drawn = [make(tokenizer, tmp_path, curriculum=CurriculumConfig(enabled=on)) for on in (False, True)]
    prompts = [[problem.prompt for problem in trainer.roll_out(0).problems] for trainer in drawn]
    assert prompts[0] == prompts[1]
