"""The policy's loss as the recipe's switches compose it, per token [B, T].

Everything is per token; `weights` hold the one division by the whole batch's counts.
"""

from __future__ import annotations

import math

import torch

from training.algorithms.kl import kl_penalty
from training.algorithms.losses import (
    cispo_loss,
    clip_fractions,
    clipped_policy_loss,
    sapo_loss,
    token_weights,
)
from training.algorithms.ratios import ratio_bounded, sequence_logprobs, truncated_importance_weights
from training.config import RLConfig

AVERAGED_AS = {"cispo": "dapo", "sapo": "grpo"}
"""Losses that name a surrogate, and the average that their papers take."""


def loss_weights(loss_mask: torch.Tensor, config: RLConfig) -> torch.Tensor:
    """What each token counts in the loss of the batch whose mask [B, T] is given. [B, T]."""
    kind = AVERAGED_AS.get(config.loss_type, config.loss_type)
    return token_weights(loss_mask, kind, config.max_completion_length)  # type: ignore[arg-type]


def policy_loss(
    config: RLConfig,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    sampler_logprobs: torch.Tensor,
    kl_coef: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss per token, and per-token metrics without gradient; all [B, T].

    The surrogate (clipped ratio of tokens or sequences, CISPO, SAPO), times the sampler's importance weight,
    plus kl_coef x KL where it sits in the loss, minus the entropy bonus.
    """
    high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    new, old = logprobs, old_logprobs
    if config.importance_sampling_level == "sequence":
        new, old = sequence_logprobs(logprobs, mask), sequence_logprobs(old_logprobs, mask)
        # every token of a completion carries its advantage, so the first one's stands for the completion
        advantages = advantages[:, :1]
    if config.loss_type == "cispo":
        loss = cispo_loss(new, old, advantages, high)
        clipped = clip_fractions(new, old, advantages, math.inf, high - 1)
    elif config.loss_type == "sapo":
        loss = sapo_loss(new, old, advantages, config.sapo_temperature_pos, config.sapo_temperature_neg)
        clipped = (torch.zeros_like(new, dtype=torch.bool),) * 2
    else:
        delta = math.inf if config.delta is None else config.delta
        loss = clipped_policy_loss(new, old, advantages, config.epsilon, high, delta)
        clipped = clip_fractions(new, old, advantages, config.epsilon, high)
    low_clip, high_clip = (part.expand_as(logprobs) for part in clipped)
    loss = loss.expand_as(logprobs)
    unknown = sampler_logprobs.isnan()
    metrics = {
        "entropy": entropy.detach(),
        "clip_ratio/low_mean": low_clip.float(),
        "clip_ratio/high_mean": high_clip.float(),
        "clip_ratio/region_mean": (low_clip | high_clip).float(),
        "ratio_bounded": ratio_bounded(new.detach(), old).expand_as(logprobs).float(),
        "sampling/logp_difference": (old_logprobs - sampler_logprobs).abs().masked_fill(unknown, 0),
    }
    if config.importance_sampling_cap is not None:
        weight = truncated_importance_weights(old_logprobs, sampler_logprobs, config.importance_sampling_cap)
        loss = loss * weight
        metrics["sampling/importance_weight"] = weight
    if ref_logprobs is not None:
        kl = kl_penalty(logprobs, ref_logprobs, config.kl_in_force)
        metrics["kl"] = kl.detach()
        if config.kl_in == "loss":
            loss = loss + kl_coef * kl
    if config.entropy_coef:
        loss = loss - config.entropy_coef * entropy
    return loss, metrics
