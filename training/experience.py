"""What one rollout step leaves for the update: completions, rewards, and per-token tensors [B, T].

B completions stand in groups of `num_generations`; T is the longest one. Tensors per token are 0 outside `mask`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from training.algorithms.advantages import (
    group_advantages,
    leave_one_out_advantages,
    process_advantages,
    reinforce_plus_plus_advantages,
    whiten,
    zero_spread,
)
from training.algorithms.gae import gae, token_rewards
from training.batches import Tree
from training.config import RLConfig
from training.rewards import Scores, StepScores
from training.rollout.protocol import Completion


@dataclass(frozen=True)
class Problem:
    """A row of the train split: the user message, its rendered ids, and the columns rewards see."""

    prompt: str
    prompt_ids: tuple[int, ...]
    columns: dict[str, Any]


@dataclass(frozen=True)
class Rollout:
    """One step's samples: `num_generations` consecutive completions for each problem, [B] in all."""

    problems: list[Problem]
    completions: list[Completion]
    texts: list[str]
    scores: Scores
    seconds: dict[str, float]
    metrics: dict[str, float]


def reward_columns(
    problems: Sequence[Problem], completions: Sequence[Completion], size: int
) -> dict[str, list[Any]]:
    """What rewards see beside texts, one entry a completion; `size` consecutive completions are a problem's."""
    columns: dict[str, list[Any]] = {
        name: [problem.columns[name] for problem in problems for _ in range(size)]
        for name in problems[0].columns
    }
    columns["finish_reason"] = [completion.finish_reason for completion in completions]
    columns["completion_ids"] = [completion.ids for completion in completions]
    return columns


@dataclass
class Batch:
    """A rollout as trees (one a group) and tensors.

    mask [B, T]: the completions' own tokens; loss_mask: those of them in the loss. rewards [B] and valid [B]:
    the graded ones. old_logprobs, ref_logprobs, sampler_logprobs, values, returns, advantages: [B, T].
    With process supervision step_ends [B, T] marks the last token of each rewarded step, where step_rewards [B, T]
    holds its reward.
    """

    trees: list[Tree]
    group_size: int
    mask: torch.Tensor
    loss_mask: torch.Tensor
    rewards: torch.Tensor
    valid: torch.Tensor
    sampler_logprobs: torch.Tensor
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    step_rewards: torch.Tensor | None = None
    step_ends: torch.Tensor | None = None

    @property
    def groups(self) -> list[int]:
        return list(range(len(self.trees)))

    def rows(self, groups: Sequence[int]) -> torch.Tensor:
        """Indices of the groups' completions, in order."""
        size = self.group_size
        return torch.tensor(
            [row for g in groups for row in range(g * size, (g + 1) * size)], dtype=torch.long
        )

    def dense(self, flat: torch.Tensor, groups: Sequence[int]) -> torch.Tensor:
        """Values of the groups' tokens in order, [N], as [len(groups) * group_size, T]."""
        mask = self.mask[self.rows(groups)].to(flat.device)
        return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)

    def has_advantage(self, group: int) -> bool:
        """Whether any token of the group has an advantage."""
        assert self.advantages is not None
        return bool(self.advantages[self.rows([group])].any())


def batch_of(rollout: Rollout, config: RLConfig) -> Batch:
    """Lay a rollout out; a completion that misses its end token pays `missing_eos_penalty`.

    With process supervision its last step does, which has that reward alone where no other applied to it.
    """
    size = config.num_generations
    completions = rollout.completions
    lengths = torch.tensor([len(c.ids) for c in completions])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ended = torch.tensor([c.finish_reason == "stop" for c in completions])
    valid = torch.tensor([total is not None for total in rollout.scores.total])
    rewards = torch.tensor([total or 0.0 for total in rollout.scores.total], dtype=torch.float64)
    penalties = config.missing_eos_penalty * (~ended & valid).double()
    rewards = rewards - penalties
    step_rewards, step_ends = None, None
    if rollout.scores.steps is not None:
        step_rewards, step_ends = _step_tensors(rollout.scores.steps, mask, penalties)
    keep = valid & ended if config.mask_truncated_completions else valid
    sampled = torch.tensor([x for c in completions for x in c.logprobs], dtype=torch.float32)
    return Batch(
        trees=[
            Tree(list(problem.prompt_ids), [c.ids for c in completions[g * size : (g + 1) * size]])
            for g, problem in enumerate(rollout.problems)
        ],
        group_size=size,
        mask=mask,
        loss_mask=mask & keep[:, None],
        rewards=rewards,
        valid=valid,
        sampler_logprobs=torch.zeros(mask.shape).masked_scatter(mask, sampled),
        step_rewards=step_rewards,
        step_ends=step_ends,
    )


def _step_tensors(
    steps: list[StepScores], mask: torch.Tensor, penalties: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and marks [B, T] at the last tokens of rewarded steps, less the completions' penalties [B]."""
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    ends = torch.zeros_like(mask)
    for row, one in enumerate(steps):
        for step, reward in zip(one.steps, one.total, strict=True):
            if reward is not None:
                rewards[row, step.end], ends[row, step.end] = reward, True
        if penalties[row]:
            rewards[row, one.steps[-1].end] -= penalties[row]
            ends[row, one.steps[-1].end] = True
    return rewards, ends


def advantages_of(batch: Batch, config: RLConfig, kl: torch.Tensor | None, kl_coef: float) -> None:
    """Fill in the batch's advantages (and, with a value model, its returns) as the recipe's estimator says.

    `kl` [B, T] is the penalty that sits in the reward, None when it sits in the loss or nowhere. Without
    per-token rewards it is taken off the completion's reward as a sum over its tokens.
    """
    mask, size = batch.mask, batch.group_size
    if batch.step_rewards is not None and batch.step_ends is not None:
        advantages = process_advantages(batch.step_rewards, batch.step_ends, size, config.scale_rewards)
        batch.advantages = advantages.float()
        return
    if config.advantage_estimator == "gae":
        assert batch.values is not None
        known = mask & batch.valid[:, None]
        penalty = torch.zeros(mask.shape) if kl is None else kl
        rewards = token_rewards(batch.rewards.float(), penalty, known, kl_coef)
        if config.whiten_rewards:
            rewards = whiten(rewards, known, shift_mean=False)
        advantages, batch.returns = gae(rewards, batch.values, known, config.gamma, config.lam)
        batch.advantages = whiten(advantages, known)
        return
    rewards = batch.rewards if kl is None else batch.rewards - kl_coef * (kl * mask).double().sum(1)
    if config.advantage_estimator == "reinforce_plus_plus":
        batch.advantages = reinforce_plus_plus_advantages(rewards, size, mask, batch.valid).float()
        return
    if config.advantage_estimator == "rloo":
        per_completion = leave_one_out_advantages(rewards, size, batch.valid)
    else:
        per_completion = group_advantages(rewards, size, config.scale_rewards, batch.valid)
    batch.advantages = (per_completion[:, None] * mask).float()


def has_spread(rollout: Rollout, config: RLConfig) -> list[bool]:
    """For each group, whether its graded completions (with process supervision, all their steps) earned different
    rewards."""
    scores = rollout.scores
    rows = [[t] for t in scores.total] if scores.steps is None else [one.total for one in scores.steps]
    longest = max(map(len, rows))
    rewards = torch.tensor([t or 0.0 for row in rows for t in _padded(row, longest)], dtype=torch.float64)
    valid = torch.tensor([t is not None for row in rows for t in _padded(row, longest)])
    return (~zero_spread(rewards, config.num_generations * longest, valid)).tolist()


def _padded(row: list[float | None], length: int) -> list[float | None]:
    return row + [None] * (length - len(row))


def rollout_metrics(rollout: Rollout, config: RLConfig) -> dict[str, float]:
    """TRL's names for what was sampled and earned; lengths in tokens.

    With process supervision a completion's reward is the mean over its rewarded steps: `reward` is the mean of
    those means, and so are the parts'. `process/steps_mean` is the number of steps, rewarded or not.
    """
    total = rollout.scores.total
    rewards = torch.tensor([t or 0.0 for t in total], dtype=torch.float64)
    graded = rewards[torch.tensor([t is not None for t in total])]
    grouped = rewards.view(-1, config.num_generations)
    lengths = torch.tensor([len(c.ids) for c in rollout.completions], dtype=torch.float64)
    ended = torch.tensor([c.finish_reason == "stop" for c in rollout.completions])
    metrics = {
        "reward": graded.mean().item() if len(graded) else 0.0,
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": 1 - ended.double().mean().item(),
        "num_tokens": lengths.sum().item(),
    }
    if config.engine != "native":
        missing = sum(math.isnan(x) for c in rollout.completions for x in c.logprobs)
        metrics["sampling/missing_logprobs"] = float(missing)
    if (steps := rollout.scores.steps) is not None:
        metrics["process/steps_mean"] = sum(len(one.steps) for one in steps) / len(steps)
    if config.num_generations > 1:
        spread = has_spread(rollout, config)
        metrics["reward_std"] = grouped.std(1).mean().item()
        metrics["frac_reward_zero_std"] = 1 - sum(spread) / len(spread)
    for name, values in rollout.scores.parts.items():
        known = torch.tensor([v for v in values if v is not None], dtype=torch.float64)
        metrics[f"rewards/{name}/mean"] = known.mean().item() if len(known) else 0.0
        metrics[f"rewards/{name}/std"] = known.std().item() if len(known) > 1 else 0.0
        metrics[f"rewards/{name}/failures"] = float(len(values) - len(known))
    return metrics | rollout.metrics
