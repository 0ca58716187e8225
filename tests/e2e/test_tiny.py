"""The whole pipeline on the `tiny` recipe: real stages, Prefect server, MLflow, DVC remote, Great Expectations.

The tests share one clone of the repository and build on each other, in order.
"""

from __future__ import annotations

import json

import pytest

from tasks.config import STAGES
from tasks.tracking import OUTPUTS, open_store
from tests.e2e.runs import digests, how_stages_ended, last_pipeline, ok, runs
from tests.project import OPTIONAL, dvc, git, gradeline
from training.storage import verify

pytestmark = pytest.mark.e2e


def every_stage(ended: str) -> dict[str, str]:
    """Every stage ended so, but for those that are off unless asked for."""
    return dict.fromkeys(STAGES, ended) | dict.fromkeys(OPTIONAL, "disabled")


def test_a_first_run_trains_evaluates_and_records(clone):
    said = ok(gradeline(clone, "run"))
    assert "Pass@1" in said
    assert all((clone / OUTPUTS[stage] / "manifest.json").is_file() for stage in STAGES)
    for stage in STAGES:
        verify(clone / OUTPUTS[stage])

    metrics = json.loads((clone / "data/evaluation/metrics.json").read_text())
    assert metrics["rl/pass_at_1"] > metrics["sft/pass_at_1"] + 0.2 > metrics["base/pass_at_1"] + 0.2

    parent = last_pipeline(clone)
    assert parent.info.status == "FINISHED"
    assert how_stages_ended(parent) == every_stage("ran")
    assert parent.data.metrics["evaluate/rl/pass_at_1"] == metrics["rl/pass_at_1"]
    assert parent.data.params["rl.num_steps"] == "40"
    nested = runs(clone, f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert {run.data.tags["stage"] for run in nested} == set(STAGES)
    assert {run.info.status for run in nested} == {"FINISHED"}

    rl = next(run for run in nested if run.data.tags["stage"] == "rl")
    client, _ = open_store(clone)
    history = client.get_metric_history(rl.info.run_id, "reward")
    assert [point.step for point in history] == list(range(1, 41))
    for name in (
        "git_sha",
        "git_dirty",
        "config_hash",
        "data_digest",
        "base_model",
        "prefect_flow_run",
        "attempt",
        "output_digest",
    ):
        assert rl.data.tags[name], name
    assert [dataset.dataset.name for dataset in rl.inputs.dataset_inputs] == ["train"]
    artifacts = {file.path for file in client.list_artifacts(rl.info.run_id)}
    assert {"rendered_prompt.txt", "manifest.json", "completions"} <= artifacts
    artifacts = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {"params.yaml", "dvc.lock", "report"} <= artifacts


def test_a_second_run_finds_everything_cached(clone):
    before = digests(clone)
    first = last_pipeline(clone)
    said = ok(gradeline(clone, "run"))
    assert "every stage is cached" in said
    assert digests(clone) == before
    again = last_pipeline(clone)
    assert again.info.run_id != first.info.run_id
    assert how_stages_ended(again) == every_stage("cached")
    made = {stage: first.data.tags[f"stage.{stage}"].partition(":")[2] for stage in STAGES}
    assert {stage: again.data.tags[f"stage.{stage}"].partition(":")[2] for stage in STAGES} == made
    assert again.data.metrics == first.data.metrics


def test_a_fresh_clone_pulls_every_output(clone, tmp_path):
    git(clone, "add", "dvc.lock")
    git(clone, "commit", "--quiet", "--message", "Run")
    git(tmp_path, "clone", "--quiet", str(clone), "fresh")
    dvc(tmp_path / "fresh", "pull")
    assert digests(tmp_path / "fresh") == digests(clone)


def test_a_changed_beta_runs_rl_and_what_hangs_on_it(clone):
    plan = ok(gradeline(clone, "plan"))
    assert "stale" not in plan
    text = (clone / "params.yaml").read_text()
    (clone / "params.yaml").write_text(
        text.replace("beta: 0.0\n", "beta: 0.05\n").replace("num_steps: 40", "num_steps: 4")
    )
    plan = ok(gradeline(clone, "plan"))
    assert "rl.beta: 0.0 → 0.05" in plan.replace("\n", " ")
    ok(gradeline(clone, "run"))
    ended = how_stages_ended(last_pipeline(clone))
    assert {stage for stage, how in ended.items() if how == "ran"} == {"rl", "evaluate", "report"}
    history = [json.loads(line) for line in (clone / "data/models/rl/history.jsonl").read_text().splitlines()]
    assert history[0]["kl"] == 0
    assert history[-1]["kl"] > 0


def test_a_run_in_a_workspace_leaves_the_tree_alone(clone):
    before = git(clone, "status", "--porcelain"), (clone / "dvc.lock").read_text()
    settings = ["-S", "rl.num_steps=12", "-S", "rl.beta=0.02"]
    ok(gradeline(clone, "run", "-c", "tiny", *settings, "--name", "one"))
    assert {stage for stage, how in how_stages_ended(last_pipeline(clone)).items() if how == "ran"} == {
        "rl",
        "evaluate",
        "report",
    }
    after = git(clone, "status", "--porcelain"), (clone / "dvc.lock").read_text()
    assert after == before


def test_the_same_params_give_the_same_bytes_and_records_wherever_and_however_they_run(clone, tmp_path):
    """In a workspace by a flow, and by plain `dvc repro` in a clone with a cache and a store of its own."""
    git(tmp_path, "clone", "--quiet", str(clone), "plain")
    plain = tmp_path / "plain"
    one = clone / ".gradeline" / "workspaces" / "one"
    (plain / "params.yaml").write_text((one / "params.yaml").read_text())
    (plain / "dvc.lock").unlink()
    dvc(plain, "repro")
    assert digests(plain) == digests(one)
    weights = "data/models/rl/model.safetensors"
    assert (plain / weights).read_bytes() == (one / weights).read_bytes()
    [parent] = runs(plain, "tags.`gradeline.kind` = 'pipeline'")
    assert parent.info.status == "FINISHED"
    assert how_stages_ended(parent) == every_stage("ran")
    same = runs(clone, "tags.`gradeline.kind` = 'pipeline'")[0]
    assert parent.data.metrics == same.data.metrics
    assert parent.data.params == same.data.params


def test_stages_switched_off_leave_a_reference(clone):
    arguments = [
        "-c",
        "tiny",
        "-S",
        "sft.enabled=false",
        "-S",
        "rl.enabled=false",
        "-S",
        "evaluate.num_problems=8",
        "--name",
        "off",
    ]
    ok(gradeline(clone, "run", *arguments))
    tree = clone / ".gradeline" / "workspaces" / "off"
    for stage in ("sft", "rl"):
        assert (
            json.loads((tree / OUTPUTS[stage] / "reference.json").read_text())["model"] == "data/models/base"
        )
        assert not list((tree / OUTPUTS[stage]).glob("*.safetensors"))
    ended = how_stages_ended(last_pipeline(clone))
    assert (ended["sft"], ended["rl"]) == ("disabled", "disabled")
    metrics = json.loads((tree / "data/evaluation/metrics.json").read_text())
    assert metrics["rl/pass_at_1"] == metrics["base/pass_at_1"]


def test_a_question_of_the_test_split_in_train_stops_before_training(clone):
    """The same question in an explicit train and an explicit test source, with its file and both names."""
    tree = clone / "leak.jsonl"
    tree.write_text('{"question": "1 2 3", "answer": "3"}\n')
    sources = "[{kind: file, path: configs/data/largest-digit.jsonl, split: train, name: all}, {kind: file, path: leak.jsonl, split: test, name: leak}]"
    done = gradeline(clone, "run", "-c", "tiny", "-S", f"prepare.sources={sources}", "--name", "leak")
    tree.unlink()
    assert done.returncode == 2
    assert "1 2 3" in done.stderr + done.stdout
    assert "leak" in done.stderr
    assert not (clone / ".gradeline/workspaces/leak/data/models/sft").exists()
