"""Stages `preferences` and `reward_model`, run for real on small models, and RL on what they made."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from tasks.dpo import dpo
from tasks.preferences import preferences
from tasks.reward_model import reward_model
from tasks.rl import rl
from tasks.stage import BAD_INPUT, _run, is_disabled, resolve_model
from tasks.tracking import open_store
from training.curriculum import read_rates
from training.errors import BadInput
from training.models import load_reward_model
from training.storage import read_json, verify

OFF = {"preferences__enabled": False, "reward_model__enabled": False, "rl__reward_funcs": ["math"]}


def outcome(tree, stage):
    return read_json(tree.root / ".gradeline" / "outcome" / f"{stage}.json")


def history(folder):
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def compared(small_tree):
    """Choices between a sum's answer and a letter, and a reward model learnt from them."""
    rows = [
        {"prompt": f"{i}+{j}=", "chosen": str(i + j), "rejected": "abc"[j % 3]}
        for i in range(8)
        for j in range(8)
    ]
    (small_tree.root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small_tree.set(
        preferences={"enabled": True, "source": "file", "path": "pairs.jsonl", "validation": 0.25},
        reward_model={
            "enabled": True,
            "num_steps": 30,
            "batch_size": 16,
            "checkpoint_every": 10,
            "optimizer": {"learning_rate": 5e-3},
        },
    )
    assert _run("preferences", preferences) == 0
    assert _run("reward_model", reward_model) == 0
    return small_tree


def test_pairs_are_published_in_two_splits_with_their_counts(compared):
    output = compared.root / "data/preferences"
    verify(output)
    train, validation = (pd.read_parquet(output / f"{split}.parquet") for split in ("train", "validation"))
    assert list(train) == ["id", "context", "prompt", "chosen", "rejected", "margin"]
    assert not set(train["prompt"]) & set(validation["prompt"])
    counts = read_json(output / "counts.json")
    assert (counts["source"], counts["path"], counts["rows"]) == ("file", "pairs.jsonl", 64)
    assert (counts["pairs_train"], counts["pairs_validation"]) == (len(train), len(validation))
    assert len(train) + len(validation) == 64


def test_the_reward_model_is_published_with_history_and_calibration(compared):
    output = compared.root / "data/models/reward"
    verify(output)
    metrics, calibration = read_json(output / "metrics.json"), read_json(output / "calibration.json")
    assert metrics["eval_accuracy"] > 0.9
    assert metrics["eval_calibration_error"] == calibration["expected_calibration_error"]
    assert sum(one["pairs"] for one in calibration["bins"]) == metrics["pairs_validation"]
    assert (output / "calibration.png").read_bytes()[:4] == b"\x89PNG"
    assert [row["step"] for row in history(output)] == list(range(1, 31))
    assert history(output)[-1]["loss"] == metrics["final_loss"]


def test_rl_adds_the_reward_models_score(compared):
    compared.set(
        rl__reward_funcs=["math", "model"], rl__num_steps=2, rl__prompts_per_step=4, rl__num_generations=4
    )
    assert _run("rl", rl) == 0
    for row in history(compared.root / "data/models/rl"):
        assert row["rewards/model/failures"] == 0
        assert row["reward"] == pytest.approx(row["rewards/math/mean"] + row["rewards/model/mean"])


RULE = """
def few_digits(prompts, completions, **columns):
    return [-float(sum(c.isdigit() for c in text)) for text in completions]
"""


@pytest.fixture
def restored(compared):
    """`compared`, with its settings as they were once the test ends."""
    before = json.dumps(compared.settings)
    yield compared
    compared.settings = json.loads(before)
    compared.set()


@pytest.mark.parametrize("lora", [False, True])
def test_rl_in_iterations_publishes_the_reward_model_that_went_on_learning(restored, lora):
    (restored.root / "few.py").write_text(RULE)
    iterative = {
        "iterations": 2,
        "reward_model_steps": 3,
        "batch_size": 8,
        "optimizer": {"learning_rate": 1e-3},
    }
    settings = {"num_steps": 4, "prompts_per_step": 4, "num_generations": 16, "max_completion_length": 20}
    restored.set(
        rl=settings
        | {"reward_funcs": ["model"], "beta": 0.1, "iterative": iterative, "lora": {"enabled": lora}},
        rewards={"grader": "few:few_digits"},
    )
    assert _run("rl", rl) == 0
    output = restored.root / "data/models/rl"
    verify(output)
    rows = history(output)
    assert (rows[0]["kl"], rows[2]["kl"]) == (0, 0)
    assert rows[2]["iterative/iteration"] == 2
    assert rows[2]["iterative/fresh_pairs"] > 0
    assert rows[2]["iterative/history_pairs"] == len(
        pd.read_parquet(restored.root / "data/preferences/train.parquet")
    )
    assert rows[2]["iterative/replayed_share"] == 1 / (1 + min(7, rows[2]["iterative/fresh_pairs"]))
    old, new = (
        load_reward_model(restored.root / "data/models" / name, torch.device("cpu"))
        for name in ("reward", "rl/reward")
    )
    assert not torch.equal(old.score.weight, new.score.weight)
    client, _ = open_store(restored.root)
    table = read_json(Path(client.download_artifacts(outcome(restored, "rl")["run_id"], "models.json")))
    models = pd.DataFrame(table["data"], columns=table["columns"]).set_index("model")
    assert models.loc["reward", "trained"] == models.loc["reward", "parameters"] == old.num_parameters()
    assert models.loc["reference", "trained"] == 0
    adapters = models.loc["policy", "trained"]
    assert models.loc["reference", "parameters"] == (adapters if lora else models.loc["policy", "parameters"])


def test_rl_takes_the_reward_models_score_of_every_step(compared):
    compared.set(rl__supervision="process", rl__reward_funcs=["model"], rewards={"steps": {"separator": "a"}})
    assert _run("rl", rl) == 0
    rows = history(compared.root / "data/models/rl")
    assert all(row["process/steps_mean"] >= 1 for row in rows)
    assert any(row["process/steps_mean"] > 1 for row in rows)
    for row in rows:
        assert row["rewards/model/failures"] == 0
        assert row["reward"] == pytest.approx(row["rewards/model/mean"])
        assert row["frac_reward_zero_std"] == 0
        assert row["grad_norm"] > 0
    verify(compared.root / "data/models/rl")
    compared.set(rl__supervision="outcome", rl__reward_funcs=["math", "model"], rewards={})


def test_completions_of_the_model_itself_are_paired_by_the_grader(compared):
    compared.set(
        preferences={
            "enabled": True,
            "num_problems": 4,
            "num_samples": 1000,
            "batch_size": 1000,
            "max_completion_length": 6,
            "max_pairs_per_problem": 5,
            "validation": 0.3,
        }
    )
    assert _run("preferences", preferences) == 0
    output = compared.root / "data/preferences"
    counts = read_json(output / "counts.json")
    assert (counts["problems"], counts["completions"]) == (4, 4000)
    pairs = pd.concat(pd.read_parquet(output / f"{split}.parquet") for split in ("train", "validation"))
    assert set(pairs["margin"]) == {1.0}
    assert pairs.groupby("prompt").size().max() <= 5
    answers = {row["prompt"]: row["answer"] for row in pd.read_parquet(
        compared.root / "data/prepared/train.parquet"
    ).to_dict("records")}  # fmt: skip
    for pair in pairs.to_dict("records"):
        assert answers[pair["prompt"]] in pair["chosen"]
        assert answers[pair["prompt"]] != pair["rejected"]


def test_rl_sees_the_problems_that_were_solved_sometimes(restored):
    """On the samples of the test before: one prompt of each kept problem, hardest first."""
    rates = read_rates(restored.root / "data/preferences/solve_rates.parquet")
    train = pd.read_parquet(restored.root / "data/prepared/train.parquet")
    assert list(rates) == train["id"].tolist()
    assert {one.samples for one in rates.values()} == {1000}
    some = sum(0 < one.rate < 1 for one in rates.values())
    paired = set(pd.read_parquet(restored.root / "data/preferences/train.parquet")["prompt"])
    assert 0 < len(paired) <= some
    curriculum = {"enabled": True, "order": "hard_first"}
    restored.set(
        rl={"num_steps": 1, "prompts_per_step": some, "num_generations": 2, "curriculum": curriculum}
    )
    assert _run("rl", rl) == 0
    metrics = read_json(restored.root / "data/models/rl/metrics.json")
    assert metrics["curriculum/kept"] == some
    assert metrics["curriculum/too_hard"] + metrics["curriculum/too_easy"] == len(train) - some
    restored.set(rl={"prompts_per_step": 1, "curriculum": {"enabled": True, "above": 0.99, "below": 0.999}})
    assert _run("rl", rl) == BAD_INPUT
    assert "problems by solve rate: " in outcome(restored, "rl")["message"]


def test_too_few_pairs_are_refused_with_the_numbers(compared):
    compared.set(
        preferences={"enabled": True, "num_problems": 1, "num_samples": 2, "max_completion_length": 2}
    )
    assert _run("preferences", preferences) == BAD_INPUT
    message = outcome(compared, "preferences")["message"]
    assert message.startswith(
        "preferences: 0 pairs to train on and 0 held out, at least one of each is needed"
    )
    assert "problems 1" in message
    assert "completions 2" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_problems": 5}, r"preferences.num_problems = 5: train.parquet holds 4 problems"),
        (
            {"num_problems": 4, "max_completion_length": 126},
            "exceeds the model's context of 128 tokens; at most",
        ),
        ({"source": "file", "path": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"source": "file", "path": "pairs.jsonl", "sha256": "0"}, "pairs.jsonl: its sha256 is"),
    ],
)
def test_settings_that_can_not_work_are_refused(compared, settings, message):
    compared.set(preferences={"enabled": True} | settings)
    assert _run("preferences", preferences) == BAD_INPUT
    assert message in outcome(compared, "preferences")["message"]


def test_switched_off_they_leave_references_and_rl_starts_from_what_dpo_stands_for(compared):
    compared.set(**OFF)
    for name, body in (("preferences", preferences), ("dpo", dpo), ("reward_model", reward_model)):
        assert _run(name, body) == 0
    for folder in ("preferences", "models/reward"):
        assert is_disabled(compared.root / "data" / folder)
        assert {p.name for p in (compared.root / "data" / folder).iterdir()} == {
            "reference.json", "metrics.json", "manifest.json"
        }  # fmt: skip
    assert resolve_model(compared.root / "data/models/dpo") == compared.root / "data/models/base"
    with pytest.raises(BadInput, match="data/models/reward: the stage that makes it is disabled"):
        resolve_model(compared.root / "data/models/reward")
