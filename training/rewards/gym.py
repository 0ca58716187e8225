"""`reasoning_gym`: the score that a reasoning-gym task's own scorer gives.

The answer is what the last `<answer>` element holds, else the whole text. Text up to `</think>` never counts, and a
completion that never leaves `<think>` has none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from training.errors import BadInput
from training.rewards.explained import Explained, ExplainingReward
from training.rewards.extract import after_thinking, tagged
from training.rewards.workers import Workers

_MEMORY = 4 << 30
"""Bytes of address space that a worker may have."""
_server = Workers("training.rewards.gym_scorer:score", ["training.rewards.gym_scorer"], _MEMORY)


class ReasoningGymReward(ExplainingReward):
    """The task's score, 0 to 1; None where its scorer took longer than `timeout` or crashed."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def explain(
        self, prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: Any
    ) -> list[Explained]:
        """A grade for each completion; `answer` is what format reasoning_gym makes, from which the problem is made again.

        Raises BadInput where it is something else, or where this reasoning-gym makes another problem of it.
        """
        problems = [_problem(text) for text in answer]
        found = [_extracted(text) for text in completions]
        asked = {
            (text, problem): None for text, problem in zip(found, answer, strict=True) if text is not None
        }
        results = dict(
            zip(asked, _server.call([(t, json.loads(p)) for t, p in asked], self.timeout), strict=True)
        )
        return [
            Explained(0.0, None, "no answer found")
            if text is None
            else _explained(text, results[text, right], problem, self.timeout)
            for text, problem, right in zip(found, problems, answer, strict=True)
        ]


def _explained(text: str, result: Any, problem: dict[str, Any], timeout: float) -> Explained:
    if result is None:
        return Explained(None, text, f"{problem['task']}: not scored within {timeout:g} s")
    if isinstance(result, str):
        raise BadInput(f"reward 'reasoning_gym': {result}")
    score, reason = result
    return Explained(score, text, f"{problem['task']}: {reason}")


def _extracted(text: str) -> str | None:
    rest = after_thinking(text)
    if rest is None:
        return None
    found = tagged(rest)
    return (rest.strip() if found is None else found) or None


def _problem(answer: str) -> dict[str, Any]:
    try:
        problem = json.loads(answer)
        if {"task", "settings", "seed", "size", "index", "answer"} <= problem.keys():
            return problem
    except (AttributeError, ValueError):
        pass
    raise BadInput(
        f"reward 'reasoning_gym': answer {answer[:80]!r}; expected what a source of kind reasoning_gym with "
        "format reasoning_gym makes"
    )
