"""What the documents show is what was measured and what is there."""

import json

import pytest

from benchmarks import data, graders, learning, overhead, recipe
from benchmarks.pages import RESULTS, shown
from tests.shared import ROOT
from training.rewards import BUILT_IN


def test_the_readmes_table_is_the_measured_one():
    result = json.loads((RESULTS / "arithmetic-smollm2.json").read_text())
    assert shown(recipe.PAGE, recipe.SECTION) == recipe.table(result)


@pytest.mark.parametrize("measured", [data, graders, overhead], ids=lambda module: module.SECTION)
def test_the_pages_sections_are_the_measured_ones(measured):
    assert shown(measured.PAGE, measured.SECTION) == (
        measured.section(json.loads(measured.RAW.read_text())) if measured.RAW.is_file() else ""
    )


@pytest.mark.parametrize("task", learning.TASKS.values(), ids=list(learning.TASKS))
def test_the_results_pages_are_the_measured_ones(task):
    raw, page = RESULTS / f"{task.curves}.json", ROOT / "docs" / f"{task.page}.md"
    assert raw.is_file() == page.is_file()
    if raw.is_file():
        assert page.read_text() == learning.page(task, json.loads(raw.read_text()))


def test_the_rewards_page_names_every_reward():
    page = (ROOT / "docs" / "rewards.md").read_text()
    assert [name for name in [*BUILT_IN, "model"] if f"| `{name}` |" not in page] == []


def test_the_readme_lists_every_recipe():
    readme = (ROOT / "README.md").read_text()
    assert [p.stem for p in (ROOT / "configs").rglob("*.yaml") if f"`{p.stem}`" not in readme] == []


def test_the_algorithms_page_names_every_algorithms_file():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    files = (ROOT / "configs" / "algorithms").glob("*.yaml")
    assert [p.stem for p in files if f"`{p.stem}`" not in page] == []


def test_every_algorithm_is_measured():
    assert set(learning.ALGORITHMS.values()) == {
        p.stem for p in (ROOT / "configs" / "algorithms").glob("*.yaml")
    }


def test_the_default_recipe_gained_what_is_asked_of_it():
    """Pass@1 from base to RL, with each of at least three seeds."""
    runs = json.loads((RESULTS / "arithmetic-smollm2.json").read_text())["runs"]
    gains = [run["metrics"]["rl/pass_at_1"] - run["metrics"]["base/pass_at_1"] for run in runs]
    assert len(gains) >= 3
    assert min(gains) >= 0.4
