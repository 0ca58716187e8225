"""The command line, run as a user does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from tasks.config import STAGES, load_params
from tasks.tracking import open_store
from tests.project import git, gradeline, set_params

NO_SERVER = {"PREFECT_API_URL": "http://127.0.0.1:1/api"}
"""Nothing listens there: a command that succeeds did not need a Prefect server."""


def test_help_names_the_commands(project: Path) -> None:
    shown = gradeline(project, "--help")
    assert shown.returncode == 0
    for command in ("run", "plan", "stages", "grade", "workspaces", "ui", "schema"):
        assert command in shown.stdout


def test_schema_describes_params_yaml(project: Path) -> None:
    schema = json.loads(gradeline(project, "schema").stdout)
    Draft202012Validator.check_schema(schema)
    valid = Draft202012Validator(schema)
    assert valid.is_valid(load_params(project / "params.yaml").to_dict())
    assert not valid.is_valid({"rl": {"betta": 0.04}})
    assert schema["$defs"]["RLConfig"]["properties"]["beta"]["description"]


def test_stages_shows_what_dvc_yaml_says(project: Path) -> None:
    set_params(project, sft__enabled=False)
    lines = gradeline(project, "stages").stdout
    rows = {
        cells[1].strip(): cells
        for line in lines.splitlines()
        if len(cells := line.split("│")) > 4 and cells[1].strip()
    }
    assert set(STAGES) <= set(rows)
    assert (rows["sft"][2].strip(), rows["rl"][2].strip()) == ("no", "yes")
    assert "data/models/rl" in rows["rl"][5]


def test_plan_says_what_is_stale_and_why(finished: Path) -> None:
    set_params(finished, rl__beta=0.04)
    shown = gradeline(finished, "plan").stdout
    assert "rl.beta: 0.0 → 0.04" in shown
    assert "rl comes first; runs if its output changes" in shown
    shown = gradeline(finished, "plan", "-S", "sft.num_steps=3", "--name", "other").stdout
    assert "sft.num_steps: 20 → 3" in shown


def test_a_run_with_nothing_to_do_needs_no_server_and_records_the_numbers(finished: Path) -> None:
    done = gradeline(finished, "run", **NO_SERVER)
    assert done.returncode == 0, done.stderr
    assert "every stage is cached" in done.stdout
    assert "rl     0.9" in done.stdout
    assert str(finished / "data/reports/run") not in done.stderr
    client, experiment = open_store(finished)
    newest = client.search_runs([experiment], order_by=["attributes.start_time DESC"])[0]
    assert newest.info.run_id in done.stdout
    assert newest.info.status == "FINISHED"
    assert newest.data.metrics["rl/score"] == 6.0
    assert all(newest.data.tags[f"stage.{name}"].startswith("cached:") for name in STAGES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-S", "rl.betta=1"], "unknown key 'rl.betta'; did you mean 'beta'?"),
        (
            ["run", "-S", "rl.num_generations=1"],
            "rl: num_generations 1 is no group for advantage_estimator group; give at least 2",
        ),
        (["run", "-S", "rl.beta"], "expected key=value"),
        (
            ["run", "-c", "tinny"],
            "recipe 'tinny': no such file, nor a name in configs/ (there: small) or configs/algorithms/ (there: none)",
        ),
        (["run", "--from", "evalute"], "unknown stage 'evalute'; did you mean 'evaluate'?"),
        (["run", "--only", "rl", "--from", "sft"], "choose one of the two"),
        (["workspaces", "prune"], "name the workspaces to remove"),
        (["workspaces", "prune", "nobody"], "workspace 'nobody': there is none"),
    ],
)
def test_bad_input_is_one_clean_message_and_code_2(project: Path, arguments: list[str], message: str) -> None:
    done = gradeline(project, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_configured_server_that_does_not_answer_is_named(project: Path) -> None:
    done = gradeline(project, "run", **NO_SERVER)
    assert done.returncode == 2
    assert "PREFECT_API_URL = http://127.0.0.1:1/api: no server answers" in done.stderr
    assert "Traceback" not in done.stderr


def test_outside_a_repository_or_project_it_says_so(project: Path) -> None:
    elsewhere = dict(os.environ) | {"PYTHONPATH": str(project)}
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "run"],
        cwd=project.parent,
        env=elsewhere,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "has a dvc.yaml; run gradeline inside a project" in done.stderr
    shutil.rmtree(project / ".git")
    done = gradeline(project, "run")
    assert done.returncode == 2
    assert "not a git repository with a commit; run `git init" in done.stderr


def test_a_project_without_dvc_gets_it(finished: Path) -> None:
    cache = finished / ".dvc" / "cache"
    shutil.move(cache, finished.parent / "cache")
    git(finished, "rm", "-r", "--quiet", "--force", ".dvc", ".dvcignore")
    shutil.rmtree(finished / ".dvc", ignore_errors=True)
    shown = gradeline(finished, "plan")
    assert shown.returncode == 0, shown.stderr
    assert (finished / ".dvc" / "config").is_file()


def test_workspaces_are_listed_and_pruned(project: Path) -> None:
    assert "no workspaces" in gradeline(project, "workspaces", "list").stdout
    gradeline(project, "plan", "-c", "small", "-S", "rl.beta=0.5", "--name", "mine")
    listed = gradeline(project, "workspaces", "list").stdout
    assert "mine" in listed
    assert "small rl.beta=0.5" in listed
    assert "removed mine" in gradeline(project, "workspaces", "prune", "--all").stdout
    assert "no workspaces" in gradeline(project, "workspaces", "list").stdout


def test_grade_tries_a_reward_with_the_trees_settings(project: Path) -> None:
    (project / "rows.jsonl").write_text('{"id": 3, "completion": "abc"}\n{"completion": "de"}\n')
    set_params(project, rewards={"format": {"pattern": "a.*"}})
    done = gradeline(project, "grade", "--reward", "format", "rows.jsonl", "--output", "graded.jsonl")
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 rows, mean format 0.5, 0 without a score: graded.jsonl" in done.stdout
    rows = [json.loads(line) for line in (project / "graded.jsonl").read_text().splitlines()]
    assert rows == [
        {"id": 3, "completion": "abc", "score": 1.0, "extracted": None, "reason": "matches the pattern"},
        {"completion": "de", "score": 0.0, "extracted": None, "reason": "does not match the pattern"},
    ]
    overridden = gradeline(
        project,
        "grade",
        "--reward",
        "format",
        "rows.jsonl",
        "--output",
        "o.jsonl",
        "-S",
        "rewards.format.pattern=d.",
    )
    assert "0.5" in overridden.stdout
    assert json.loads((project / "o.jsonl").read_text().splitlines()[1])["score"] == 1.0
    (project / "mine.py").write_text(
        "def mine(prompts, completions, **_):\n    return [1 for _ in completions]\n"
    )
    done = gradeline(project, "grade", "--reward", "mine.py:mine", "rows.jsonl", "--output", "m.jsonl")
    assert "mean mine.py:mine 1" in done.stdout
    (project / "rows.jsonl").write_text('{"completion": "abc"}\n')
    failed = gradeline(project, "grade", "--reward", "math", "rows.jsonl", "--output", "x.jsonl")
    assert failed.returncode == 2
    assert failed.stderr == "gradeline: rows.jsonl line 1: no 'answer'; it has completion\n"
