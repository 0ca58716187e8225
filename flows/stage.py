"""One stage of a pipeline run as Prefect sees it: run through DVC, logged live, retried only when that can help."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any, cast

from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows import process
from tasks.config import Params, StageName
from tasks.stage import BAD_INPUT, BUSY, FAILED, OUT_OF_MEMORY, TERMINATED
from tasks.tracking import OUTPUTS, PARENT_VARIABLE, Pipeline, run_that_made, run_url
from tasks.tree import state
from tasks.versioning import environment, repro_command
from training.storage import read_json

WORDS: dict[int | None, str] = {
    FAILED: "failed",
    BAD_INPUT: "refused its input",
    OUT_OF_MEMORY: "ran out of memory",
    TERMINATED: "was terminated",
    BUSY: "found another run at work",
}


class StageFailed(RuntimeError):
    """A stage that did not come to its end. `code` is the one the stage gave (tasks.stage), None if it gave none."""

    def __init__(self, stage: str, code: int | None, message: str) -> None:
        super().__init__(stage, code, message)
        self.stage, self.code, self.message = stage, code, message

    def __str__(self) -> str:
        return f"{self.stage} {WORDS.get(self.code, 'did not finish')}: {self.message}"


class PipelineRun:
    """One run of the pipeline in a tree; calling it with a stage's task runs that stage.

    `cached` stages were up to date when the run began, and so was all before them: DVC is not asked about them
    again. `forced` ones run even so. With `only`, the others are skipped.
    """

    def __init__(
        self,
        tree: Path,
        params: Params,
        pipeline: Pipeline,
        cached: set[str],
        forced: set[str],
        only: str | None,
    ) -> None:
        self.tree = tree
        self.params = params
        self.pipeline = pipeline
        self.cached = cached - forced
        self.forced = forced
        self.only = only
        self.states: dict[str, State[Any]] = {}

    def __call__(self, stage: Task[[PipelineRun], State[Any]]) -> None:
        """Run a stage, with the time-outs and retries of params.yaml's `flow` section."""
        patience = self.params.flow
        delays = [patience.retry_delay_seconds * 2**n for n in range(patience.retries)]
        patient = stage.with_options(retries=patience.retries, retry_delay_seconds=delays or 0)
        self.states[stage.name] = patient(self)

    @property
    def last(self) -> str | None:
        """The last stage whose output is up to date."""
        done = [name for name, state in self.states.items() if state.name != "Skipped"]
        return done[-1] if done else None


def stage_task(name: str) -> Task[[PipelineRun], State[Any]]:
    """The Prefect task of one stage."""

    @task(
        name=name,
        task_run_name=name,
        cache_policy=NO_CACHE,
        persist_result=False,
        retry_condition_fn=worth_retrying,
    )
    def stage(run: PipelineRun) -> State[Any]:
        return run_stage(run, name)

    return stage


def worth_retrying(task: Any, task_run: Any, state: State[Any]) -> bool:
    """Whether the same stage with the same input may fare better: not after bad input, out of memory or a signal."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, StageFailed) and error.code == FAILED


def run_stage(run: PipelineRun, name: str) -> State[Any]:
    """Bring one stage up to date; the state's name says how: Completed (it ran), Cached, Disabled or Skipped.

    Raises StageFailed with what the stage, or else DVC, said.
    """
    if run.only not in (None, name):
        return Completed(name="Skipped", message=f"only {run.only} was asked for")
    if name in run.cached:
        return _finished(run, name, ran=False)
    outcome = state(run.tree) / "outcome" / f"{name}.json"
    outcome.unlink(missing_ok=True)
    code, said = _dvc(run, name)
    told = read_json(outcome) if outcome.is_file() else None
    if told and told["code"]:
        raise StageFailed(name, told["code"], told["message"])
    if code:
        raise StageFailed(name, None, f"dvc ended with code {code}\n" + "\n".join(said))
    return _finished(run, name, ran=told is not None)


def _dvc(run: PipelineRun, name: str) -> tuple[int, list[str]]:
    """Exit code and last lines of DVC, which are logged as they come."""
    logger = get_run_logger()
    said: deque[str] = deque(maxlen=20)

    def on_line(line: str) -> None:
        if line.strip():
            said.append(line)
            logger.info(line)

    timeout = 60 * run.params.flow.timeout_minutes[cast(StageName, name)]
    env = environment() | {PARENT_VARIABLE: run.pipeline.run_id}
    try:
        return process.run(
            repro_command(name, force=name in run.forced), run.tree, env, on_line, timeout
        ), list(said)
    except process.TimedOut as error:
        raise StageFailed(name, None, f"{error} (flow.timeout_minutes.{name} sets it)") from None


def _finished(run: PipelineRun, name: str, ran: bool) -> State[Any]:
    folder = run.tree / OUTPUTS[name]
    made = run_that_made(run.tree, name)
    page = (
        f"MLflow run {made}, {run_url(run.tree, made)}"
        if made
        else "a run that this MLflow store does not hold"
    )
    if (folder / "reference.json").is_file():
        return Completed(
            name="Disabled",
            message=f"{OUTPUTS[name]} refers to {read_json(folder / 'reference.json')['model'] or 'nothing'}",
        )
    if ran:
        return Completed(message=page)
    return Completed(
        name="Cached", message=f"nothing that goes into it has changed; its output was made by {page}"
    )
