"""Grading step by step: process supervision (DeepSeekMath, arXiv:2402.03300 §4.1.3).

Reward functions are called as ever, with two columns more: `steps`, for each completion the list of its steps'
texts, and `step_ends`, the list of the indices in `completion_ids` of their last tokens. For each completion they
return a list with a reward (or None) for each step, None, or one number, which is the last step's: that is how a
reward of the outcome joins in. The parts of a step are added up as those of a completion are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from training.errors import BadInput
from training.rewards import RewardSum, Scores, StepScores, as_number
from training.rewards.steps import split_completion


def score_steps(
    rewards: RewardSum,
    prompts: Sequence[str],
    completions: Sequence[str],
    decode: Callable[[list[int]], str],
    *,
    completion_ids: Sequence[list[int]],
    **columns: Any,
) -> Scores:
    """Grade each step of each completion; `decode` gives the text of sampled ids.

    Raises BadInput when a function returns another number of rewards than there are completions, or than there
    are steps in one of them.
    """
    steps = [split_completion(ids, decode, rewards.separator) for ids in completion_ids]
    returned = rewards.returned(
        prompts=prompts,
        completions=completions,
        completion_ids=completion_ids,
        steps=[[step.text for step in one] for one in steps],
        step_ends=[[step.end for step in one] for one in steps],
        **columns,
    )
    scored = []
    for i, own in enumerate(steps):
        parts = {name: _per_step(values[i], name, i, len(own)) for name, values in returned.items()}
        scored.append(StepScores(own, rewards.weighted(parts), parts))
    return Scores(
        [_mean(one.total) for one in scored],
        {name: [_mean(one.parts[name]) for one in scored] for name in rewards.names},
        scored,
    )


def shown_steps(scores: Scores, index: int) -> dict[str, Any]:
    """A completion's columns for a table: its steps, the reward of each and its parts; none without steps."""
    if scores.steps is None:
        return {}
    own = scores.steps[index]
    columns: dict[str, Any] = {"steps": [step.text for step in own.steps], "step_rewards": own.total}
    return columns | {f"step_rewards/{name}": values for name, values in own.parts.items()}


def _per_step(value: Any, name: str, index: int, number: int) -> list[float | None]:
    if not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return [None] * (number - 1) + [as_number(value, name, index)]
    found = [as_number(one, name, index) for one in value]
    if len(found) != number:
        raise BadInput(
            f"reward {name!r}: returned {len(found)} rewards for completion {index}, which has {number} steps"
        )
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
