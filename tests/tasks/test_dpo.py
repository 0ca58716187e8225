"""Stage `dpo` on a small model, with only what it touches around it: what it publishes and refuses."""

import dataclasses
import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.dpo import dpo
from training.config import (
    DPOConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    PromptConfig,
    ScratchModelConfig,
)
from training.errors import BadInput
from training.models import bring_model, load_model, pick_device
from training.preferences import Pair, write_pairs
from training.recorder import NullRecorder

SHAPE = ScratchModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)


class Record(NullRecorder):
    """Keeps texts and inputs beside the metrics."""

    def __init__(self):
        self.texts, self.inputs = {}, {}

    def text(self, text, name):
        self.texts[name] = text

    def input(self, path, name, context):
        self.inputs[name] = (Path(path).name, context)


class SmallStage(SimpleNamespace):
    """A stage's folders and parameters without a tree around them."""

    def folder(self, stage):
        return self.root / stage

    @contextmanager
    def publish(self, metrics):
        self.metrics = metrics
        self.output.mkdir()
        yield self.output


def pairs(rows):
    return [Pair(f"{a}+{b}=", "yes", "no", 1.0) for a, b in rows]


def write(stage_root, split, some_pairs):
    write_pairs(stage_root / "preferences" / f"{split}.parquet", some_pairs)


@pytest.fixture
def stage(tmp_path):
    bring_model(ModelConfig(source="scratch", scratch=SHAPE), 1, tmp_path / "sft")
    (tmp_path / "preferences").mkdir()
    train = pairs([(a, b) for a in range(4) for b in range(4)])
    train[3] = dataclasses.replace(train[3], rejected="no" * 20)
    write(tmp_path, "train", train)
    write(tmp_path, "validation", pairs([(a, b) for a in range(5, 8) for b in range(3)]))
    settings = DPOConfig(
        enabled=True,
        num_steps=10,
        batch_size=8,
        max_length=30,
        optimizer=OptimizerConfig(learning_rate=3e-3),
    )
    params = SimpleNamespace(
        dpo=settings, prompt=PromptConfig(chat_template="none"), seed=7, threads=1, device="cpu"
    )
    return SmallStage(
        root=tmp_path, params=params, scratch=tmp_path / "scratch", output=tmp_path / "dpo", run=Record()
    )


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_it_publishes_a_model_that_prefers_the_chosen_completions(stage, lora):
    stage.params.dpo = stage.params.dpo.model_copy(update={"lora": LoraConfig(enabled=lora, r=4)})
    dpo(stage)
    assert stage.metrics["pairs"] == 15
    assert stage.metrics["dropped_too_long"] == 1
    assert stage.metrics["validation_pairs"] == 9
    assert stage.metrics["validation_accuracy"] == 1
    assert stage.metrics["validation_margin"] > 0
    history = [json.loads(line) for line in (stage.output / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in history] == list(range(1, 11))
    assert history[-1]["loss"] == stage.metrics["final_loss"] < history[0]["loss"]
    published = dict(load_model(stage.output, pick_device("cpu")).named_parameters())
    start = dict(load_model(stage.root / "sft", pick_device("cpu")).named_parameters())
    assert published.keys() == start.keys()
    assert any((published[name] != start[name]).any() for name in start)
    assert stage.run.inputs == {
        "train": ("train.parquet", "training"),
        "validation": ("validation.parquet", "evaluation"),
    }
    assert stage.run.texts["rendered_prompt.txt"] == "chosen:\n0+0=yes\n\nrejected:\n0+0=no"


def test_without_validation_pairs_the_metrics_say_so(stage):
    write(stage.root, "validation", [])
    dpo(stage)
    assert stage.metrics["validation_pairs"] == 0
    assert "validation_accuracy" not in stage.metrics


def test_too_few_pairs_are_refused_with_the_numbers(stage):
    write(stage.root, "train", [])
    with pytest.raises(BadInput, match=r"dpo.batch_size = 8.*only 0"):
        dpo(stage)


def test_missing_pairs_name_the_stage_that_writes_them(stage):
    (stage.root / "preferences" / "train.parquet").unlink()
    with pytest.raises(BadInput, match=r"train.parquet: missing; stage `preferences`"):
        dpo(stage)
