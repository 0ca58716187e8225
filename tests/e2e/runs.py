"""What a pipeline run left: outputs, MLflow runs, how each stage ended."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from mlflow.entities import Run

from tasks.config import STAGES
from tasks.tracking import OUTPUTS, open_store, output_digest


def ok(done: subprocess.CompletedProcess[str]) -> str:
    """Standard output of a command that succeeded."""
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def digests(tree: Path) -> dict[str, str]:
    return {stage: output_digest(tree / OUTPUTS[stage]) for stage in STAGES}


def runs(root: Path, query: str) -> list[Run]:
    client, experiment = open_store(root)
    return list(client.search_runs([experiment], query, order_by=["attributes.start_time DESC"]))


def last_pipeline(root: Path) -> Run:
    return runs(root, "tags.`gradeline.kind` = 'pipeline'")[0]


def how_stages_ended(run: Run) -> dict[str, str]:
    return {stage: run.data.tags[f"stage.{stage}"].partition(":")[0] for stage in STAGES}


def rl_history(tree: Path) -> list[dict[str, Any]]:
    """Metrics of every RL step, as the stage published them."""
    return [json.loads(line) for line in (tree / "data/models/rl/history.jsonl").read_text().splitlines()]
