"""GSM8K in full through the product's loaders, and two RL steps on it with SmolLM2."""

from __future__ import annotations

import pandas as pd
import pytest

from tests.e2e.runs import ok, rl_history
from tests.project import gradeline
from tests.shared import SHARED, needs_shared

pytestmark = [pytest.mark.e2e, needs_shared]


def test_two_steps_on_gsm8k_with_smollm2(clone):
    recipe = (clone / "configs" / "gsm8k-smollm2.yaml").read_text()
    for split in ("train", "test"):
        url = next(word for word in recipe.split() if word.endswith(f"/{split}.jsonl"))
        recipe = recipe.replace(url, str(SHARED / "gsm8k" / f"{split}.jsonl"))
    (clone / "local.yaml").write_text(recipe)
    small = {
        "sft.enabled": "false",
        "rl.num_steps": 2,
        "rl.prompts_per_step": 2,
        "rl.num_generations": 2,
        "rl.max_completion_length": 32,
        "evaluate.num_problems": 4,
        "evaluate.num_samples": 2,
        "evaluate.k": "[1, 2]",
        "evaluate.max_completion_length": 32,
    }
    settings = [part for key, value in small.items() for part in ("-S", f"{key}={value}")]
    ok(gradeline(clone, "run", "-c", "local.yaml", *settings, "--name", "gsm8k"))
    tree = clone / ".gradeline" / "workspaces" / "gsm8k"
    rows = {
        split: len(pd.read_parquet(tree / "data" / "prepared" / f"{split}.parquet"))
        for split in ("train", "test")
    }
    # of the 7473 questions one says the same as an earlier one, with the same answer, and is left out
    assert rows == {"train": 7472, "test": 1319}
    history = rl_history(tree)
    assert [row["step"] for row in history] == [1, 2]
    assert all(row["num_tokens"] > 0 for row in history)
    assert (tree / "data/models/rl/model.safetensors").stat().st_size > 500_000_000
