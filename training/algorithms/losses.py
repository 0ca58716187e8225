"""Losses per token [B, T]; `token_weights` says how much each token counts.

The loss of a batch is `(token_weights * per_token_loss).sum()`. The weights hold the one division by global
counts, so that any split of the batch into micro-batches or ranks sums to the same gradient. Penalties and
corrections compose the same way, before the sum: `+ beta * kl`, `- coef * entropy`, `x importance weights`.

Policy losses see `logprobs` (with gradient), `old_logprobs` (of the policy that sampled) and `advantages`,
which broadcast against [B, T]. With `sequence_logprobs` in place of the log-probabilities, the ratio is that
of whole completions and the loss of each is [B, 1]: GSPO.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from training.algorithms.precision import at_least_float32
from training.algorithms.ratios import ratio


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
    mask = at_least_float32(mask)
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
    delta: float = math.inf,
) -> torch.Tensor:
    """PPO's clipped surrogate, negated (Schulman et al. 2017, arXiv:1707.06347 eq. 7). [B, T] -> [B, T].

    The ratio is clipped to [1 - epsilon, 1 + epsilon_high]; the clip can only make the surrogate smaller, so
    it leaves large ratios of negative advantages alone. `delta` bounds those: dual clip's c (Ye et al. 2020,
    arXiv:1912.09729), two-sided GRPO's δ (INTELLECT-2, arXiv:2505.07291), one loss from
    1 + epsilon_high upwards. Raises ValueError for a smaller `delta`, where the two differ.
    """
    if delta < 1 + epsilon_high:
        raise ValueError(
            f"delta {delta} is inside the clip range; expected at least 1 + epsilon_high = {1 + epsilon_high}"
        )
    r = ratio(logprobs, old_logprobs)
    clipped = r.clamp(1 - epsilon, 1 + epsilon_high)
    return -torch.minimum(r.clamp(max=delta) * advantages, clipped * advantages)


def clip_fractions(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    epsilon: float,
    epsilon_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the clip is active: (low, high) bool [B, T]; low for negative, high for positive advantages."""
    r = ratio(logprobs, old_logprobs)
    return (r < 1 - epsilon) & (advantages < 0), (r > 1 + epsilon_high) & (advantages > 0)


def cispo_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, max_ratio: float
) -> torch.Tensor:
    """REINFORCE weighted by the ratio, capped and without gradient (MiniMax-M1, arXiv:2506.13585 eq. 4-5).

    [B, T] -> [B, T]. No token's gradient is clipped away. `max_ratio` is the paper's 1 + ε_high; TRL calls it epsilon_high.
    """
    weight = ratio(logprobs, old_logprobs).detach().clamp(max=max_ratio)
    return -weight * advantages * at_least_float32(logprobs)


def sapo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    temperature_pos: float,
    temperature_neg: float,
) -> torch.Tensor:
    """A soft gate in the clip's place (SAPO, Gao et al. 2025, arXiv:2511.20347). [B, T] -> [B, T].

    The surrogate is (4 / τ) σ(τ (ratio - 1)) x advantage, whose slope is 1 at ratio 1 and fades on both sides;
    τ is `temperature_pos` for positive advantages, `temperature_neg` for the others.
    """
    r = ratio(logprobs, old_logprobs)
    gate_pos, gate_neg = (
        4 / temperature * torch.sigmoid(temperature * (r - 1))
        for temperature in (temperature_pos, temperature_neg)
    )
    return -torch.where(advantages > 0, gate_pos, gate_neg) * advantages


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """Half the squared error of the value model, the worse of clipped and not. [B, T] -> [B, T].

    The clip keeps `values` within `clip_range` of `old_values` (those of the rollout); infinity doesn't clip.
    From PPO's code rather than its paper (Engstrom et al. 2020, arXiv:2005.12729).
    """
    values, old_values = at_least_float32(values), at_least_float32(old_values)
    clipped = values.clamp(old_values - clip_range, old_values + clip_range)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
