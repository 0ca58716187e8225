"""PPO's rewards, advantages and returns per token.

`mask` [B, T] marks a completion's own tokens. Whatever lies outside is passed over: a token's successor is the
next token in the mask, and after the last one nothing more is earned (the bootstrapped value is 0).
"""

from __future__ import annotations

import torch

from training.algorithms.precision import at_least_float32


def token_rewards(
    rewards: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float
) -> torch.Tensor:
    """Reward of each token: -kl_coef x KL, and on the last one the completion's reward too. [B], [B, T] -> [B, T].

    The reward of InstructGPT (Ouyang et al. 2022, arXiv:2203.02155 eq. 2) token by token; `kl` is the k1
    estimate of the policy that sampled against the reference. 0 outside the mask.
    """
    real = mask.bool()
    tokens_left = real.flip(1).cumsum(1).flip(1)
    last = real & (tokens_left == 1)
    score = torch.where(last, at_least_float32(rewards)[:, None], 0)
    return score - kl_coef * at_least_float32(kl).masked_fill(~real, 0)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation: (advantages, returns), both [B, T] and 0 outside the mask.

    With δ_t = r_t + γ V_t+1 - V_t (Schulman et al. 2016, arXiv:1506.02438 eq. 16): A_t = δ_t + γ λ A_t+1, and
    the return, which the value model learns, is A_t + V_t. The advantages aren't whitened.
    """
    real = mask.bool()
    rewards = at_least_float32(rewards).masked_fill(~real, 0)
    values = at_least_float32(values).masked_fill(~real, 0)
    advantages = torch.zeros_like(rewards + values)
    next_value = next_advantage = torch.zeros_like(advantages[:, 0])
    for t in reversed(range(real.shape[1])):
        error = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = error + gamma * lam * next_advantage
        next_value = torch.where(real[:, t], values[:, t], next_value)
        next_advantage = torch.where(real[:, t], advantage, next_advantage)
        advantages[:, t] = torch.where(real[:, t], advantage, 0)
    return advantages, advantages + values
