"""AdamW with gradient clipping and a learning rate that is a function of the step."""

from __future__ import annotations

import math

import torch

from training.config import OptimizerConfig


def build_optimizer(parameters: list[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW over the trainable parameters, whose gradients start as zeros, so that a step in which nothing
    is learnt is the same step wherever a run was resumed."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    beta1, beta2 = config.betas
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(beta1, beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based) of `num_steps`: linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    factor = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[
        config.schedule
    ]
    return config.learning_rate * factor


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.nn.Parameter],
    config: OptimizerConfig,
    rate: float,
) -> float:
    """Clip, step with learning rate `rate`, clear the gradients; returns the gradient's 2-norm before clipping.

    A gradient that is not finite changes nothing but is returned, so that it can be seen.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
    if torch.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return float(norm)
