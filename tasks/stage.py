"""What every stage does around its work: lock, MLflow run, scratch folder, publication, failure record.

A stage's module, `tasks/<stage>.py`, has a function of its name, which is called when the stage is switched on:

    def sft(stage: Stage) -> None: ...

It trains in `stage.scratch` (kept after a crash, found again by the digest of everything that goes in) and
publishes once, through `stage.publish()`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tasks.config import Params, load_params
from tasks.tracking import OUTPUTS, Pipeline, StageRun, output_digest, parent_run
from tasks.tree import TreeBusy, find_root, locked, state
from training.adapters import unchanged, whole_model
from training.errors import BadInput
from training.storage import MANIFEST, digest_of, publishing, write_json

OPTIONAL = {"sft": "model", "preferences": None, "dpo": "sft", "reward_model": None, "rl": "dpo"}
"""Stages that can be switched off, and the stage whose model then stands for theirs."""
METRICS = "metrics.json"
REFERENCE = "reference.json"

BAD_INPUT, OUT_OF_MEMORY, FAILED, TERMINATED, BUSY = 2, 3, 1, 143, 75
"""Exit codes of a stage; a flow retries only FAILED."""


@dataclass
class Stage:
    """One stage being run; paths are relative to the tree, which is the working directory."""

    name: str
    root: Path
    params: Params
    digest: str
    scratch: Path
    run: StageRun

    @property
    def output(self) -> Path:
        """The folder this stage publishes."""
        return self.root / OUTPUTS[self.name]

    def folder(self, stage: str) -> Path:
        """The folder another stage published."""
        return self.root / OUTPUTS[stage]

    @contextmanager
    def publish(self, metrics: dict[str, float]) -> Iterator[Path]:
        """Yield an empty folder to fill; it becomes the stage's output, whole or not at all.

        `metrics` are the stage's final numbers, written as metrics.json and shown on the pipeline's run; they
        must not depend on the machine's speed, for equal inputs give equal bytes.
        """
        metrics = metrics | self.containment()
        with publishing(self.output) as folder:
            yield folder
            write_json(folder / METRICS, metrics)
        self.run.metrics(metrics)
        self.run.artifact(self.output / MANIFEST)
        self.run.tag(output_digest=output_digest(self.output))

    def containment(self) -> dict[str, float]:
        """`unsandboxed_code`, where programs graded here may run without a sandbox: 1 if they did, 0 if there was one."""
        params, grader = self.params, self.params.rewards.grader
        graders = {
            "validate": [grader],
            "preferences": [grader] if params.preferences.source == "rollouts" else [],
            "rl": [*params.rl.reward_funcs, *([grader] if params.rl.iterative.reward_model_steps else [])],
            "evaluate": [grader],
        }.get(self.name, [])
        enabled = getattr(params.section(self.name), "enabled", True)
        if not (params.rewards.code.unsafe and enabled and "code" in graders):
            return {}
        from training.sandbox.bubblewrap import why_unavailable

        return {"unsandboxed_code": float(why_unavailable() is not None)}

    def disable(self, stands_for: str | None = None) -> None:
        """Publish a reference to another stage's model instead of weights, and say so.

        A stage whose output nothing else can stand for leaves a reference to nothing.
        """
        reference: dict[str, str | None] = {"model": None, "digest": None}
        if stands_for:
            model = resolve_model(self.folder(stands_for))
            reference = {"model": str(model.relative_to(self.root)), "digest": output_digest(model)}
        with self.publish({}) as folder:
            write_json(folder / REFERENCE, reference)
        self.run.tag(gradeline__disabled="true")
        print(
            f"{self.name} disabled: {OUTPUTS[self.name]} refers to {reference['model'] or 'nothing'}",
            flush=True,
        )


def resolve_model(folder: Path) -> Path:
    """The folder that holds weights: `folder` itself, or the one that its reference names (checked by digest).

    They may be an adapter's, whose model is checked too. Raises BadInput when a model that is named has changed,
    or when a reference to nothing stands there.
    """
    reference = folder / REFERENCE
    if reference.is_file():
        target = json.loads(reference.read_text())
        if target["model"] is None:
            raise BadInput(f"{folder}: the stage that makes it is disabled, so there is no model")
        folder = unchanged(folder.parents[2] / target["model"], target["digest"], reference)
    whole_model(folder)
    return folder


def is_disabled(folder: Path) -> bool:
    """Whether a published folder is only a reference."""
    return (folder / REFERENCE).is_file()


def stage_definition(root: Path, name: str) -> dict[str, Any]:
    """The stage's entry in dvc.yaml."""
    return yaml.safe_load((root / "dvc.yaml").read_text())["stages"][name]


def stage_digest(root: Path, name: str, params: Params) -> str:
    """Hex sha256 over all that dvc.yaml says goes into a stage: its command, dependencies' bytes and params."""
    definition = stage_definition(root, name)
    plain = params.to_dict()
    content = {
        "cmd": definition["cmd"],
        "deps": {path: digest_of(_required(root / path)) for path in definition["deps"]},
        "params": {key: _lookup(plain, key) for key in definition["params"]},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def run_stage(name: str, body: Callable[[Stage], None]) -> None:
    """Run `body`, if the stage is switched on, as stage `name` in the working directory's tree.

    Exits with a code that says how it went.
    """
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(_run(name, body))


def _run(name: str, body: Callable[[Stage], None]) -> int:
    try:
        root = find_root(Path.cwd())
        params = load_params(root / "params.yaml")
        with locked(state(root) / "stage.lock", f"stage {name}"):
            return _recorded(name, body, root, params)
    except TreeBusy as error:
        print(f"{name}: {error}", file=sys.stderr)
        return BUSY
    except BadInput as error:
        print(f"{name}: {error}", file=sys.stderr)
        _record_outcome(Path.cwd(), name, BAD_INPUT, str(error))
        return BAD_INPUT


def _recorded(name: str, body: Callable[[Stage], None], root: Path, params: Params) -> int:
    digest = stage_digest(root, name, params)
    scratch = state(root) / "scratch" / f"{name}-{digest[:16]}"
    scratch.mkdir(parents=True, exist_ok=True)
    attempt = _next_attempt(scratch)
    parent, ours = parent_run(root, params)
    run = StageRun.start(root, name, params, parent, digest, attempt)
    code, message = FAILED, ""
    if params.rewards.code.unsafe:
        run.tag(gradeline__unsafe_code="true")
    try:
        stage = Stage(name, root, params, digest, scratch, run)
        if not getattr(params.section(name), "enabled", True):
            stage.disable(OPTIONAL[name])
        else:
            body(stage)
        code = 0
    except (BadInput, TreeBusy) as error:
        code, message = BAD_INPUT, str(error)
        print(f"{name}: {message}", file=sys.stderr)
    except SystemExit:
        code, message = TERMINATED, "terminated"
    except KeyboardInterrupt:
        code, message = TERMINATED, "interrupted"
    except BaseException as error:
        code = OUT_OF_MEMORY if _is_out_of_memory(error) else FAILED
        message = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    run.close({0: "FINISHED", TERMINATED: "KILLED"}.get(code, "FAILED"))
    if code == 0:
        shutil.rmtree(scratch)
    if ours:  # no stage knows whether another follows: each leaves the pipeline run concluded
        pipeline = Pipeline(run.client, parent)
        pipeline.conclude(root, upto=name)
        pipeline.finish({0: "FINISHED", TERMINATED: "KILLED"}.get(code, "FAILED"))
    _record_outcome(root, name, code, message, run.run_id)
    return code


def _record_outcome(root: Path, name: str, code: int, message: str, run_id: str | None = None) -> None:
    """Tell a flow how the stage ended: DVC's own exit code does not."""
    write_json(state(root) / "outcome" / f"{name}.json", {"code": code, "message": message, "run_id": run_id})


def _next_attempt(scratch: Path) -> int:
    counter = scratch / "attempt"
    attempt = int(counter.read_text()) + 1 if counter.is_file() else 1
    counter.write_text(str(attempt))
    return attempt


def _is_out_of_memory(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return (
        isinstance(error, MemoryError)
        or "outofmemory" in text
        or "out of memory" in text
        or "can't allocate memory" in text
    )


def _lookup(values: dict[str, Any], dotted: str) -> Any:
    for part in dotted.split("."):
        values = values[part]
    return values


def _required(path: Path) -> Path:
    if not path.exists():
        raise BadInput(f"{path}: missing; it is made by an earlier stage (`gradeline stages` lists them)")
    return path


def _terminate(signum: int, frame: Any) -> None:
    raise SystemExit(TERMINATED)
