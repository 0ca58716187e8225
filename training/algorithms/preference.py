"""Losses over pairs of completions of which one is preferred."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from training.algorithms.precision import at_least_float32


def bradley_terry_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    margin: torch.Tensor | float = 0.0,
    center_coefficient: float = 0.0,
) -> torch.Tensor:
    """Loss of each pair, [P], from the rewards of its chosen and its rejected completion, [P] each.

        -log σ(chosen - rejected - margin) + center_coefficient · (chosen + rejected)²

    The first term is the negative log-likelihood of the choice, in nats, under Bradley & Terry 1952 (InstructGPT:
    Ouyang et al. 2022, arXiv:2203.02155, eq. 1); `margin`, [P] or one number, is Llama 2's (Touvron et al. 2023,
    arXiv:2307.09288, eq. 2). Pairs leave rewards free to drift by a constant; the last term keeps them around 0
    (Eisenstein et al. 2023, arXiv:2312.09244). The caller divides by the number of pairs.
    """
    chosen, rejected = at_least_float32(chosen), at_least_float32(rejected)
    loss = -F.logsigmoid(chosen - rejected - margin)
    return loss + center_coefficient * (chosen + rejected).square() if center_coefficient else loss
