"""Sampling and grading: n completions of held-out problems by one model, as plain rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training.config import RewardsConfig
from training.evaluation.metrics import Graded
from training.prompts import Message, PromptRenderer
from training.randomness import derive_seed
from training.rewards import RewardSum
from training.rewards.code import extract_program
from training.rewards.math import extract_answer, normalize_answer
from training.rollout.protocol import Completion, Request, RolloutEngine, Sampling


@dataclass(frozen=True)
class Problem:
    """A held-out question; `index` is its place in the test split, from which its random streams derive."""

    index: int
    id: str
    prompt: str
    answer: str
    source: str
    context: Sequence[Message] = ()
    """The messages before the prompt."""


def sample_problems(
    engine: RolloutEngine,
    problems: Sequence[Problem],
    prompt_ids: Sequence[list[int]],
    sampling: Sampling,
    num_samples: int,
    seed: int,
) -> list[Completion]:
    """`num_samples` completions of each problem, problem by problem.

    Sample s of problem i draws from the stream (seed, "evaluate", i, s), whatever the model and the batch are,
    so that two models meet the same randomness.
    """
    requests = [
        Request(tuple(ids), derive_seed(seed, "evaluate", problem.index, sample))
        for problem, ids in zip(problems, prompt_ids, strict=True)
        for sample in range(num_samples)
    ]
    return engine.generate(requests, sampling)


class Judge:
    """Grades completions: is the answer right, and is it right as strictly as was asked for?

    Strict means that the grader gives 1.0, the completion ended by itself (`stop`, not cut off) and, where the
    recipe rewards the format, that the format's reward is 1.0 too. A grader that gives None (it ran out of
    time) leaves the sample ungraded; it counts as not right and is reported.
    """

    def __init__(self, rewards: RewardsConfig, needs_format: bool) -> None:
        self.names = list(dict.fromkeys([rewards.grader, "format"] if needs_format else [rewards.grader]))
        self._rewards = RewardSum(self.names, None, rewards)
        self._extract = extract_program if rewards.grader == "code" else extract_answer
        self._normalize = str.strip if rewards.grader == "code" else normalize_answer

    def rows(
        self, problems: Sequence[Problem], completions: Sequence[Completion], renderer: PromptRenderer
    ) -> list[dict[str, Any]]:
        """One row a completion; `completions` holds the same number for each problem, in order.

        `logprob` is the sum over sampled tokens in nats, `extracted` the answer as written, `vote` its normal
        form, `num_tokens` includes the end token.
        """
        each = len(completions) // len(problems)
        owners = [problem for problem in problems for _ in range(each)]
        texts = [renderer.decode(completion.ids) for completion in completions]
        parts = self._rewards.score(
            prompts=[problem.prompt for problem in owners],
            completions=texts,
            answer=[problem.answer for problem in owners],
            source=[problem.source for problem in owners],
            id=[problem.id for problem in owners],
            finish_reason=[completion.finish_reason for completion in completions],
        ).parts
        rows = []
        for i, (problem, completion, text) in enumerate(zip(owners, completions, texts, strict=True)):
            scores = [parts[name][i] for name in self.names]
            extracted = self._extract(text)
            rows.append(
                {
                    "id": problem.id,
                    "prompt": problem.prompt,
                    "answer": problem.answer,
                    "sample": i % each,
                    "completion": text,
                    "extracted": extracted,
                    "vote": None if extracted is None else self._normalize(extracted),
                    "graded": scores[0] is not None,
                    "correct": scores[0] == 1.0,
                    "strict": all(score == 1.0 for score in scores) and completion.finish_reason == "stop",
                    "finish_reason": completion.finish_reason,
                    "num_tokens": len(completion.ids),
                    "logprob": float(sum(completion.logprobs)),
                }
            )
        return rows


def graded(row: dict[str, Any]) -> Graded:
    """What the estimators need of a row."""
    return Graded(
        vote=row["vote"],
        correct=row["correct"],
        strict=row["strict"],
        truncated=row["finish_reason"] == "length",
        length=row["num_tokens"],
    )
