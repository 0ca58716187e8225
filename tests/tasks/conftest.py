"""A small tree with real models and data, in which single stages run for real."""

from __future__ import annotations

import json
import shutil
import signal
import string
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run

from tasks.config import dump_params, parse_params
from tasks.stage import Stage, run_stage
from tasks.tracking import FURTHER_MODELS, open_store, output_digest
from training.config import ModelConfig, ScratchModelConfig
from training.models import bring_model
from training.storage import publishing, read_json, write_json

REPOSITORY = Path(__file__).parents[2]
SHAPE = ScratchModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
PRINTABLE = ScratchModelConfig(
    alphabet=string.printable,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=512,
)
"""A model that reads and writes any ASCII text."""
SETTINGS: dict[str, Any] = {
    "seed": 7,
    "threads": 1,
    "device": "cpu",
    "prompt": {"chat_template": "none"},
    "rl": {"max_completion_length": 6},
    "evaluate": {
        "num_problems": 6,
        "num_samples": 4,
        "k": [1, 2, 4],
        "batch_size": 8,
        "max_completion_length": 6,
        "bootstrap": 50,
    },
}


class SmallTree:
    """A git repository with dvc.yaml, a base model, SFT switched off, an RL model, and prepared data."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("tasks", "training"):
            (root / name).symlink_to(REPOSITORY / name)
        (root / "dvc.yaml").write_text((REPOSITORY / "dvc.yaml").read_text())
        self.settings = json.loads(json.dumps(SETTINGS))
        self.set()
        for command in (["init", "-q"], ["add", "dvc.yaml"], ["commit", "-qm", "tree"]):
            identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
            subprocess.run(["git", *identity, *command], cwd=root, check=True)
        self.publish_model("base", seed=1)
        with publishing(root / FURTHER_MODELS):
            pass
        self.publish_reference("sft", "base")
        self.publish_reference("dpo", "base")
        self.publish_reference("reward", None)
        self.publish_reference("../preferences", None)
        self.publish_model("rl", seed=2)
        self.publish_data(8)

    def set(self, **changes: Any) -> None:
        """Change settings (`section__key=value`) and write params.yaml."""
        for name, value in changes.items():
            section, _, key = name.partition("__")
            if key:
                self.settings.setdefault(section, {})[key] = value
            else:
                self.settings[section] = value
        (self.root / "params.yaml").write_text(
            dump_params(parse_params(yaml.safe_load(json.dumps(self.settings)), "test"))
        )

    def publish_model(self, name: str, seed: int, note: str | None = None) -> None:
        """A model with random weights; equal seeds give equal weights, another `note` another digest."""
        with publishing(self.root / "data/models" / name) as folder:
            origin = bring_model(ModelConfig(source="scratch", scratch=SHAPE), seed, folder)
            write_json(folder / "source.json", origin)
            write_json(folder / "metrics.json", {})
            if note:
                (folder / "note.txt").write_text(note)
            if name != "base":
                rows = [
                    {
                        "step": s + 1,
                        "loss": 1.0 / (s + 1),
                        "reward": s / 4,
                        "grad_norm": 1.0,
                        "entropy": 2.0 - s / 4,
                    }
                    for s in range(5)
                ]
                (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def publish_reference(self, name: str, target: str | None) -> None:
        """What a disabled stage leaves."""
        model = self.root / "data/models" / target if target else None
        reference = {
            "model": f"data/models/{target}" if target else None,
            "digest": output_digest(model) if model else None,
        }
        with publishing(self.root / "data/models" / name) as folder:
            write_json(folder / "reference.json", reference)
            write_json(folder / "metrics.json", {})

    def publish_data(self, num_test: int) -> None:
        """Prepared splits, and the report of a gate that they passed."""
        with publishing(self.root / "data/prepared") as folder:
            for split, size in (("train", 4), ("validation", 2), ("test", num_test)):
                rows = [
                    {
                        "prompt": f"{i}+{len(split) % 3}=",
                        "answer": str(i + len(split) % 3),
                        "completion": "",
                        "source": "sums",
                        "id": f"{split}-{i}",
                    }
                    for i in range(size)
                ]
                pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet", index=False)
            rows_by_split = {"train": 4, "validation": 2, "test": num_test}
            source = {
                "name": "sums",
                "license": None,
                "rows_read": 15,
                "rows": rows_by_split,
                "duplicates": 1,
            }
            write_json(
                folder / "counts.json",
                {"rows": rows_by_split, "duplicates": 1, "contradictions": 0, "sources": [source]},
            )
            write_json(folder / "metrics.json", {})
        with publishing(self.root / "data/reports/validation") as folder:
            entry = {"expectation": "expect_column_values_to_be_unique", "column": "id", "success": True}
            write_json(
                folder / "report.json",
                {"splits": {split: [entry] for split in ("train", "validation", "test")}},
            )
            write_json(folder / "metrics.json", {})


@pytest.fixture(scope="module")
def small_tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallTree]:
    """A tree for the tests of one module; it is the working directory while they run."""
    root = tmp_path_factory.mktemp("small") / "tree"
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.delenv("GRADELINE_PARENT_RUN", raising=False)
        patch.chdir(root)
        yield SmallTree(root)


@dataclass
class Tree:
    """A project of its own, without data, in which stages run as they do under DVC, in this process."""

    root: Path

    def params(self, **sections: Any) -> None:
        """Write params.yaml: these sections, the rest by default."""
        (self.root / "params.yaml").write_text(dump_params(parse_params(sections, "test")))

    def run(self, stage: str, body: Callable[[Stage], None]) -> int:
        """Run one stage; returns its exit code."""
        with pytest.raises(SystemExit) as exit:
            run_stage(stage, body)
        return int(exit.value.code or 0)

    def outcome(self, stage: str) -> dict[str, Any]:
        """How the stage ended: code, message, run_id."""
        return read_json(self.root / ".gradeline" / "outcome" / f"{stage}.json")

    def record(self, stage: str) -> tuple[MlflowClient, Run]:
        """The stage's MLflow run."""
        client, _ = open_store(self.root)
        return client, client.get_run(self.outcome(stage)["run_id"])


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One SQLite store for the session; making one takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> Iterator[Tree]:
    """A repository with dvc.yaml and the code; it is the working directory."""
    root = tmp_path / "tree"
    root.mkdir()
    shutil.copy(REPOSITORY / "dvc.yaml", root)
    for name in ("tasks", "training"):
        (root / name).symlink_to(REPOSITORY / name)
    git = ["git", "-C", str(root), "-c", "user.name=test", "-c", "user.email=test@example.org"]
    for command in (["init", "-q"], ["add", "dvc.yaml"], ["commit", "-qm", "tree"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.chdir(root)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", tmp_path.name)
    monkeypatch.delenv("GRADELINE_PARENT_RUN", raising=False)
    handler = signal.getsignal(signal.SIGTERM)
    yield Tree(root)
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def with_model(tree: Tree) -> Tree:
    """The tree with a base model of random weights, for which all that stands before RL is switched off."""
    base = tree.root / "data/models/base"
    with publishing(base) as folder:
        write_json(
            folder / "source.json", bring_model(ModelConfig(source="scratch", scratch=PRINTABLE), 1, folder)
        )
        write_json(folder / "metrics.json", {})
    with publishing(tree.root / FURTHER_MODELS):
        pass
    start = {"model": "data/models/base", "digest": output_digest(base)}
    nothing = {"model": None, "digest": None}
    for name, reference in (
        ("models/sft", start),
        ("models/dpo", start),
        ("models/reward", nothing),
        ("preferences", nothing),
    ):
        with publishing(tree.root / "data" / name) as folder:
            write_json(folder / "reference.json", reference)
    return tree
