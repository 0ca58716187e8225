"""Every named recipe on the tiny task, through the whole pipeline: which stages run, which models RL holds.

The runs are short: that each algorithm learns is `benchmarks.learning`'s to show.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.tracking import OUTPUTS, open_store, run_that_made
from tests.e2e.runs import how_stages_ended, last_pipeline, ok, rl_history
from tests.project import gradeline
from training.storage import read_json

pytestmark = pytest.mark.e2e

SHORT = {
    "rl.num_steps": 4,
    "evaluate.num_problems": 16,
    "preferences.num_problems": 64,
    "reward_model.num_steps": 10,
    "dpo.num_steps": 10,
}


@pytest.fixture
def run(clone: Path, prefect_url: str) -> Callable[..., Path]:
    """Runs a recipe, in a workspace that finds what earlier recipes made; the workspace."""

    def run(recipe: str, name: str = "recipes") -> Path:
        settings = [part for key, value in SHORT.items() for part in ("-S", f"{key}={value}")]
        arguments = ["run", "-c", recipe, *settings, "--name", name]
        ok(gradeline(clone, *arguments, PREFECT_API_URL=prefect_url))
        return clone / ".gradeline" / "workspaces" / name

    return run


def enabled(clone: Path) -> set[str]:
    """The optional stages that were switched on in the last run."""
    ended = how_stages_ended(last_pipeline(clone))
    optional = ("sft", "preferences", "dpo", "reward_model", "rl")
    return {stage for stage in optional if ended[stage] in ("ran", "cached")}


def held(tree: Path) -> dict[str, dict[str, Any]]:
    """The memory table of the run that made the tree's RL model, by model."""
    client, _ = open_store(tree)
    made = run_that_made(tree, "rl")
    assert made
    with tempfile.TemporaryDirectory() as folder:
        table = json.loads(Path(client.download_artifacts(made, "models.json", folder)).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    return {row["model"]: row for row in rows}


def scores(tree: Path) -> dict[str, float]:
    """The evaluation's metrics, each a share of problems."""
    metrics: dict[str, float] = read_json(tree / OUTPUTS["evaluate"] / "metrics.json")
    return metrics


def test_rlhf_ppo(clone, run):
    tree = run("tiny+rlhf-ppo")
    assert enabled(clone) == {"sft", "preferences", "reward_model", "rl"}
    assert set(held(tree)) == {"policy", "reference", "reward", "value"}
    history = rl_history(tree)
    assert {"rewards/model/mean", "kl", "critic/explained_variance"} <= set(history[-1])
    assert (tree / "data/models/rl/critic").is_dir()
    assert "Reward model" in (tree / "data/reports/run/index.html").read_text()


def test_r1_zero_needs_no_sft_and_no_neural_reward(clone, run):
    tree = run("tiny+r1-zero")
    assert enabled(clone) == {"rl"}
    assert set(held(tree)) == {"policy", "reference"}
    history = rl_history(tree)
    assert {"rewards/math/mean", "rewards/format/mean"} <= set(history[0])
    assert history[0]["kl"] == 0
    assert (
        "sft/pass_at_1" not in scores(tree) or scores(tree)["sft/pass_at_1"] == scores(tree)["base/pass_at_1"]
    )


def test_r1_starts_from_sft(clone, run):
    tree = run("tiny+r1")
    assert enabled(clone) == {"sft", "rl"}
    assert rl_history(tree)[0]["rewards/format/mean"] > 0.5  # what the cold start taught


def test_dapo(clone, run):
    tree = run("tiny+dapo")
    assert enabled(clone) == {"sft", "rl"}
    assert set(held(tree)) == {"policy"}
    assert {"rewards/overlong/mean", "dynamic_sampling/rounds"} <= set(rl_history(tree)[0])


def test_dpo(clone, run):
    tree = run("tiny+dpo")
    assert enabled(clone) == {"sft", "preferences", "dpo"}
    assert read_json(tree / OUTPUTS["rl"] / "reference.json")["model"] == "data/models/dpo"
    assert scores(tree)["rl/pass_at_1"] == scores(tree)["dpo/pass_at_1"]
    assert (tree / "data/models/dpo/model.safetensors").is_file()


def test_deepseekmath_by_outcome(clone, run):
    tree = run("tiny+deepseekmath")
    assert enabled(clone) == {"sft", "preferences", "reward_model", "rl"}
    assert set(held(tree)) == {"policy", "reference", "reward"}
    assert not held(tree)["reward"]["trained"]


def test_deepseekmath_by_process(clone, run):
    tree = run("tiny-steps+deepseekmath-process")
    assert enabled(clone) == {"sft", "preferences", "reward_model", "rl"}
    assert rl_history(tree)[0]["process/steps_mean"] > 1


def test_deepseekmath_iterative_goes_on_training_the_reward_model(clone, run):
    tree = run("tiny+deepseekmath-iterative")
    assert enabled(clone) == {"sft", "preferences", "reward_model", "rl"}
    assert held(tree)["reward"]["trained"] > 0
    history = rl_history(tree)
    assert (
        history[0]["kl"] == history[2]["kl"] == 0 < history[1]["kl"]
    )  # the reference was reset after two steps
    assert (tree / "data/models/rl/reward").is_dir()


def test_grpo_vs_ppo_differ_in_the_algorithm_alone(run):
    """Same data, model and budget; PPO holds a model more."""
    trees = {name: run(f"tiny+{name}", name) for name in ("grpo", "ppo")}
    assert set(held(trees["ppo"])) - set(held(trees["grpo"])) == {"value"}
    for output in ("model", "prepare", "sft"):
        manifests = {(tree / OUTPUTS[output] / "manifest.json").read_bytes() for tree in trees.values()}
        assert len(manifests) == 1
    samples = {len(rl_history(tree)) for tree in trees.values()}
    assert samples == {SHORT["rl.num_steps"]}
    bases = {scores(tree)["base/pass_at_1"] for tree in trees.values()}
    assert len(bases) == 1
