"""Estimators of KL(policy ‖ reference) from sampled tokens (Schulman, "Approximating KL Divergence", 2020)."""

from __future__ import annotations

from typing import Literal

import torch


def kl_penalty(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: Literal["k1", "k2", "k3"] = "k3"
) -> torch.Tensor:
    """Per-token estimate, in nats, from log-probabilities [B, T] of tokens sampled from the policy.

    With d = ref_logprobs - logprobs: k1 = -d (unbiased, can be negative), k2 = d²/2 (low variance, biased),
    k3 = exp(d) - 1 - d (unbiased, never negative; the term in GRPO's loss, arXiv:2402.03300 eq. 4).
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio
