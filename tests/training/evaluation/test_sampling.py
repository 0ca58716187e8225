"""Sampling and grading of problems: what a row says, and which random stream a sample has."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from training.config import MathRewardConfig, PromptConfig, RewardsConfig
from training.evaluation.sampling import Judge, Problem, graded, sample_problems
from training.models import character_tokenizer
from training.prompts import PromptRenderer
from training.rollout.native import NativeEngine
from training.rollout.protocol import Completion, Sampling

TOKENIZER = character_tokenizer("0123456789+-=. <>/abcdefghijklmnopqrstuvwxyz")
RENDERER = PromptRenderer(TOKENIZER, PromptConfig(chat_template="none"))
PROBLEMS = [Problem(0, "p0", "3+4=", "7", "sums"), Problem(1, "p1", "2+2=", "4", "sums")]


def completion(text: str, stops: bool = True) -> Completion:
    ids = RENDERER.completion_ids(text) if stops else RENDERER.completion_ids(text)[:-1]
    return Completion(ids, [-0.5] * len(ids), "stop" if stops else "length")


def test_a_row_says_what_was_sampled_and_how_it_was_graded():
    completions = [
        completion("7"),
        completion("it is 8"),
        completion("4.0", stops=False),
        completion("no idea"),
    ]
    rows = Judge(RewardsConfig(), needs_format=False).rows(PROBLEMS, completions, RENDERER)
    assert [(row["id"], row["sample"]) for row in rows] == [("p0", 0), ("p0", 1), ("p1", 0), ("p1", 1)]
    assert [row["completion"] for row in rows] == ["7", "it is 8", "4.0", "no idea"]
    assert [row["extracted"] for row in rows] == ["7", "8", "4.0", None]
    assert [row["vote"] for row in rows] == ["7", "8", "4", None]
    assert [row["correct"] for row in rows] == [True, False, True, False]
    assert [row["strict"] for row in rows] == [True, False, False, False]
    assert [row["num_tokens"] for row in rows] == [2, 8, 3, 8]
    assert [row["logprob"] for row in rows] == [-1.0, -4.0, -1.5, -4.0]
    assert [graded(row).truncated for row in rows] == [False, False, True, False]


def test_strict_asks_for_the_format_where_the_recipe_rewards_it():
    good, bare = completion("<think>3 and 4</think><answer>7</answer>"), completion("7")
    with_format = Judge(RewardsConfig(), needs_format=True)
    assert with_format.names == ["math", "format"]
    rows = with_format.rows(PROBLEMS[:1], [good, bare], RENDERER)
    assert [(row["correct"], row["strict"]) for row in rows] == [(True, True), (True, False)]
    without = Judge(RewardsConfig(), needs_format=False).rows(PROBLEMS[:1], [good, bare], RENDERER)
    assert [row["strict"] for row in without] == [True, True]


def test_a_sample_without_verdict_is_ungraded_and_not_right(tmp_path, monkeypatch):
    (tmp_path / "never_sure.py").write_text(
        "def grade(prompts, completions, **columns):\n    return [None for _ in completions]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rewards = RewardsConfig(grader="never_sure:grade", math=MathRewardConfig())
    [row] = Judge(rewards, needs_format=False).rows(PROBLEMS[:1], [completion("7")], RENDERER)
    assert (row["graded"], row["correct"], row["strict"]) == (False, False, False)


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENIZER), max_position_embeddings=64, **shape))
    return NativeEngine(model.eval(), {TOKENIZER.eos_token_id}, 8)


def test_a_samples_stream_depends_on_its_problem_and_number_alone(engine):
    sampling = Sampling(temperature=1.0, max_tokens=6)
    ids = [RENDERER.ids(problem.prompt) for problem in PROBLEMS]
    both = sample_problems(engine, PROBLEMS, ids, sampling, num_samples=5, seed=3)
    alone = sample_problems(engine, PROBLEMS[1:], ids[1:], sampling, num_samples=2, seed=3)
    assert [c.ids for c in both[5:7]] == [c.ids for c in alone]
    assert len({tuple(c.ids) for c in both}) > 5, "samples of a problem must differ"
    other = sample_problems(engine, PROBLEMS, ids, sampling, num_samples=5, seed=4)
    assert [c.ids for c in other] != [c.ids for c in both]
