"""KL(policy ‖ reference): estimates from sampled tokens, and the controller of their coefficient."""

from __future__ import annotations

from typing import Literal

import torch

from training.algorithms.precision import at_least_float32
from training.algorithms.ratios import MAX_LOG_RATIO


def kl_penalty(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: Literal["k1", "k2", "k3"] = "k3"
) -> torch.Tensor:
    """Per-token estimate, in nats, from log-probabilities [B, T] of tokens sampled from the policy.

    With d = ref_logprobs - logprobs (Schulman, "Approximating KL Divergence", 2020): k1 = -d (unbiased, can be
    negative), k2 = d²/2 (low variance, biased), k3 = exp(d) - 1 - d (unbiased, never negative; the term in
    GRPO's loss, arXiv:2402.03300 eq. 4), with d bounded above as ratios are.

    As a loss, their expected gradients differ: k1's is 0, which is why k1 belongs in the reward; k2's is the
    gradient of KL(policy ‖ reference), k3's that of KL(reference ‖ policy).
    """
    log_ratio = at_least_float32(ref_logprobs) - at_least_float32(logprobs)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return torch.expm1(log_ratio) - log_ratio


def adaptive_kl_coef(
    kl_coef: float, kl: float, target: float, gain: float = 0.1, max_error: float = 0.2
) -> float:
    """The next coefficient: larger after a KL above target, smaller below (Ziegler et al. 2019, arXiv:1909.08593 §2.2).

    `kl` and `target` are nats per completion. The relative error kl / target - 1 is clipped to ±max_error;
    the coefficient is multiplied by 1 + gain x error. Raises ValueError unless target > 0.
    """
    if target <= 0:
        raise ValueError(f"target {target}: the KL to hold must be above 0")
    error = min(max(kl / target - 1, -max_error), max_error)
    return kl_coef * (1 + gain * error)
