"""Supervised fine-tuning: maximise the likelihood of reference completions, end token included.

for step: batch → packed rows → log-probs of completion tokens → mean over all the batch's tokens → AdamW
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from training.batches import Tree, lay_out, pack
from training.checkpoint import Checkpoints
from training.config import SFTConfig
from training.errors import BadInput
from training.logprobs import token_logprobs
from training.optimizer import build_optimizer, learning_rate, optimizer_step
from training.policy import Policy
from training.randomness import batch_indices
from training.recorder import Recorder, replay


def train_sft(
    policy: Policy,
    examples: list[Tree],
    config: SFTConfig,
    *,
    seed: int,
    pad_id: int,
    checkpoints: Path,
    recorder: Recorder,
) -> list[dict[str, Any]]:
    """Train `policy` in place for `num_steps` steps; returns the metrics of every step.

    An example is a tree: the rendered prompt's ids with one branch, the completion's ids with the end token.
    Picks up from the latest checkpoint in `checkpoints`. Raises BadInput when a batch needs more examples than
    there are.
    """
    if len(examples) < config.batch_size:
        raise BadInput(
            f"sft.batch_size = {config.batch_size}: the train split has only {len(examples)} usable examples"
        )
    parameters = list(policy.parameters.values())
    optimizer = build_optimizer(parameters, config.optimizer)
    saved = Checkpoints(checkpoints, policy.parameters, optimizer)
    first, history, _ = saved.restore()
    replay(history, recorder)
    for step in range(first, config.num_steps):
        started = time.monotonic()
        batch = [examples[i] for i in batch_indices(seed, "sft", step, config.batch_size, len(examples))]
        num_tokens = sum(len(tree.branches[0]) for tree in batch)
        loss = entropy = 0.0
        for row in pack([tree.num_tokens for tree in batch], config.micro_batch_tokens):
            layout = lay_out([[batch[i] for i in row]], pad_id, policy.model.device)
            logprobs, entropies = token_logprobs(policy.model, layout)
            row_loss = -logprobs.sum() / num_tokens
            row_loss.backward()
            loss += row_loss.item()
            entropy += entropies.detach().sum().item() / num_tokens
        rate = learning_rate(config.optimizer, step, config.num_steps)
        norm = optimizer_step(optimizer, parameters, config.optimizer, rate)
        values = {
            "loss": loss,
            "entropy": entropy,
            "grad_norm": norm,
            "learning_rate": rate,
            "num_tokens": num_tokens,
        }
        history.append({"step": step + 1} | values)
        recorder.metrics(values | {"time/step": time.monotonic() - started}, step + 1)
        recorder.progress(step + 1, config.num_steps, loss=loss)
        if (step + 1) % config.checkpoint_every == 0 and step + 1 < config.num_steps:
            saved.save(step + 1, history)
    return history


def usable_examples(examples: list[Tree], max_length: int) -> list[Tree]:
    """Examples of at most `max_length` tokens; longer ones are left out whole, so that no end token is cut off."""
    return [tree for tree in examples if tree.num_tokens <= max_length]
