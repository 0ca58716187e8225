"""The pipeline as a Prefect flow: base model and data → SFT → pairs → DPO, reward model → RL →
evaluation → report.

Runs in the tree around the working directory, or in a workspace of it; `gradeline run`, `prefect deploy` and a
call from Python all come here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect import flow, get_run_logger, runtime, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from flows import process
from flows.stage import PipelineRun, stage_task
from tasks.config import load_params
from tasks.tracking import OUTPUTS, Pipeline, run_url
from tasks.tree import find_root
from tasks.versioning import DVC, environment, forced_stages, has_remote, plan
from tasks.workspaces import claimed
from training.storage import read_json

model = stage_task("model")
prepare = stage_task("prepare")
validate = stage_task("validate")
sft = stage_task("sft")
preferences = stage_task("preferences")
dpo = stage_task("dpo")
reward_model = stage_task("reward_model")
rl = stage_task("rl")
evaluate = stage_task("evaluate")
report = stage_task("report")

PUSH_MINUTES = 240.0


@flow(name="finetune", persist_result=False)
def finetune(
    recipe: str | None = None,
    overrides: list[str] | None = None,
    workspace: str | None = None,
    from_stage: str | None = None,
    only: str | None = None,
) -> str:
    """Fine-tune, evaluate and report; returns the id of the MLflow parent run.

    Without recipe, overrides and workspace the run happens in the tree itself, with its params.yaml; with any of
    them in a workspace. `from_stage` runs that stage and all that depend on it even if nothing changed; `only`
    runs one stage and takes the others' outputs as they are.
    """
    root = find_root(Path.cwd())
    forced = forced_stages(root, from_stage, only)
    with claimed(root, recipe, overrides, workspace) as tree:
        with recorded(tree, forced, only) as run:
            run(model)
            run(prepare)
            run(validate)
            run(sft)
            run(preferences)
            run(dpo)
            run(reward_model)
            run(rl)
            run(evaluate)
            run(report)
        show_results(run)
        if has_remote(tree):
            push(tree)
    return run.pipeline.run_id


@contextmanager
def recorded(tree: Path, forced: set[str], only: str | None) -> Iterator[PipelineRun]:
    """Keep the MLflow parent run of one pipeline run: FINISHED, FAILED, or KILLED when a signal ended it."""
    params = load_params(tree / "params.yaml")
    cached = {stage.name for stage in plan(tree) if stage.state == "cached"}
    pipeline = Pipeline.start(tree, params, launcher="flow", prefect_flow_run=str(runtime.flow_run.id))
    run = PipelineRun(tree, params, pipeline, cached, forced, only)
    status = "KILLED"
    try:
        yield run
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        try:
            if run.last:
                pipeline.conclude(tree, upto=run.last)
        finally:
            pipeline.finish(status)


def show_results(run: PipelineRun) -> None:
    """Prefect artifacts: the results table with how each stage ended, and every metric."""
    table = run.tree / OUTPUTS["report"] / "table.md"
    results = table.read_text(encoding="utf-8") if table.is_file() and run.last == "report" else ""
    rows = [f"| {name} | {state.name} | {state.message or ''} |" for name, state in run.states.items()]
    stages = "\n".join(["| stage | state | outputs |", "|---|---|---|", *rows])
    link = f"[MLflow run]({run_url(run.tree, run.pipeline.run_id)})"
    create_markdown_artifact(
        f"{results}\n\n{stages}\n\n{link}\n", key="results", description="Results of this run"
    )
    metrics = [
        {"stage": name, "metric": metric, "value": value}
        for name, state in run.states.items()
        if state.name != "Skipped" and (run.tree / OUTPUTS[name] / "metrics.json").is_file()
        for metric, value in read_json(run.tree / OUTPUTS[name] / "metrics.json").items()
    ]
    create_table_artifact(metrics, key="metrics", description="Final metrics of each stage")


@task(
    task_run_name="push", cache_policy=NO_CACHE, persist_result=False, retries=2, retry_delay_seconds=[10, 60]
)
def push(tree: Path) -> None:
    """Copy the run's outputs to the DVC remote."""
    said: list[str] = []
    code = process.run([*DVC, "push"], tree, environment(), said.append, timeout=60 * PUSH_MINUTES)
    if code:
        raise RuntimeError(
            "the outputs are complete, but `dvc push` failed (run it again in the tree):\n"
            + "\n".join(said[-20:])
        )
    get_run_logger().info(said[-1] if said else "pushed")
