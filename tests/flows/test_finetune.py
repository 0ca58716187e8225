"""The flow on a real Prefect server, with real DVC and MLflow; the stages take a moment each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow.entities import Run
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun, TaskRun

from flows.finetune import finetune
from flows.stage import StageFailed
from tasks.config import STAGES
from tasks.tracking import OUTPUTS, open_store, run_that_made
from tasks.versioning import upstream
from tests.project import behave, dvc, gradeline, set_params, start_gradeline, wait_for

pytestmark = pytest.mark.e2e


@pytest.fixture
def tree(finished: Path, prefect_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished project as working directory, with a Prefect server to talk to."""
    monkeypatch.chdir(finished)
    return finished


def parent_of(tree: Path) -> Run:
    """The newest pipeline run in MLflow."""
    client, experiment = open_store(tree)
    return client.search_runs(
        [experiment], "tags.`gradeline.kind` = 'pipeline'", order_by=["attributes.start_time DESC"]
    )[0]


def in_prefect(parent: Run) -> tuple[FlowRun, list[TaskRun]]:
    """The flow run that a pipeline run in MLflow names, and its task runs in the order they began."""
    only = FlowRunFilter(id=FlowRunFilterId(any_=[parent.data.tags["prefect_flow_run"]]))
    with get_client(sync_client=True) as client:

        def ended() -> list[TaskRun]:  # task runs reach the server as events, a moment later
            tasks = client.read_task_runs(flow_run_filter=only)
            return tasks if all(task.state and task.state.is_final() for task in tasks) else []

        tasks = wait_for(ended, "the task runs' arrival on the server", 60)
        (flow_run,) = client.read_flow_runs(flow_run_filter=only)
    return flow_run, sorted(tasks, key=lambda task: str(task.start_time))


def names(tasks: list[TaskRun]) -> dict[str, str]:
    return {task.name: task.state_name or "" for task in tasks}


def processes_in(tree: Path) -> list[str]:
    """Command lines of the other processes that work in the tree."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid != os.getpid()
                and process.cwd().startswith(str(tree))
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def test_stages_run_in_the_order_of_the_graph_and_say_how_they_ended(tree: Path) -> None:
    dvc(tree, "remote", "add", "--default", "store", str(tree.parent / "store"))
    set_params(tree, sft__enabled=False)
    behave(tree, rl="fail once")
    run_id = finetune()
    parent = parent_of(tree)
    assert parent.info.run_id == run_id
    flow_run, tasks = in_prefect(parent)
    assert flow_run.state_name == "Completed"
    assert [task.name for task in tasks] == [*STAGES, "push"]
    order = [task.name for task in tasks]
    assert all(
        order.index(before) < order.index(name)
        for name, needed in upstream(tree).items()
        for before in needed
    )
    assert names(tasks) == {
        "model": "Cached",
        "prepare": "Cached",
        "validate": "Cached",
        "sft": "Disabled",
        "preferences": "Completed",
        "dpo": "Completed",
        "reward_model": "Completed",
        "rl": "Completed",
        "evaluate": "Completed",
        "report": "Cached",
        "push": "Completed",
    }
    by_name = {task.name: task for task in tasks}
    assert by_name["rl"].run_count == 2
    model = run_that_made(tree, "model")
    assert model
    assert model in (by_name["model"].state.message or "")  # type: ignore[union-attr]
    tags = parent.data.tags
    assert parent.info.status == "FINISHED"
    assert tags["stage.model"] == f"cached:{model}"
    assert tags["stage.sft"] == "disabled"
    assert tags["stage.rl"] == f"ran:{run_that_made(tree, 'rl')}"
    assert parent.data.metrics["evaluate/score"] == 5.0
    with get_client(sync_client=True) as client:
        mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
        artifacts = {
            artifact.key: str(artifact.data) for artifact in client.read_artifacts(artifact_filter=mine)
        }
    assert "| rl | 0.9 |" in artifacts["results"]
    assert "Disabled" in artifacts["results"]
    assert '"score"' in artifacts["metrics"]
    shutil.rmtree(tree / "data" / "models")
    shutil.rmtree(tree / ".dvc" / "cache")
    dvc(tree, "pull")
    assert (tree / OUTPUTS["rl"] / "text").is_file()

    with get_client(sync_client=True) as client:

        def logged() -> bool:
            lines = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run.id])))
            return any("rl 1/2 · reward 0.5" in line.message for line in lines)

        wait_for(logged, "the progress line's arrival in Prefect's logs", 60)


@pytest.mark.parametrize("behaviour", ["bad input", "out of memory"])
def test_what_can_not_get_better_is_not_tried_again(tree: Path, behaviour: str) -> None:
    set_params(tree, rl__beta=0.5)
    behave(tree, rl=behaviour)
    with pytest.raises(
        StageFailed,
        match=r"rl (refused its input: data/x.jsonl line 7|ran out of memory: MemoryError: too large)",
    ):
        finetune()
    parent = parent_of(tree)
    flow_run, tasks = in_prefect(parent)
    assert flow_run.state_name == "Failed"
    assert names(tasks) == dict.fromkeys(STAGES[: STAGES.index("rl")], "Cached") | {"rl": "Failed"}
    assert tasks[-1].run_count == 1
    assert parent.info.status == "FAILED"
    assert "evaluate/score" not in parent.data.metrics  # what stands on disk is another run's
    assert parent.data.metrics["sft/score"] == 3.0


def test_a_stage_past_its_time_is_ended(tree: Path) -> None:
    set_params(tree, rl__beta=0.5, flow__timeout_minutes__rl=0.15)
    behave(tree, rl="stay")
    with pytest.raises(
        StageFailed, match=r"rl did not finish: still running after 9 s.*flow\.timeout_minutes\.rl sets it"
    ):
        finetune()
    assert parent_of(tree).info.status == "FAILED"
    assert [one for one in processes_in(tree) if "tasks rl" in one] == []


def test_only_runs_one_stage_and_from_forces_all_that_depend_on_it(tree: Path) -> None:
    finetune(only="report")
    skipped = dict.fromkeys(STAGES[:-1], "Skipped") | {"report": "Cached"}
    assert names(in_prefect(parent_of(tree))[1]) == skipped
    finetune(from_stage="report")
    assert names(in_prefect(parent_of(tree))[1]) == dict.fromkeys(STAGES[:-1], "Cached") | {
        "report": "Completed"
    }


def terminate(running: subprocess.Popen[str]) -> None:
    running.send_signal(signal.SIGTERM)


def interrupt_group(running: subprocess.Popen[str]) -> None:
    os.killpg(running.pid, signal.SIGINT)


@pytest.mark.parametrize(
    ("stop", "code", "says", "shared_server"),
    [
        (terminate, 143, "termination signal", False),
        (interrupt_group, 130, "interrupt signal", True),
    ],
)
def test_a_signal_ends_everything_and_is_recorded(
    tree: Path, prefect_url: str, stop: Callable[[Any], None], code: int, says: str, shared_server: bool
) -> None:
    set_params(tree, rl__beta=0.5)
    behave(tree, rl="stay")
    running = start_gradeline(tree, "run", **({"PREFECT_API_URL": prefect_url} if shared_server else {}))
    wait_for(lambda: list((tree / ".gradeline" / "scratch").glob("rl-*/pids")), "the stage's start")
    second = gradeline(tree, "run", PREFECT_API_URL=prefect_url)
    assert second.returncode == 75
    assert f"already running here, pid {running.pid}" in second.stderr
    stop(running)
    output, _ = running.communicate(timeout=120)
    assert running.returncode == code, output
    assert processes_in(tree) == []
    client, experiment = open_store(tree)
    parent = parent_of(tree)
    stages = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert [(run.data.tags["stage"], run.info.status) for run in stages] == [("rl", "KILLED")]
    assert parent.info.status == "KILLED"
    flow_run, _ = in_prefect(parent)  # both servers keep their records in the same database
    assert flow_run.state_name == "Crashed"
    assert says in str(flow_run.state.message if flow_run.state else "")


def test_two_runs_at_the_same_time_in_two_workspaces(tree: Path, prefect_url: str) -> None:
    both = [
        start_gradeline(
            tree, "run", "-S", f"rl.num_steps={steps}", "--name", f"steps{steps}", PREFECT_API_URL=prefect_url
        )
        for steps in (3, 4)
    ]
    outputs = [running.communicate(timeout=300)[0] for running in both]
    assert [running.returncode for running in both] == [0, 0], outputs
    for steps, output in zip((3, 4), outputs, strict=True):
        workspace = tree / ".gradeline" / "workspaces" / f"steps{steps}"
        assert f'"num_steps":{steps}' in (workspace / OUTPUTS["rl"] / "text").read_text()
        assert str(workspace) in output
    assert '"num_steps":20' in (tree / OUTPUTS["rl"] / "text").read_text()
    client, experiment = open_store(tree)
    shas = {
        run.data.params["rl.num_steps"]: (
            run.data.tags["git_sha"],
            run.data.tags["git_dirty"],
            run.info.status,
        )
        for run in client.search_runs([experiment], "tags.launcher = 'flow'")
    }
    assert set(shas) == {"3", "4"}
    assert {(dirty, status) for _, dirty, status in shas.values()} == {("false", "FINISHED")}
    for steps, (sha, _, _) in shas.items():
        shown = subprocess.run(
            ["git", "show", f"{sha}:params.yaml"], cwd=tree, capture_output=True, text=True, check=True
        )
        assert f"num_steps: {steps}\n" in shown.stdout


def test_a_scheduled_run_on_a_real_server_and_worker(tree: Path, prefect_url: str) -> None:
    def prefect(*arguments: str) -> None:
        command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        env = dict(os.environ) | {"PREFECT_API_URL": prefect_url}
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    prefect("work-pool", "create", "gradeline", "--type", "process")
    prefect("deploy", "--name", "nightly")
    prefect("deployment", "run", "finetune/nightly")
    prefect("worker", "start", "--pool", "gradeline", "--type", "process", "--run-once")
    workspace = tree / ".gradeline" / "workspaces" / "nightly"
    assert (workspace / OUTPUTS["report"] / "table.md").is_file()
    parent = parent_of(tree)
    flow_run, tasks = in_prefect(parent)
    assert flow_run.deployment_id is not None
    assert flow_run.state_name == "Completed"
    assert set(names(tasks)) == set(STAGES)
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("finetune/nightly")
    assert [str(getattr(schedule.schedule, "cron", "")) for schedule in deployment.schedules] == ["0 2 * * *"]
