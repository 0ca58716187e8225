"""From rows of each kind to a graded RL step and an evaluation: what prepare, validate, SFT, RL and evaluate make of them."""

import json
from pathlib import Path

import pandas as pd
import pytest

from tasks.evaluate import evaluate
from tasks.prepare import prepare
from tasks.rl import rl
from tasks.sft import sft
from tasks.validate import validate
from tests.training.rewards.test_judge import Endpoint, endpoint  # noqa: F401

CHAT = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
SUMS = [{"question": f"{a} + {b}", "answer": str(a + b)} for a in range(8) for b in range(8)]
MESSAGES = [
    {
        "messages": [
            {"role": "user", "content": f"I have {a} apples."},
            {"role": "assistant", "content": "Good."},
            {"role": "user", "content": f"I buy {b}. How many?"},
            {"role": "assistant", "content": f"You have {a + b}."},
        ]
    }
    for a in range(1, 8)
    for b in range(1, 8)
]
COUNTDOWN = [
    {"nums": [a, b], "target": a + b, "solution": f"<answer>{a} + {b}</answer>"}
    for a in range(1, 9)
    for b in range(10, 18)
]
FILE = {"kind": "file", "path": "rows.jsonl"}


def everything(tree, rows, sources, **sections):
    """Run the stages on `rows`; returns the history of RL, the rendered prompt it recorded, and the evaluation's metrics."""
    (tree.root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "threads": 1,
        "device": "cpu",
        "prompt": {"chat_template": CHAT},
        "prepare": {"sources": sources, "near_duplicates": None},
        "validate": {"max_completion_tokens": 64, "min_rows": {"train": 4}},
        "sft": {"num_steps": 2, "batch_size": 4},
        "rl": {
            "num_steps": 1,
            "prompts_per_step": 2,
            "num_generations": 2,
            "max_prompt_length": 400,
            "max_completion_length": 8,
        },
        "evaluate": {
            "num_problems": 2,
            "num_samples": 2,
            "k": [1, 2],
            "max_completion_length": 8,
            "bootstrap": 20,
        },
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    tree.params(**settings)
    for stage in (prepare, validate, sft, rl, evaluate):
        assert tree.run(stage.__name__, stage) == 0, tree.outcome(stage.__name__)["message"]
    history = [json.loads(line) for line in (tree.root / "data/models/rl/history.jsonl").open()]
    client, run = tree.record("rl")
    [shown] = [f for f in client.list_artifacts(run.info.run_id) if f.path == "rendered_prompt.txt"]
    text = Path(client.download_artifacts(run.info.run_id, shown.path, str(tree.root))).read_text()
    return history, text, json.loads((tree.root / "data/evaluation/metrics.json").read_text())


def test_chats_teach_and_solved_questions_are_shown(with_model):
    """Conversations for SFT alone beside sums that are graded, two solved ones shown before each."""
    (with_model.root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MESSAGES))
    chats = {"kind": "file", "path": "chats.jsonl", "format": "openai", "split": "train"}
    history, shown, metrics = everything(
        with_model,
        SUMS,
        [chats, FILE],
        prompt={"chat_template": CHAT, "few_shot": 2},
        validate={
            "lengths": {"max_share": 1.0},
            "max_completion_tokens": 64,
            "near_duplicates": {"max_share": 1.0},
        },
    )
    assert history[0]["rewards/math/failures"] == 0
    assert [line[:2] for line in shown.splitlines()] == ["u:", "a:", "u:", "a:", "u:", "a:"]
    train = pd.read_parquet(with_model.root / "data/prepared/train.parquet")
    talked = train[train["answer"].isna()]
    assert set(talked["completion"].str[:9]) == {"You have "}
    assert {len(context) for context in talked["context"]} == {2}
    assert metrics["rl/ungraded"] == 0


def test_numbers_to_reach(with_model):
    history, _, metrics = everything(
        with_model,
        COUNTDOWN,
        [FILE | {"format": "countdown", "columns": {"solution": "solution"}}],
        rewards={"grader": "countdown"},
        rl={
            "reward_funcs": ["countdown"],
            "num_steps": 1,
            "prompts_per_step": 2,
            "num_generations": 2,
            "max_prompt_length": 400,
            "max_completion_length": 8,
        },
    )
    assert history[0]["reward"] == 0.0
    assert metrics["rl/ungraded"] == 0


def test_a_task_that_grades_itself(with_model):
    source = {"kind": "reasoning_gym", "task": "chain_sum", "format": "reasoning_gym", "size": 60}
    history, _, metrics = everything(
        with_model,
        [],
        [source],
        rewards={"grader": "reasoning_gym"},
        rl={
            "reward_funcs": ["reasoning_gym"],
            "num_steps": 1,
            "prompts_per_step": 2,
            "num_generations": 2,
            "max_prompt_length": 400,
            "max_completion_length": 8,
        },
    )
    assert history[0]["rewards/reasoning_gym/failures"] == 0
    assert metrics["rl/ungraded"] == 0


@pytest.mark.parametrize("down", [False, True])
def test_a_judge_rewards_and_its_outage_is_counted(with_model, endpoint, down):  # noqa: F811
    endpoint.down = down
    judge = {
        "base_url": endpoint.url,
        "model": "grader",
        "rubric": "|{completion}|",
        "retries": 0,
        "maximum": 100.0,
    }
    history, _, _ = everything(
        with_model,
        SUMS,
        [FILE],
        rewards={"judge": judge},
        rl={
            "reward_funcs": ["judge", "math"],
            "num_steps": 1,
            "prompts_per_step": 2,
            "num_generations": 2,
            "max_prompt_length": 400,
            "max_completion_length": 8,
        },
    )
    assert history[0]["rewards/judge/failures"] == (4 if down else 0)
    assert bool(endpoint.asked) or down
