"""Policy losses. Each returns per-token values [B, T]; `token_weights` says how much each token counts.

The loss of a batch is `(token_weights * per_token_loss).sum()`. The weights hold the one division by global
counts, so that any split of the batch into micro-batches or ranks sums to the same gradient.
"""

from __future__ import annotations

from typing import Literal

import torch


def token_weights(
    mask: torch.Tensor,
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"],
    max_completion_length: int,
) -> torch.Tensor:
    """Weight of each token's loss in the batch's loss, from the whole batch's completion mask. [B, T] -> [B, T].

    grpo: mean over completions of the mean over each one's tokens (arXiv:2402.03300 eq. 3).
    dapo, bnpo: mean over all tokens (Yu et al. 2025, arXiv:2503.14476 eq. 8).
    dr_grpo: sum over tokens divided by B x max_completion_length, a constant (arXiv:2503.20783).
    A completion without tokens in the mask (masked as truncated, say) is absent: it does not count in B.
    """
    mask = mask.to(torch.promote_types(mask.dtype, torch.float32))
    lengths = mask.sum(1, keepdim=True)
    present = (lengths > 0).sum().clamp(min=1)
    if loss_type == "grpo":
        return mask / lengths.clamp(min=1) / present
    if loss_type == "dr_grpo":
        return mask / (present * max_completion_length)
    return mask / mask.sum().clamp(min=1)


def clipped_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    epsilon: float,
    epsilon_high: float,
) -> torch.Tensor:
    """PPO's clipped surrogate, negated (Schulman et al. 2017, arXiv:1707.06347 eq. 7). [B, T] -> [B, T].

    `advantages` broadcasts against [B, T]; the ratio is clipped to [1 - epsilon, 1 + epsilon_high].
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clip_fractions(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, epsilon: float, epsilon_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the clip is active: (low, high) bool [B, T]; low for negative, high for positive advantages."""
    ratio = torch.exp(logprobs - old_logprobs)
    return (ratio < 1 - epsilon) & (advantages < 0), (ratio > 1 + epsilon_high) & (advantages > 0)
