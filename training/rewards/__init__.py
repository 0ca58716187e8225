"""Rewards: functions that grade completions, with TRL's signature.

    f(prompts, completions, **columns) -> list[float | None]        or async def f(...)

`prompts` and `completions` are texts; `columns` are the rows' other columns (`answer`, `source`, `id`) and
`finish_reason`, and in RL `completion_ids`, the sampled token ids. None means "not applicable here". With
process supervision there are steps besides, and rewards may be lists (`training.rewards.process`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from training.config import RewardsConfig
from training.errors import BadInput
from training.rewards.code import CodeReward
from training.rewards.countdown import CountdownReward
from training.rewards.equations import EquationsReward
from training.rewards.explained import finished
from training.rewards.format import FormatReward
from training.rewards.gym import ReasoningGymReward
from training.rewards.judge import JudgeReward
from training.rewards.language import LanguageReward
from training.rewards.math import MathReward
from training.rewards.overlong import OverlongReward
from training.rewards.repetition import RepetitionReward
from training.rewards.steps import Step

Reward = Callable[..., Any]
"""A reward function, called by keyword as above."""

BUILT_IN: dict[str, Callable[[RewardsConfig], Reward]] = {
    "math": lambda config: MathReward(config.math.timeout),
    "code": lambda config: CodeReward(config.code),
    "countdown": lambda config: CountdownReward(),
    "reasoning_gym": lambda config: ReasoningGymReward(config.reasoning_gym.timeout),
    "format": lambda config: FormatReward(config.format.pattern),
    "overlong": lambda config: OverlongReward(config.overlong.max_length, config.overlong.buffer),
    "repetition": lambda config: RepetitionReward(
        config.repetition.ngram_size, config.repetition.max_penalty
    ),
    "language": lambda config: LanguageReward(config.language.target),
    "equations": lambda config: EquationsReward(),
    "judge": lambda config: JudgeReward(config.judge),
}
"""The rewards that have names; besides them RL gives `model`, the reward model."""


def load_reward(name: str, config: RewardsConfig) -> Reward:
    """The reward called `name`: built in, or a user's function as `package.module:function` or `file.py:function`.

    Raises BadInput when there is none of that name.
    """
    if name in BUILT_IN:
        return BUILT_IN[name](config)
    if name == "model":
        raise BadInput(
            f"reward 'model': the reward model is there in RL only; accepted here: {', '.join(BUILT_IN)}"
        )
    module_name, separator, function = name.rpartition(":")
    if not separator:
        raise BadInput(
            f"reward {name!r}: unknown; accepted: {', '.join([*BUILT_IN, 'model'])}, "
            "package.module:function or path/to/file.py:function"
        )
    try:
        reward = getattr(_module(module_name), function)
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise BadInput(f"reward {name!r}: can't be imported: {error}") from error
    if not callable(reward):
        raise BadInput(f"reward {name!r}: not a function")
    return reward


def _module(name: str) -> ModuleType:
    """A module by its name, or from a file; both are looked for from the working directory, the tree's root."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(f"reward_{Path(name).stem}", Path(name).resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class StepScores:
    """The steps of one completion: the weighted sum of each one's rewards, and its parts; None where none applied."""

    steps: list[Step]
    total: list[float | None]
    parts: dict[str, list[float | None]]


@dataclass(frozen=True)
class Scores:
    """Rewards of a batch of completions. `total[i]` is None where no part applied to completion i.

    With process supervision `steps` holds the completions' steps, and `total` and `parts` the mean over those of
    a completion's steps that have the reward.
    """

    total: list[float | None]
    parts: dict[str, list[float | None]]
    steps: list[StepScores] | None = None

    def part(self, rows: slice) -> Scores:
        """The scores of some neighbouring completions."""
        parts = {name: values[rows] for name, values in self.parts.items()}
        return Scores(self.total[rows], parts, None if self.steps is None else self.steps[rows])

    @staticmethod
    def joined(scores: Sequence[Scores]) -> Scores:
        """The scores of several batches, at least one, that were graded by the same rewards, as of one."""
        return Scores(
            [total for one in scores for total in one.total],
            {name: [v for one in scores for v in one.parts[name]] for name in scores[0].parts},
            None if scores[0].steps is None else [steps for one in scores for steps in one.steps or []],
        )


class RewardSum:
    """A weighted sum of rewards, remembering each part by name.

    `given` holds functions that are there already, such as one that keeps a model; the others are loaded by name.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[float] | None,
        config: RewardsConfig,
        given: Mapping[str, Reward] | None = None,
    ) -> None:
        self.names = list(names)
        self.weights = list(weights) if weights is not None else [1.0] * len(self.names)
        self.separator = config.steps.separator
        known = given or {}
        self.functions = [known[name] if name in known else load_reward(name, config) for name in self.names]

    def score(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> Scores:
        """Grade each completion; parts that return None are left out of its sum.

        Raises BadInput when a function returns another number of rewards than there are completions, or a list
        for one.
        """
        parts = {
            name: [as_number(value, name, i) for i, value in enumerate(values)]
            for name, values in self.returned(prompts=prompts, completions=completions, **columns).items()
        }
        return Scores(self.weighted(parts), parts)

    def returned(self, *, completions: Sequence[str], **columns: Any) -> dict[str, Sequence[Any]]:
        """What each function returns, one value for each completion; raises BadInput for another number."""
        called = [function(completions=completions, **columns) for function in self.functions]
        found: dict[str, Sequence[Any]] = dict(zip(self.names, finished(called), strict=True))
        for name, values in found.items():
            if len(values) != len(completions):
                raise BadInput(
                    f"reward {name!r}: returned {len(values)} values for {len(completions)} completions"
                )
        return found

    def weighted(self, parts: Mapping[str, Sequence[float | None]]) -> list[float | None]:
        """The weighted sum of the parts at each place, None where none applies."""
        total: list[float | None] = []
        for row in zip(*parts.values(), strict=True):
            applicable = [w * v for w, v in zip(self.weights, row, strict=True) if v is not None]
            total.append(sum(applicable) if applicable else None)
        return total


def as_number(value: Any, name: str, index: int) -> float | None:
    """A reward as a number, None for None and NaN; raises BadInput, naming the completion, for anything else."""
    try:
        return None if value is None or value != value else float(value)
    except (TypeError, ValueError):
        raise BadInput(
            f"reward {name!r}: returned {type(value).__name__} for completion {index}, expected a number or None "
            "(rewards for each of its steps need rl.supervision: process)"
        ) from None
