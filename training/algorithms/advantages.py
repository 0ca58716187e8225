"""Advantages from rewards: how much better a completion did than its baseline.

Rewards come as [B] with `group_size` consecutive completions per prompt. `valid` [B] marks completions that
were graded; the others take no part in any mean and get advantage 0.
"""

from __future__ import annotations

from typing import Literal

import torch

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
    return centred.flatten().to(rewards.dtype)


def zero_spread(rewards: torch.Tensor, group_size: int, valid: torch.Tensor | None = None) -> torch.Tensor:
    """[B / group_size] bool: groups whose graded completions all earned the same, up to rounding."""
    grouped, keep = _grouped(rewards, group_size, valid)
    highest = grouped.masked_fill(~keep.bool(), -torch.inf).amax(1)
    lowest = grouped.masked_fill(~keep.bool(), torch.inf).amin(1)
    size = grouped.abs().masked_fill(~keep.bool(), 0).amax(1).clamp(min=1)
    return (keep.sum(1) < 2) | (highest - lowest <= ZERO_SPREAD * size)


def _grouped(rewards: torch.Tensor, group_size: int, valid: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    if group_size < 2:
        raise ValueError(f"group_size {group_size}: a group's mean is a baseline only for 2 or more completions")
    if rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards are not whole groups of {group_size}")
    keep = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid.bool()
    values = torch.where(keep, rewards, 0.0)
    return values.view(-1, group_size), keep.view(-1, group_size).to(values.dtype)
