"""Direct preference optimisation: the loss of a pair of completions, and the reward that a policy implies."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import logsigmoid

from training.algorithms.precision import at_least_float32


def dpo_loss(
    chosen_logprobs: torch.Tensor,
    rejected_logprobs: torch.Tensor,
    ref_chosen_logprobs: torch.Tensor,
    ref_rejected_logprobs: torch.Tensor,
    beta: float,
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Loss of each pair from the completions' log-probabilities, in nats. Four times [B] -> [B].

    With Δ = (chosen - ref_chosen) - (rejected - ref_rejected):

    sigmoid: -log σ(βΔ), from log-probabilities summed over a completion's tokens (Rafailov et al. 2023,
    arXiv:2305.18290 eq. 7). With ε = label_smoothing, the chance that a label is flipped, it is
    -(1 - ε) log σ(βΔ) - ε log σ(-βΔ), whose minimum is finite (conservative DPO: Mitchell 2023, eq. 3).

    ipo: (Δ - 1 / (2β))², β being the paper's τ (Azar et al. 2023, arXiv:2310.12036 eq. 17). The target does
    not grow with length, so the log-probabilities are means over a completion's tokens; the paper leaves this
    open, TRL does it so and names the authors for it.

    The loss of a batch is the sum divided, once, by its number of pairs. Raises ValueError when ε is outside
    [0, 0.5), or above 0 with ipo, which has its own bound on Δ.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing {label_smoothing}: expected at least 0 and below 0.5")
    if loss_type == "ipo" and label_smoothing:
        raise ValueError(f"label_smoothing {label_smoothing}: the ipo loss has none; expected 0")
    chosen_ratio = at_least_float32(chosen_logprobs) - at_least_float32(ref_chosen_logprobs)
    rejected_ratio = at_least_float32(rejected_logprobs) - at_least_float32(ref_rejected_logprobs)
    delta = chosen_ratio - rejected_ratio
    if loss_type == "ipo":
        return (delta - 1 / (2 * beta)).square()
    kept = (1 - label_smoothing) * logsigmoid(beta * delta)
    flipped = label_smoothing * logsigmoid(-beta * delta)
    return -kept - flipped


def implicit_rewards(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, beta: float) -> torch.Tensor:
    """The reward that a policy is optimal for, up to a constant of the prompt: β log(π / π_ref). [B] -> [B].

    From log-probabilities summed over a completion's tokens (arXiv:2305.18290 eq. 5, less β log Z). Two
    completions of one prompt share the constant, so the difference of their rewards is exact.
    """
    return beta * (at_least_float32(logprobs) - at_least_float32(ref_logprobs))
