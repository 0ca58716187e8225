"""The reward model: a scalar read at a completion's last token, learnt from pairs (Bradley-Terry).

for step: batch of pairs → scores of both completions → -log σ(chosen - rejected - margin), mean over pairs → AdamW
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from training.algorithms.precision import at_least_float32
from training.algorithms.preference import bradley_terry_loss
from training.batches import Layout, Tree, lay_out, split_by_tokens
from training.checkpoint import Checkpoints
from training.config import RewardModelConfig
from training.errors import BadInput
from training.logprobs import hidden_states
from training.optimizer import build_optimizer, learning_rate, optimizer_step
from training.policy import Policy
from training.preferences import Pair
from training.prompts import PromptRenderer
from training.randomness import batch_indices
from training.recorder import Recorder, replay
from training.rewards.steps import split_completion


@dataclass(frozen=True)
class ComparedPair:
    """A pair as token ids: the prompt with two branches, chosen first, each with its end token.

    `places` are the tokens at which the two are compared, as indices in the branches; at the end, unless given.
    """

    tree: Tree
    margin: float
    places: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.places:
            chosen, rejected = self.tree.branches
            object.__setattr__(self, "places", ((len(chosen) - 1, len(rejected) - 1),))

    @property
    def longest(self) -> int:
        """Tokens of the prompt with its longer completion."""
        return len(self.tree.prefix) + max(map(len, self.tree.branches))


def compared(
    pair: Pair, renderer: PromptRenderer, supervision: Literal["outcome", "process"], separator: str
) -> ComparedPair:
    """The pair as token ids, to be compared at the end or, with `process`, also after every step that both have.

    While both read the same, so do their scores, and the comparison moves nothing: the first step that differs is
    the first to be judged.
    """
    tree = pair.tree(renderer)
    if supervision == "outcome":
        return ComparedPair(tree, pair.margin)
    chosen, rejected = (
        [step.end for step in split_completion(branch, renderer.decode, separator)]
        for branch in tree.branches
    )
    shared = list(zip(chosen[:-1], rejected[:-1], strict=False))
    return ComparedPair(tree, pair.margin, (*shared, (chosen[-1], rejected[-1])))


def train_reward_model(
    policy: Policy,
    pairs: Sequence[ComparedPair],
    config: RewardModelConfig,
    *,
    seed: int,
    pad_id: int,
    checkpoints: Path,
    recorder: Recorder,
) -> list[dict[str, Any]]:
    """Train the reward model in `policy` in place for `num_steps` steps; returns the metrics of every step.

    Picks up from the latest checkpoint in `checkpoints`. Raises BadInput when a batch needs more pairs than
    there are.
    """
    if len(pairs) < config.batch_size:
        raise BadInput(
            f"reward_model.batch_size = {config.batch_size}: there are only {len(pairs)} usable pairs to train on"
        )
    parameters = list(policy.parameters.values())
    optimizer = build_optimizer(parameters, config.optimizer)
    saved = Checkpoints(checkpoints, policy.parameters, optimizer)
    first, history, _ = saved.restore()
    replay(history, recorder)
    for step in range(first, config.num_steps):
        started = time.monotonic()
        chosen = batch_indices(seed, "reward_model", step, config.batch_size, len(pairs))
        batch = [pairs[i] for i in chosen]
        values = reward_model_step(policy.model, optimizer, parameters, batch, config, step, pad_id)
        history.append({"step": step + 1} | values)
        recorder.metrics(values | {"time/step": time.monotonic() - started}, step + 1)
        recorder.progress(step + 1, config.num_steps, loss=values["loss"], accuracy=values["accuracy"])
        if (step + 1) % config.checkpoint_every == 0 and step + 1 < config.num_steps:
            saved.save(step + 1, history)
    return history


def reward_model_step(
    model: transformers.PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.nn.Parameter],
    batch: Sequence[ComparedPair],
    config: RewardModelConfig,
    step: int,
    pad_id: int,
) -> dict[str, float]:
    """Optimizer step `step` (0-based) of `config.num_steps`, on `batch`; returns means over its pairs and the step's numbers.

    `loss` (nats), `accuracy`, `margin` and `mean_reward` are those of before the step.
    """
    totals = dict.fromkeys(("loss", "accuracy", "margin", "mean_reward"), 0.0)
    for micro in split_by_tokens([pair.tree.num_tokens for pair in batch], config.micro_batch_tokens):
        part = _backward(model, [batch[i] for i in micro], config, len(batch), pad_id)
        for name, value in part.items():
            totals[name] += value / len(batch)
    rate = learning_rate(config.optimizer, step, config.num_steps)
    norm = optimizer_step(optimizer, parameters, config.optimizer, rate)
    num_tokens = sum(pair.tree.num_tokens for pair in batch)
    return totals | {"grad_norm": norm, "learning_rate": rate, "num_tokens": num_tokens}


def branch_scores(
    model: transformers.PreTrainedModel, layout: Layout, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """Score of every branch of a layout, [M], read at its last token; at least float32.

    With `positions` [N], flat indices as the layout's `ends` are, the scores [N] read there. The places follow
    from lengths, so neither padding nor an end token inside a text moves them.
    """
    head: Any = model.score
    places = layout.ends if positions is None else positions
    return at_least_float32(head(hidden_states(model, layout, places))).squeeze(-1)


def score_branches(
    model: transformers.PreTrainedModel,
    trees: Sequence[Tree],
    pad_id: int,
    micro_batch_tokens: int,
    places: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """Scores of every branch of `trees` in order, [M], on the CPU, without gradient.

    `places` lists for each branch the indices of its tokens to read at, instead of the last one: then every
    score in order, [N].
    """
    if places is None:
        places = [[len(branch) - 1] for tree in trees for branch in tree.branches]
    remaining = iter(places)
    by_tree = [[next(remaining) for _ in tree.branches] for tree in trees]
    found: dict[int, torch.Tensor] = {}
    training = model.training
    model.eval()
    with torch.no_grad():
        for micro in split_by_tokens([tree.num_tokens for tree in trees], micro_batch_tokens):
            layout = lay_out([[trees[i]] for i in micro], pad_id, model.device)
            branches = [branch for i in micro for branch in trees[i].branches]
            read = [own for i in micro for own in by_tree[i]]
            scores = branch_scores(model, layout, _positions(layout, branches, read)).cpu()
            parts = scores.split([sum(map(len, by_tree[i])) for i in micro])
            found |= dict(zip(micro, parts, strict=True))
    model.train(training)
    return torch.cat([found[i] for i in range(len(trees))])


def held_out_metrics(rewards: torch.Tensor) -> dict[str, float]:
    """Means over held-out pairs, from their rewards, [P, 2], chosen first.

    `loss` (nats, without margin and centring), `accuracy` (a tie counts half), `margin` (chosen - rejected) and
    `mean_reward`.
    """
    difference = (rewards[:, 0] - rewards[:, 1]).double()
    return {
        "loss": bradley_terry_loss(rewards[:, 0], rewards[:, 1]).mean().item(),
        "accuracy": _right(difference).mean().item(),
        "margin": difference.mean().item(),
        "mean_reward": rewards.double().mean().item(),
    }


def calibration(rewards: torch.Tensor, num_bins: int = 10) -> dict[str, Any]:
    """How often the model is right when it is so sure, from the rewards of held-out pairs, [P, 2], chosen first.

    P(chosen > rejected) = σ(chosen - rejected). As the order of a pair is arbitrary, a pair is taken in the order
    that the model prefers: its confidence lies in [0.5, 1], in `num_bins` bins of equal width. Returns the bins
    that hold pairs (low, high, pairs, mean confidence, accuracy) and the expected calibration error, the mean of
    |accuracy - confidence| over pairs (Guo et al. 2017, arXiv:1706.04599, eq. 3).
    """
    difference = (rewards[:, 0] - rewards[:, 1]).double()
    confidence, right = torch.sigmoid(difference.abs()), _right(difference)
    places = ((confidence - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    bins = [
        {
            "low": 0.5 + 0.5 * place / num_bins,
            "high": 0.5 + 0.5 * (place + 1) / num_bins,
            "pairs": int((places == place).sum()),
            "confidence": confidence[places == place].mean().item(),
            "accuracy": right[places == place].mean().item(),
        }
        for place in places.unique().tolist()
    ]
    error = sum(b["pairs"] * abs(b["accuracy"] - b["confidence"]) for b in bins) / len(difference)
    return {"bins": bins, "expected_calibration_error": error}


def _backward(
    model: transformers.PreTrainedModel,
    pairs: list[ComparedPair],
    config: RewardModelConfig,
    num_pairs: int,
    pad_id: int,
) -> dict[str, float]:
    """Add a micro-batch's share of the gradient of a batch of `num_pairs`; returns its sums over pairs.

    A pair's loss is the mean over its places; what else is returned is of the last one, the outcome.
    """
    layout = lay_out([[pair.tree] for pair in pairs], pad_id, model.device)
    branches = [branch for pair in pairs for branch in pair.tree.branches]
    read = [places for pair in pairs for places in zip(*pair.places, strict=True)]
    scores = branch_scores(model, layout, _positions(layout, branches, read)).split(
        [len(own) for own in read]
    )
    chosen, rejected = torch.cat(scores[::2]), torch.cat(scores[1::2])
    counts = torch.tensor([len(pair.places) for pair in pairs], device=model.device)
    margins = torch.tensor([pair.margin if config.margin else 0.0 for pair in pairs], device=model.device)
    of_place = bradley_terry_loss(
        chosen, rejected, margins.repeat_interleave(counts), config.center_rewards_coefficient
    )
    loss = (of_place / counts.repeat_interleave(counts)).sum()
    (loss / num_pairs).backward()
    last = counts.cumsum(0) - 1
    chosen, rejected = chosen[last], rejected[last]
    difference = (chosen - rejected).detach()
    return {
        "loss": loss.item(),
        "accuracy": _right(difference).sum().item(),
        "margin": difference.sum().item(),
        "mean_reward": ((chosen + rejected) / 2).sum().item(),
    }


def _positions(
    layout: Layout, branches: Sequence[Sequence[int]], places: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Flat indices, as the layout's `ends` are, of the given tokens of each of its branches."""
    flat = [
        end - len(branch) + 1 + place
        for end, branch, own in zip(layout.ends.tolist(), branches, places, strict=True)
        for place in own
    ]
    return torch.tensor(flat, device=layout.ends.device)


def _right(difference: torch.Tensor) -> torch.Tensor:
    """1 where chosen scores higher, 0.5 where both score the same, else 0."""
    return (difference.sign() + 1) / 2
