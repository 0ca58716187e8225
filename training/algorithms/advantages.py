"""Advantages from rewards: how much better a completion, or a step of one, did than its baseline.

Rewards come as [B] with `group_size` consecutive completions per prompt. `valid` [B] marks completions that
were graded; the others take no part in any mean and get advantage 0.
"""

from __future__ import annotations

from typing import Literal

import torch

from training.algorithms.precision import at_least_float32

ZERO_SPREAD = 1e-8
"""A group whose largest and smallest reward differ by no more than this (times their size) has no spread."""


def group_advantages(
    rewards: torch.Tensor,
    group_size: int,
    scale: Literal["group", "batch", "none"] = "group",
    valid: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Reward minus the group's mean, divided by a standard deviation. [B] -> [B].

    `scale` names whose unbiased standard deviation divides (plus `eps`): the group's (GRPO, Shao et al. 2024,
    arXiv:2402.03300, eq. 3), the batch's, or none (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783). A group
    without spread, or with fewer than two graded completions, gets exactly 0.
    Raises ValueError for a group of one or a batch that is not whole groups.
    """
    grouped, keep = _grouped(rewards, group_size, valid)
    count = keep.sum(1, keepdim=True)
    mean = (grouped * keep).sum(1, keepdim=True) / count.clamp(min=1)
    centred = (grouped - mean) * keep
    if scale == "group":
        std = (centred.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        centred = centred / (std + eps)
    elif scale == "batch":
        flat = grouped[keep.bool()]
        std = flat.std() if flat.numel() > 1 else flat.new_zeros(())
        centred = centred / (std + eps)
    centred = torch.where(zero_spread(rewards, group_size, valid)[:, None], 0.0, centred)
    return centred.flatten()


def leave_one_out_advantages(
    rewards: torch.Tensor, group_size: int, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Reward minus the mean of the group's other rewards. [B] -> [B].

    RLOO (Ahmadian et al. 2024, arXiv:2402.14740): n / (n - 1) times the distance from the whole group's
    mean, so groups of no spread get exactly 0 here too. Raises as `group_advantages` does.
    """
    centred = group_advantages(rewards, group_size, "none", valid).view(-1, group_size)
    _, keep = _grouped(rewards, group_size, valid)
    count = keep.sum(1, keepdim=True)
    return (centred * count / (count - 1).clamp(min=1)).flatten()


def reinforce_plus_plus_advantages(
    rewards: torch.Tensor, group_size: int, mask: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Reward minus the group's mean, whitened over all tokens of the batch. [B], mask [B, T] -> [B, T].

    REINFORCE++ with baseline (Hu et al. 2025, arXiv:2501.03262): the group centres, the batch scales. Longer
    completions weigh more in the mean and the variance. Raises as `group_advantages` does.
    """
    real = mask.bool() if valid is None else mask.bool() & valid.bool()[:, None]
    centred = group_advantages(rewards, group_size, "none", valid)
    return whiten(centred[:, None].expand(real.shape), real)


def process_advantages(
    step_rewards: torch.Tensor,
    step_ends: torch.Tensor,
    group_size: int,
    scale: Literal["group", "batch", "none"] = "group",
    eps: float = 1e-6,
) -> torch.Tensor:
    """Sum of the normalised rewards of the steps that end at or after a token. [B, T] -> [B, T].

    Process supervision (DeepSeekMath, arXiv:2402.03300 §4.1.3). `step_ends` marks the last token of each graded
    step, `step_rewards` holds its reward there. Rewards are normalised over all steps of the group, as
    `group_advantages` does over completions (`scale` is its); an ungraded completion has no steps, hence advantage 0.
    """
    num_tokens = step_rewards.shape[1]
    normalised = group_advantages(
        step_rewards.flatten(), group_size * num_tokens, scale, step_ends.flatten(), eps
    )
    return normalised.view_as(step_rewards).flip(1).cumsum(1).flip(1)


def whiten(
    values: torch.Tensor, mask: torch.Tensor, shift_mean: bool = True, eps: float = 1e-8
) -> torch.Tensor:
    """Values with mean 0 and unbiased variance 1 over the mask's tokens, 0 elsewhere. [B, T] -> [B, T].

    PPO's advantages, and with `shift_mean` False (the mean stays) its rewards. `eps` joins the variance; fewer
    than two tokens have variance 0.
    """
    real = mask.bool()
    values = at_least_float32(values).masked_fill(~real, 0)
    count = real.sum()
    mean = values.sum() / count.clamp(min=1)
    centred = (values - mean).masked_fill(~real, 0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    whitened = centred * torch.rsqrt(variance + eps)
    return whitened if shift_mean else torch.where(real, whitened + mean, 0)


def zero_spread(rewards: torch.Tensor, group_size: int, valid: torch.Tensor | None = None) -> torch.Tensor:
    """[B / group_size] bool: groups whose graded completions all earned the same, up to rounding."""
    grouped, keep = _grouped(rewards, group_size, valid)
    highest = grouped.masked_fill(~keep.bool(), -torch.inf).amax(1)
    lowest = grouped.masked_fill(~keep.bool(), torch.inf).amin(1)
    size = grouped.abs().masked_fill(~keep.bool(), 0).amax(1).clamp(min=1)
    return (keep.sum(1) < 2) | (highest - lowest <= ZERO_SPREAD * size)


def _grouped(
    rewards: torch.Tensor, group_size: int, valid: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if group_size < 2:
        raise ValueError(
            f"group_size {group_size}: a group's mean is a baseline only for 2 or more completions"
        )
    if rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards are not whole groups of {group_size}")
    keep = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    values = at_least_float32(rewards).masked_fill(~keep, 0)
    return values.view(-1, group_size), keep.view(-1, group_size).to(values.dtype)
