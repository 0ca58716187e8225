"""What MLflow holds after `dvc repro` alone, and how runs left open are closed."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mlflow.entities import Run

from tasks.config import STAGES, Params, load_params
from tasks.tracking import (
    OUTPUTS,
    Pipeline,
    close_dead_runs,
    open_store,
    origin,
    output_digest,
    run_that_made,
    run_url,
)
from tests.project import REPOSITORY, behave, dvc, git, set_params


def runs(tree: Path, kind: str) -> list[Run]:
    """All runs of a kind, the newest first."""
    client, experiment = open_store(tree)
    return list(
        client.search_runs(
            [experiment], f"tags.`gradeline.kind` = '{kind}'", order_by=["attributes.start_time DESC"]
        )
    )


def test_dvc_repro_alone_gives_one_finished_parent_with_every_stage_in_it(finished: Path) -> None:
    (parent,) = runs(finished, "pipeline")
    stages = {run.data.tags["stage"]: run for run in runs(finished, "stage")}
    assert parent.info.status == "FINISHED"
    assert set(stages) == set(STAGES)
    assert {run.data.tags["mlflow.parentRunId"] for run in stages.values()} == {parent.info.run_id}
    for name, run in stages.items():
        assert parent.data.tags[f"stage.{name}"] == f"ran:{run.info.run_id}"
        assert run.data.tags["output_digest"] == output_digest(finished / OUTPUTS[name])
        assert run.data.tags["git_dirty"] == "false"
        assert parent.data.metrics[f"{name}/score"] == run.data.metrics["score"]
    assert parent.data.params["rl.optimizer.learning_rate"] == "1e-05"


def test_a_second_dvc_repro_ends_finished_though_its_last_stages_were_cached(finished: Path) -> None:
    set_params(finished, rl__beta=0.5)
    dvc(finished, "repro", "rl")
    parent = runs(finished, "pipeline")[0]
    assert parent.info.status == "FINISHED"
    origins = {name: parent.data.tags.get(f"stage.{name}", "").split(":")[0] for name in STAGES}
    assert origins == dict.fromkeys(STAGES[: STAGES.index("rl")], "cached") | {
        "rl": "ran",
        "evaluate": "",
        "report": "",
    }
    assert "evaluate/score" not in parent.data.metrics  # its output is older than this run


def test_a_cached_output_is_traced_to_the_run_that_made_it(finished: Path) -> None:
    made = {run.data.tags["stage"]: run.info.run_id for run in runs(finished, "stage")}
    assert {name: run_that_made(finished, name) for name in STAGES} == made
    parent = Pipeline.start(finished, load_params(finished / "params.yaml"))
    parent.conclude(finished)
    parent.finish()
    tags = runs(finished, "pipeline")[0].data.tags
    assert {name: tags[f"stage.{name}"] for name in STAGES} == {
        name: f"cached:{run_id}" for name, run_id in made.items()
    }
    (finished / OUTPUTS["rl"] / "manifest.json").write_text('{"files": {}}')
    assert origin(finished, "rl", parent.run_id) == "cached:unknown"
    (finished / OUTPUTS["rl"] / "manifest.json").unlink()
    assert origin(finished, "rl", parent.run_id) == "missing"
    assert run_url(finished, "abc").endswith("/runs/abc")


def test_a_stage_switched_off_says_disabled(finished: Path) -> None:
    set_params(finished, rl__enabled=False)
    dvc(finished, "repro", "--single-item", "rl")
    assert runs(finished, "pipeline")[0].data.tags["stage.rl"] == "disabled"


def test_a_run_whose_process_died_is_killed_when_the_next_one_starts(project: Path) -> None:
    opens = f"""
from pathlib import Path
from tasks.config import load_params
from tasks.tracking import Pipeline
root = Path({str(project)!r})
print(Pipeline.start(root, load_params(root / "params.yaml")).run_id)
"""
    dead = subprocess.run(
        [sys.executable, "-c", opens], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()[-1]
    alive = Pipeline.start(project, Params())
    client, _ = open_store(project)
    assert client.get_run(dead).info.status == "KILLED"
    assert close_dead_runs(project) == []
    assert client.get_run(alive.run_id).info.status == "RUNNING"
    alive.finish()


def test_uncommitted_and_untracked_code_is_dirty_and_the_lock_file_is_not(project: Path) -> None:
    def dirty() -> str:
        run = Pipeline.start(project, Params())
        run.finish()
        return run.client.get_run(run.run_id).data.tags["git_dirty"]

    (project / "dvc.lock").write_text("stages: {}\n")
    assert dirty() == "false"
    (project / "tasks" / "extra.py").write_text("")
    assert dirty() == "true"
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", "More")
    assert dirty() == "false"


def test_numbers_that_are_not_finite_are_left_out_and_counted(project: Path) -> None:
    run = Pipeline.start(project, Params())
    run.metrics({"loss": math.nan, "kl": math.inf, "reward": 0.5})
    run.finish()
    metrics = run.client.get_run(run.run_id).data.metrics
    assert metrics == {"reward": 0.5, "nonfinite_metrics": 2.0}


def test_several_processes_may_create_the_store_at_once(project: Path) -> None:
    behave(project)
    code = f"from pathlib import Path; from tasks.tracking import open_store; print(open_store(Path({str(project)!r}))[1])"

    def create(_: int) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(create, range(3)))) == 1
