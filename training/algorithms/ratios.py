"""Importance ratios π(token) / π_old(token), and what each algorithm puts in their place.

A ratio is bounded above by exp(`MAX_LOG_RATIO`), where its gradient becomes 0, so that one stray token can't
overflow a batch; `ratio_bounded` says where that happened.
"""

from __future__ import annotations

import torch

from training.algorithms.precision import at_least_float32

MAX_LOG_RATIO = 20.0
"""Largest log-ratio (nats) that is exponentiated: far beyond every clip, far below float32's overflow."""


def ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """π / π_old from log-probabilities of the same tokens, [B, T] (PPO, arXiv:1707.06347 eq. 6)."""
    return torch.exp(_log_ratio(logprobs, old_logprobs).clamp(max=MAX_LOG_RATIO))


def ratio_bounded(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    """Where `ratio` met its bound: bool [B, T]; its share of the tokens belongs in the metrics."""
    return _log_ratio(logprobs, old_logprobs) > MAX_LOG_RATIO


def sequence_logprobs(logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean log-probability of each completion's tokens, [B, T] -> [B, 1] (0 for one without tokens).

    Their ratio is GSPO's (Zheng et al. 2025, arXiv:2507.18071 eq. 7), (π(y) / π_old(y))^(1 / |y|): a loss on
    sequence ratios is the token loss, given these in place of `logprobs` and `old_logprobs`.
    """
    real = mask.bool()
    total = at_least_float32(logprobs).masked_fill(~real, 0).sum(1, keepdim=True)
    return total / real.sum(1, keepdim=True).clamp(min=1)


def truncated_importance_weights(
    old_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, cap: float
) -> torch.Tensor:
    """min(π_old / π_sampler, cap), without gradient, [B, T]: multiplies the per-token loss.

    Corrects for a sampler (vLLM) whose log-probabilities aren't quite the trainer's (Yao et al. 2025, "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training"; the truncation is that of Ionides 2008).
    NaN in `sampler_logprobs` means that the sampler gave none: weight 1.
    """
    known = torch.where(sampler_logprobs.isnan(), old_logprobs, sampler_logprobs)
    return ratio(old_logprobs, known).clamp(max=cap).detach()


def _log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor) -> torch.Tensor:
    return at_least_float32(logprobs) - at_least_float32(old_logprobs)
