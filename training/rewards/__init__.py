"""Rewards: functions that grade completions, with TRL's signature.

    f(prompts, completions, **columns) -> list[float | None]

`prompts` and `completions` are texts; `columns` are the rows' other columns (`answer`, `source`, `id`) and
`finish_reason`, and in RL `completion_ids`, the sampled token ids. None means "not applicable here".
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.config import RewardsConfig
from training.errors import BadInput
from training.rewards.code import CodeReward
from training.rewards.format import FormatReward
from training.rewards.math import MathReward
from training.rewards.overlong import OverlongReward

Reward = Callable[..., list[float | None]]
"""A reward function, called by keyword as above."""

BUILT_IN = ("math", "code", "format", "overlong", "model")


def load_reward(name: str, config: RewardsConfig) -> Reward:
    """The reward called `name`: built in, or a user's function as `package.module:function`.

    Raises BadInput when there is none of that name.
    """
    if name == "math":
        return MathReward(config.math.timeout)
    if name == "code":
        return CodeReward(config.code)
    if name == "format":
        return FormatReward(config.format.pattern)
    if name == "overlong":
        return OverlongReward(config.overlong.max_length, config.overlong.buffer)
    if name == "model":
        raise BadInput(
            "reward 'model': the reward model is there in RL only; accepted here: math, code, format"
        )
    module_name, separator, function = name.partition(":")
    if not separator:
        raise BadInput(
            f"reward {name!r}: unknown; accepted: {', '.join(BUILT_IN)}, or package.module:function"
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        reward = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise BadInput(f"reward {name!r}: can't be imported: {error}") from error
    if not callable(reward):
        raise BadInput(f"reward {name!r}: not a function")
    return reward


@dataclass(frozen=True)
class Scores:
    """Rewards of a batch of completions. `total[i]` is None where no part applied to completion i."""

    total: list[float | None]
    parts: dict[str, list[float | None]]


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
        known = given or {}
        self.functions = [known[name] if name in known else load_reward(name, config) for name in self.names]

    def score(self, prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> Scores:
        """Grade each completion; parts that return None are left out of its sum.

        Raises BadInput when a function returns another number of rewards than there are completions.
        """
        parts: dict[str, list[float | None]] = {}
        for name, function in zip(self.names, self.functions, strict=True):
            values = function(prompts=prompts, completions=completions, **columns)
            if len(values) != len(completions):
                raise BadInput(
                    f"reward {name!r}: returned {len(values)} values for {len(completions)} completions"
                )
            parts[name] = [None if v is None or v != v else float(v) for v in values]
        total: list[float | None] = []
        for row in zip(*parts.values(), strict=True):
            applicable = [w * v for w, v in zip(self.weights, row, strict=True) if v is not None]
            total.append(sum(applicable) if applicable else None)
        return Scores(total, parts)
