"""What DVC says about each stage, and the order of the graph."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tasks import versioning
from tasks.config import STAGES, ConfigError
from tasks.tracking import FURTHER_MODELS, OUTPUTS
from tests.project import REPOSITORY, dvc, git, set_params


def dag(tree: Path) -> set[tuple[str, str]]:
    """Edges that `dvc dag` prints."""
    return set(re.findall(r'"(\w+)" -> "(\w+)"', dvc(tree, "dag", "--dot")))


def states(tree: Path) -> dict[str, str]:
    return {stage.name: stage.state for stage in versioning.plan(tree)}


def test_the_order_of_stages_is_one_of_the_graph() -> None:
    edges = dag(REPOSITORY)
    assert {name for edge in edges for name in edge} == set(STAGES)
    assert all(STAGES.index(before) < STAGES.index(after) for before, after in edges)
    assert edges == {
        (before, after) for after, needed in versioning.upstream(REPOSITORY).items() for before in needed
    }


def test_each_stage_publishes_the_folders_that_the_graph_says() -> None:
    assert {name: stage["outs"] for name, stage in versioning.stages(REPOSITORY).items()} == {
        n: [o] for n, o in OUTPUTS.items()
    } | {"model": [OUTPUTS["model"], FURTHER_MODELS]}


def test_the_projects_own_dvc_settings_are_those_given_to_new_projects() -> None:
    for name, text in versioning.SETTINGS.items():
        given = [line for line in (REPOSITORY / name).read_text().splitlines() if not line.startswith("#")]
        assert given == text.splitlines()


def test_dvc_is_initialised_where_it_is_not_without_touching_the_index(project: Path) -> None:
    git(project, "rm", "-r", "--quiet", ".dvc", ".dvcignore")
    git(project, "commit", "--quiet", "--message", "No DVC")
    shutil.rmtree(project / ".dvc", ignore_errors=True)
    index = git(project, "ls-files", "--stage")
    assert versioning.initialise(project) is True
    assert versioning.initialise(project) is False
    assert git(project, "ls-files", "--stage") == index
    assert dvc(project, "config", "core.analytics").strip() == "false"
    assert dvc(project, "config", "cache.type").strip() == "reflink,copy"


def test_before_the_first_run_every_stage_says_so(project: Path) -> None:
    assert [(stage.state, stage.reasons) for stage in versioning.plan(project)] == [
        ("stale", ["has not run here yet"])
    ] * len(STAGES)


def test_what_changed_is_named_and_what_depends_on_it_waits(finished: Path) -> None:
    assert set(states(finished).values()) == {"cached"}
    set_params(finished, rl__beta=0.04)
    plan = {stage.name: stage for stage in versioning.plan(finished)}
    assert plan["rl"].reasons == ["rl.beta: 0.0 → 0.04"]
    assert states(finished) == dict.fromkeys(STAGES[: STAGES.index("rl")], "cached") | {
        "rl": "stale",
        "evaluate": "downstream",
        "report": "downstream",
    }
    set_params(finished, rl__beta=0.0)
    (finished / "tasks" / "sft.py").write_text("# nothing\n")
    shutil.rmtree(finished / OUTPUTS["report"])
    plan = {stage.name: stage for stage in versioning.plan(finished)}
    assert plan["sft"].reasons == ["tasks/sft.py is modified"]
    assert plan["report"].reasons == ["data/reports/run is deleted"]


def test_settings_of_the_flow_make_no_stage_stale(finished: Path) -> None:
    set_params(finished, flow__retries=0)
    assert set(states(finished).values()) == {"cached"}


def test_running_changes_no_tracked_file_but_the_lock(finished: Path) -> None:
    assert git(finished, "status", "--porcelain") == ""
    assert git(finished, "log", "-1", "--name-only", "--format=").split() == ["dvc.lock"]


def test_from_a_stage_on_means_all_that_depends_on_it(project: Path) -> None:
    assert versioning.forced_stages(project, "rl", None) == {"rl", "evaluate", "report"}
    assert versioning.forced_stages(project, "prepare", None) == set(STAGES) - {"model"}
    assert versioning.forced_stages(project, None, "rl") == set()
    with pytest.raises(ConfigError, match="unknown stage 'evalute'; did you mean 'evaluate'"):
        versioning.forced_stages(project, None, "evalute")
    with pytest.raises(ConfigError, match="choose one"):
        versioning.forced_stages(project, "rl", "sft")
