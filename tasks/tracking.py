"""MLflow: a parent run a pipeline run, a nested run a stage.

The store is SQLite under the home's `mlruns/`, created once under a lock; `MLFLOW_TRACKING_URI` names another.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunStatus, RunTag, ViewType
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from tasks.config import STAGES, Params, flatten
from tasks.tree import git, home, locked, state
from training.storage import MANIFEST, read_json, sha256_file

EXPERIMENT = "gradeline"
KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Makes the MLflow UI open the experiment as training runs with columns and charts of metrics."""
PARENT_VARIABLE = "GRADELINE_PARENT_RUN"
UI_PORT = 5000
OUTPUTS = {
    "model": "data/models/base",
    "prepare": "data/prepared",
    "validate": "data/reports/validation",
    "sft": "data/models/sft",
    "preferences": "data/preferences",
    "dpo": "data/models/dpo",
    "reward_model": "data/models/reward",
    "rl": "data/models/rl",
    "evaluate": "data/evaluation",
    "report": "data/reports/run",
}
"""The folder that each stage publishes (its `outs` in dvc.yaml), by which its result is known."""
FURTHER_MODELS = "data/models/more"
"""What stage `model` publishes beside the base model: the models of model.more, each in a folder of its name."""


def tracking_uri(root: Path) -> str:
    """`MLFLOW_TRACKING_URI`, or the SQLite file in the home's mlruns/."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home(root)}/mlruns/mlflow.db"


def open_store(root: Path) -> tuple[MlflowClient, str]:
    """Client of the tracking store and the id of the experiment, both created on first use under a lock."""
    uri = tracking_uri(root)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    with locked(home(root) / "mlruns" / ".lock", "creating the MLflow store", wait=120):
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(name)
        if experiment is not None:
            return client, experiment.experiment_id
        artifacts = f"{home(root)}/mlruns/artifacts" if uri.startswith("sqlite:") else None
        return client, client.create_experiment(name, artifacts, KIND)


class Run:
    """One MLflow run, open until `finish`; `Pipeline` and `StageRun` say what goes into it."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self.client = client
        self.run_id = run_id

    @classmethod
    def create(cls, root: Path, name: str, tags: dict[str, str]) -> Any:
        """Start a run with the tags that every run carries (code, process) and those given."""
        client, experiment = open_store(root)
        everyone = _code_tags(root) | _process_tags()
        run = client.create_run(experiment, run_name=name, tags=everyone | tags)
        return cls(client, run.info.run_id)

    def tag(self, **tags: str) -> None:
        """Set tags; dots are written as double underscores in the arguments."""
        entries = [RunTag(name.replace("__", "."), str(value)) for name, value in tags.items()]
        self.client.log_batch(self.run_id, tags=entries)

    def params(self, values: dict[str, Any]) -> None:
        """Log nested values as dotted parameters, one batch per hundred."""
        entries = [
            Param(key, text if len(text) <= 6000 else f"{text[:5900]}… ({len(text)} characters)")
            for key, text in flatten(values)
        ]
        for first in range(0, len(entries), 100):
            self.client.log_batch(self.run_id, params=entries[first : first + 100])

    def metrics(self, values: dict[str, float], step: int = 0) -> None:
        """Log the numbers of one step in one call; NaN and infinities are left out and counted."""
        self.history([(step, values)])

    def history(self, rows: Iterable[tuple[int, dict[str, float]]]) -> None:
        """Log many steps' numbers, a thousand at a time."""
        now = int(time.time() * 1000)
        entries = []
        for step, values in rows:
            finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
            if len(finite) < len(values):
                finite["nonfinite_metrics"] = float(len(values) - len(finite))
            entries += [Metric(name, value, now, step) for name, value in finite.items()]
        for first in range(0, len(entries), 1000):
            self.client.log_batch(self.run_id, metrics=entries[first : first + 1000])

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Copy a file into the run's artifacts."""
        self.client.log_artifact(self.run_id, str(path), folder)

    def text(self, text: str, name: str) -> None:
        """Write a text artifact."""
        self.client.log_text(self.run_id, text, name)

    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Write rows as a table that the MLflow UI shows (`<name>.json`)."""
        if rows:
            columns = {key: [row.get(key) for row in rows] for key in rows[0]}
            self.client.log_table(self.run_id, columns, f"{name}.json")

    def input(self, path: Path, name: str, context: str) -> None:
        """Record a data set or model folder that went in, by its digest."""
        digest = output_digest(path) if path.is_dir() else sha256_file(path)
        dataset = Dataset(
            name=name, digest=digest[:36], source_type="local", source=json.dumps({"uri": str(path)})
        )
        self.client.log_inputs(
            self.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", context)])]
        )

    def finish(self, status: str = "FINISHED") -> None:
        """Close the run: FINISHED, FAILED or KILLED."""
        self.client.set_terminated(self.run_id, status=status)


class Pipeline(Run):
    """The parent run of one pipeline run."""

    @classmethod
    def start(cls, root: Path, params: Params, **tags: str) -> Pipeline:
        """Open a parent run that records the whole of params.yaml; runs whose process died are closed first."""
        close_dead_runs(root)
        plain = params.to_dict()
        computed = {key: value for key, value in plain.items() if key != "flow"}
        config_hash = hashlib.sha256(json.dumps(computed, sort_keys=True).encode()).hexdigest()[:16]
        name = tags.pop("name", None) or f"{root.name}-{config_hash[:6]}"
        run = cls.create(root, name, {"gradeline.kind": "pipeline", "config_hash": config_hash} | tags)
        run.params(plain)
        run.artifact(root / "params.yaml")
        return run

    def conclude(self, root: Path, upto: str = STAGES[-1]) -> None:
        """Record what the outputs on disk say: metrics, where each came from, the lock file, the report and plots.

        `upto` is the last stage that ran; outputs of later ones may be older than this run and are left out.
        Calling again records what has changed since.
        """
        stages = STAGES[: STAGES.index(upto) + 1]
        known = self.client.get_run(self.run_id).data.metrics
        metrics: dict[str, float] = {}
        for stage in stages:
            folder = root / OUTPUTS[stage]
            if (folder / "metrics.json").is_file():
                metrics |= {
                    f"{stage}/{name}": value for name, value in read_json(folder / "metrics.json").items()
                }
        self.metrics({name: value for name, value in metrics.items() if known.get(name) != value})
        tags = {f"stage.{stage}": origin(root, stage, self.run_id) for stage in stages}
        for stage in ("model", "prepare"):
            if stage in stages and (root / OUTPUTS[stage] / MANIFEST).is_file():
                tags[f"{stage}_digest"] = output_digest(root / OUTPUTS[stage])[:16]
        if (root / "dvc.lock").is_file():
            self.artifact(root / "dvc.lock")
            tags["dvc_lock"] = sha256_file(root / "dvc.lock")[:16]
        self.tag(**tags)
        report = root / OUTPUTS["report"]
        if "report" in stages and report.is_dir():
            self.client.log_artifacts(self.run_id, str(report), "report")


class StageRun(Run):
    """The nested run of one stage; also the Recorder that `training/` writes to."""

    stage = ""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        super().__init__(client, run_id)
        self._started = time.monotonic()
        self._first: tuple[float, int] | None = None

    @classmethod
    def start(
        cls, root: Path, stage: str, params: Params, parent: str, digest: str, attempt: int
    ) -> StageRun:
        """Open the nested run of `stage` with its section of the params."""
        tags = {
            "gradeline.kind": "stage",
            "stage": stage,
            "stage_digest": digest[:16],
            "attempt": str(attempt),
            MLFLOW_PARENT_RUN_ID: parent,
        }
        parent_tags = open_store(root)[0].get_run(parent).data.tags
        tags |= {k: parent_tags[k] for k in ("config_hash", "prefect_flow_run") if k in parent_tags}
        if stage != "model" and (base := root / OUTPUTS["model"] / "source.json").is_file():
            source = read_json(base)
            tags |= {"base_model": str(source["source"]), "base_revision": str(source["revision"])}
        if (data := root / OUTPUTS["prepare"]).is_dir() and stage != "prepare":
            tags["data_digest"] = output_digest(data)[:16]
        run: StageRun = cls.create(root, stage, tags)
        run.stage = stage
        run.params({stage: params.to_dict()[stage]})
        return run

    def progress(self, step: int, total: int, **shown: float) -> None:
        """One line: stage, steps, the numbers worth showing and the time left."""
        now = time.monotonic()
        if self._first is None:
            self._first = (now, step)
        since, first = self._first
        left = f" · {_duration((now - since) / (step - first) * (total - step))} left" if step > first else ""
        numbers = "".join(f" · {name} {value:.4g}" for name, value in shown.items())
        print(f"{self.stage} {step}/{total}{numbers}{left}", flush=True)

    def close(self, status: str) -> None:
        """Record time and memory, then end the run."""
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.metrics({"seconds": time.monotonic() - self._started, "peak_memory_gb": peak_kib / 2**20})
        self.finish(status)


def output_digest(folder: Path) -> str:
    """Identity of a published folder: the sha256 of its manifest, which holds every file's."""
    return sha256_file(folder / MANIFEST)


def run_that_made(root: Path, stage: str, parent: str | None = None) -> str | None:
    """Id of the latest finished MLflow run whose output is what stands in the tree now, if the store knows one.

    With `parent`, only among the stages of that pipeline run.
    """
    folder = root / OUTPUTS[stage]
    if not (folder / MANIFEST).is_file():
        return None
    client, experiment = open_store(root)
    wanted = f"tags.stage = '{stage}' and tags.output_digest = '{output_digest(folder)}' and attributes.status = 'FINISHED'"
    if parent:
        wanted += f" and tags.`{MLFLOW_PARENT_RUN_ID}` = '{parent}'"
    runs = client.search_runs([experiment], wanted, order_by=["attributes.start_time DESC"], max_results=1)
    return runs[0].info.run_id if runs else None


def origin(root: Path, stage: str, parent: str) -> str:
    """Where a stage's output came from, seen from pipeline run `parent`.

    `ran:RUN_ID` (made in it), `cached:RUN_ID` (made before; `cached:unknown` when the store does not hold that
    run), `disabled` or `missing`.
    """
    folder = root / OUTPUTS[stage]
    if not (folder / MANIFEST).is_file():
        return "missing"
    if (folder / "reference.json").is_file():
        return "disabled"
    if made := run_that_made(root, stage, parent):
        return f"ran:{made}"
    return f"cached:{run_that_made(root, stage) or 'unknown'}"


def run_url(root: Path, run_id: str) -> str:
    """Address of a run's page: on the tracking server, or where `gradeline ui` serves the local store."""
    _, experiment = open_store(root)
    uri = tracking_uri(root)
    server = uri.rstrip("/") if uri.startswith("http") else f"http://127.0.0.1:{UI_PORT}"
    return f"{server}/#/experiments/{experiment}/runs/{run_id}"


def parent_run(root: Path, params: Params) -> tuple[str, bool]:
    """Id of the pipeline run this stage belongs to, and whether this stage's launcher (not a flow) opened it.

    A flow names the parent in the environment. Under a plain `dvc repro`, the stages of one dvc process share
    one, kept under that process's pid and start time; a stage started by hand gets one of its own.
    """
    if given := os.environ.get(PARENT_VARIABLE):
        return given, False
    owner = _launcher()
    record = state(root) / "pipelines" / f"{owner.pid}-{int(owner.create_time())}.json"
    with locked(state(root) / "pipelines" / ".lock", "opening a pipeline run", wait=60):
        if record.is_file():
            run_id = str(read_json(record)["run_id"])
            open_store(root)[0].update_run(run_id, status="RUNNING")
            return run_id, True
        pipeline = Pipeline.start(root, params, launcher="dvc repro")
        pipeline.tag(gradeline__pid=str(owner.pid), gradeline__started=str(owner.create_time()))
        record.parent.mkdir(exist_ok=True)
        record.write_text(json.dumps({"run_id": pipeline.run_id}))
        return pipeline.run_id, True


def close_dead_runs(root: Path) -> list[str]:
    """Mark as KILLED every run left RUNNING by a process of this machine that is gone; returns their ids."""
    client, experiment = open_store(root)
    closed = []
    for run in client.search_runs(
        [experiment],
        f"attributes.status = 'RUNNING' and tags.`gradeline.host` = '{os.uname().nodename}'",
        ViewType.ACTIVE_ONLY,
    ):
        tags = run.data.tags
        if not _alive(int(tags["gradeline.pid"]), float(tags["gradeline.started"])):
            client.set_terminated(run.info.run_id, status=RunStatus.to_string(RunStatus.KILLED))
            closed.append(run.info.run_id)
    return closed


def _launcher() -> psutil.Process:
    """The dvc process above this one, else this one."""
    me = psutil.Process()
    if "DVC_STAGE" in os.environ:
        for process in me.parents():
            if any("dvc" in Path(part).name for part in process.cmdline()[:3]):  # `dvc …`, `python -m dvc …`
                return process
    return me


def _alive(pid: int, started: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - started) < 1.0
    except psutil.NoSuchProcess:
        return False


def _process_tags() -> dict[str, str]:
    return {
        "gradeline.host": os.uname().nodename,
        "gradeline.pid": str(os.getpid()),
        "gradeline.started": str(psutil.Process().create_time()),
    }


def _code_tags(root: Path) -> dict[str, str]:
    dirty = git(root, "status", "--porcelain", "--", ".", ":(exclude)dvc.lock")  # dvc.lock is recorded itself
    return {"git_sha": git(root, "rev-parse", "HEAD"), "git_dirty": str(bool(dirty)).lower()}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
