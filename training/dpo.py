"""Direct preference optimisation: raise the chosen completion over the rejected one, held to a reference.

for step: pairs → packed rows → log-probs of both completions, policy and reference → mean pair loss → AdamW
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

from training.algorithms.dpo import dpo_loss, implicit_rewards
from training.batches import Tree, lay_out, pack
from training.checkpoint import Checkpoints
from training.config import DPOConfig
from training.errors import BadInput
from training.logprobs import token_logprobs
from training.optimizer import build_optimizer, learning_rate, optimizer_step
from training.policy import Policy
from training.randomness import batch_indices
from training.recorder import Recorder, replay


def train_dpo(
    policy: Policy,
    reference: transformers.PreTrainedModel | None,
    pairs: list[Tree],
    config: DPOConfig,
    *,
    seed: int,
    pad_id: int,
    checkpoints: Path,
    recorder: Recorder,
) -> list[dict[str, Any]]:
    """Train `policy` in place for `num_steps` steps; returns the metrics of every step.

    A pair is a tree: the rendered prompt's ids with two branches, the chosen completion's ids and the
    rejected one's, each with its end token. `reference` is a frozen copy of the model the policy starts from;
    None takes the policy with its adapters off. Picks up from the latest checkpoint in `checkpoints`. Raises
    BadInput when a batch needs more pairs than there are.
    """
    if len(pairs) < config.batch_size:
        raise BadInput(
            f"dpo.batch_size = {config.batch_size}: the train split has only {len(pairs)} usable pairs"
        )
    parameters = list(policy.parameters.values())
    optimizer = build_optimizer(parameters, config.optimizer)
    saved = Checkpoints(checkpoints, policy.parameters, optimizer)
    first, history, _ = saved.restore()
    replay(history, recorder)
    for step in range(first, config.num_steps):
        started = time.monotonic()
        batch = [pairs[i] for i in batch_indices(seed, "dpo", step, config.batch_size, len(pairs))]
        means: dict[str, float] = {}
        for row in pack([pair.num_tokens for pair in batch], config.micro_batch_tokens):
            losses, metrics = pair_losses(policy, reference, [batch[i] for i in row], config, pad_id)
            (losses.sum() / len(batch)).backward()
            _add(means, metrics, len(batch))
        rate = learning_rate(config.optimizer, step, config.num_steps)
        norm = optimizer_step(optimizer, parameters, config.optimizer, rate)
        values = means | {
            "grad_norm": norm,
            "learning_rate": rate,
            "num_tokens": sum(len(branch) for pair in batch for branch in pair.branches),
        }
        history.append({"step": step + 1} | values)
        recorder.metrics(values | {"time/step": time.monotonic() - started}, step + 1)
        recorder.progress(
            step + 1, config.num_steps, loss=means["loss"], accuracy=means["rewards/accuracies"]
        )
        if (step + 1) % config.checkpoint_every == 0 and step + 1 < config.num_steps:
            saved.save(step + 1, history)
    return history


@torch.no_grad()
def evaluate_dpo(
    policy: Policy,
    reference: transformers.PreTrainedModel | None,
    pairs: list[Tree],
    config: DPOConfig,
    *,
    pad_id: int,
) -> dict[str, float]:
    """Means over held-out pairs of the metrics that `pair_losses` names; empty without pairs.

    The policy is left in evaluation mode.
    """
    policy.model.eval()
    means: dict[str, float] = {}
    for row in pack([pair.num_tokens for pair in pairs], config.micro_batch_tokens):
        _, metrics = pair_losses(policy, reference, [pairs[i] for i in row], config, pad_id)
        _add(means, metrics, len(pairs))
    return means


def pair_losses(
    policy: Policy,
    reference: transformers.PreTrainedModel | None,
    pairs: list[Tree],
    config: DPOConfig,
    pad_id: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses [B], with gradient, and metrics [B] of pairs in one row, the same for policy and reference.

    The metrics are TRL's. rewards/* are implicit rewards and logps/* log-probabilities (nats) of whole
    completions, under ipo too; rewards/accuracies is 1 where the chosen completion's reward is the larger, so
    a policy equal to its reference, all of whose rewards are 0, has accuracy 0. Raises ValueError without a
    reference or adapters to switch off.
    """
    if reference is None and not policy.has_adapters:
        raise ValueError("dpo needs a reference model: the policy has no adapters that could be switched off")
    layout = lay_out([pairs], pad_id, policy.model.device)
    with (
        torch.no_grad(),
        nullcontext(reference) if reference is not None else policy.without_adapters() as model,
    ):
        ref_tokens, _ = token_logprobs(model, layout)
    tokens, _ = token_logprobs(policy.model, layout)
    average = config.loss_type == "ipo"
    losses = dpo_loss(
        *completion_logprobs(tokens, pairs, average),
        *completion_logprobs(ref_tokens, pairs, average),
        config.beta,
        config.loss_type,
        config.label_smoothing,
    )
    chosen, rejected = completion_logprobs(tokens.detach(), pairs)
    ref_chosen, ref_rejected = completion_logprobs(ref_tokens, pairs)
    chosen_rewards = implicit_rewards(chosen, ref_chosen, config.beta)
    rejected_rewards = implicit_rewards(rejected, ref_rejected, config.beta)
    return losses, {
        "loss": losses.detach(),
        "rewards/chosen": chosen_rewards,
        "rewards/rejected": rejected_rewards,
        "rewards/accuracies": (chosen_rewards > rejected_rewards).float(),
        "rewards/margins": chosen_rewards - rejected_rewards,
        "logps/chosen": chosen,
        "logps/rejected": rejected,
    }


def completion_logprobs(
    tokens: torch.Tensor, pairs: list[Tree], average: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the chosen and the rejected completions, [B] each, from those of their tokens.

    `tokens` [N] are in a layout's order: pairs, branches, tokens. With `average`, means over a completion's
    tokens instead of sums.
    """
    parts = tokens.split([len(branch) for pair in pairs for branch in pair.branches])
    values = torch.stack([part.mean() if average else part.sum() for part in parts])
    return values[::2], values[1::2]


def usable_pairs(pairs: list[Tree], max_length: int) -> list[Tree]:
    """Pairs of which the prompt with either completion has at most `max_length` tokens.

    The others are left out whole, so that no end token is cut off.
    """
    return [pair for pair in pairs if len(pair.prefix) + max(map(len, pair.branches)) <= max_length]


def _add(means: dict[str, float], metrics: dict[str, torch.Tensor], num_pairs: int) -> None:
    for name, values in metrics.items():
        means[name] = means.get(name, 0.0) + values.sum().item() / num_pairs
