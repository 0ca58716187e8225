"""The examples of docs/rewards.md, run."""

import doctest
import json

from tasks.grade import grade_file
from tests.shared import ROOT
from tests.training.rewards.test_judge import Endpoint, serving
from training.config import RewardsConfig

PAGE = ROOT / "docs" / "rewards.md"


def test_the_pages_examples_are_true():
    with serving(Endpoint()) as endpoint:
        ran = doctest.testfile(str(PAGE), module_relative=False, globs={"endpoint": endpoint.url})
    assert ran.failed == 0
    assert ran.attempted >= 10


def test_the_pages_rows_are_graded_as_it_shows(tmp_path):
    rows, graded = (part.split("```")[0].strip() for part in PAGE.read_text().split("```jsonl\n")[1:])
    (tmp_path / "rows.jsonl").write_text(rows)
    grade_file("math", RewardsConfig(), tmp_path / "rows.jsonl", tmp_path / "graded.jsonl")
    got = [json.loads(line) for line in (tmp_path / "graded.jsonl").read_text().splitlines()]
    assert got == [json.loads(line) for line in graded.splitlines()]
