"""The RL loop: sample, grade, compare with the baseline, update. An algorithm is a choice on its switches.

for step:
    prompts     = a function of (seed, step)
    completions = engine.generate(prompts x group)                 rollout
    rewards     = the rules' weighted sum                          grade
    advantages  = reward minus the group's mean, scaled            compare
    loss        = clipped ratio + beta x KL(policy ‖ reference)    update, num_iterations x num_minibatches
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from training.algorithms.advantages import group_advantages, zero_spread
from training.algorithms.kl import kl_penalty
from training.algorithms.losses import clip_fractions, clipped_policy_loss, token_weights
from training.batches import Tree, lay_out, split_by_tokens
from training.checkpoint import Checkpoints
from training.config import RLConfig
from training.errors import BadInput
from training.logprobs import token_logprobs
from training.optimizer import build_optimizer, learning_rate, optimizer_step
from training.policy import Policy
from training.prompts import PromptRenderer
from training.randomness import batch_indices, derive_seed
from training.recorder import Recorder, replay
from training.rewards import RewardSum, Scores
from training.rollout.protocol import Completion, Request, RolloutEngine, Sampling


@dataclass(frozen=True)
class Problem:
    """A row of the train split: the user message, its rendered ids, and the columns rewards see."""

    prompt: str
    prompt_ids: tuple[int, ...]
    columns: dict[str, Any]


@dataclass(frozen=True)
class Rollout:
    """One step's samples: `num_generations` consecutive completions for each problem, [B] in all."""

    problems: list[Problem]
    completions: list[Completion]
    texts: list[str]
    scores: Scores
    seconds: dict[str, float]


class RLTrainer:
    """Everything that stays the same from step to step; `train` runs the loop."""

    def __init__(
        self,
        policy: Policy,
        reference: PreTrainedModel | None,
        engine: RolloutEngine,
        rewards: RewardSum,
        renderer: PromptRenderer,
        problems: Sequence[Problem],
        config: RLConfig,
        *,
        seed: int,
        pad_id: int,
        checkpoints: Path,
        recorder: Recorder,
    ) -> None:
        if len(problems) < config.prompts_per_step:
            raise BadInput(
                f"rl.prompts_per_step = {config.prompts_per_step}: the train split has only {len(problems)} rows"
            )
        self.policy, self.reference, self.engine = policy, reference, engine
        self.rewards, self.renderer, self.problems = rewards, renderer, problems
        self.config, self.seed, self.pad_id, self.recorder = config, seed, pad_id, recorder
        self.parameters = list(policy.parameters.values())
        self.optimizer = build_optimizer(self.parameters, config.optimizer)
        self.checkpoints = Checkpoints(checkpoints, policy.parameters, self.optimizer)

    def train(self) -> list[dict[str, Any]]:
        """Run all steps, from the latest checkpoint on; returns the metrics of every step."""
        config = self.config
        first, history, _ = self.checkpoints.restore()
        replay(history, self.recorder)
        for step in range(first, config.num_steps):
            rollout = self.roll_out(step)
            values, advantages, seconds = self.update(rollout, step)
            values = rollout_metrics(rollout, config) | values
            history.append({"step": step + 1} | values)
            timings = {f"time/{name}": s for name, s in (rollout.seconds | seconds).items()}
            self.recorder.metrics(values | timings, step + 1)
            self.recorder.table(f"completions/step-{step + 1:06d}", self._rows(rollout, advantages))
            self.recorder.progress(
                step + 1, config.num_steps, reward=values["reward"], tokens=values["completions/mean_length"]
            )
            if (step + 1) % config.checkpoint_every == 0 and step + 1 < config.num_steps:
                self.checkpoints.save(step + 1, history)
        return history

    def roll_out(self, step: int) -> Rollout:
        """Sample a group of completions for each of the step's prompts and grade them."""
        config = self.config
        started = time.monotonic()
        chosen = batch_indices(self.seed, "rl/prompts", step, config.prompts_per_step, len(self.problems))
        problems = [self.problems[i] for i in chosen]
        requests = [
            Request(
                problem.prompt_ids, derive_seed(self.seed, "rl/sample", step, p * config.num_generations + g)
            )
            for p, problem in enumerate(problems)
            for g in range(config.num_generations)
        ]
        completions = self.engine.generate(
            requests, Sampling(config.temperature, config.max_completion_length)
        )
        texts = [self.renderer.decode(completion.ids) for completion in completions]
        sampled = time.monotonic()
        repeated = [problem for problem in problems for _ in range(config.num_generations)]
        columns = {name: [problem.columns[name] for problem in repeated] for name in problems[0].columns}
        columns["completion_ids"] = [completion.ids for completion in completions]
        columns["finish_reason"] = [completion.finish_reason for completion in completions]
        scores = self.rewards.score([problem.prompt for problem in repeated], texts, **columns)
        seconds = {"rollout": sampled - started, "grade": time.monotonic() - sampled}
        return Rollout(problems, completions, texts, scores, seconds)

    def update(self, rollout: Rollout, step: int) -> tuple[dict[str, float], torch.Tensor, dict[str, float]]:
        """Take the step's optimizer steps; returns (metrics, advantages [B], seconds).

        Entropy, clip ratios and KL are means over the tokens that were computed: without a KL term, those of
        groups with an advantage; a step without any has none of these metrics.
        """
        config, started = self.config, time.monotonic()
        batch = self._batch(rollout)
        groups = list(range(len(rollout.problems)))
        on_policy = config.num_iterations == config.num_minibatches == 1
        old = None if on_policy else self._logprobs(self.policy.model, batch, groups)
        ref = self._reference_logprobs(batch, groups)
        referenced = time.monotonic()
        totals = {"loss": 0.0}
        norms: list[float] = []
        updates = config.num_iterations * config.num_minibatches
        for number in range(updates):
            minibatch = groups[number % config.num_minibatches :: config.num_minibatches]
            weights = batch.weights(minibatch, config)
            # a group without spread adds nothing to the gradient, unless the KL term looks at it
            taught = [g for g in minibatch if config.beta or batch.teaches(g)]
            num_tokens = sum(int((weights[g] > 0).sum()) for g in taught)
            for micro in split_by_tokens(
                [batch.trees[g].num_tokens for g in taught], config.micro_batch_tokens
            ):
                part = self._backward(batch, [taught[i] for i in micro], weights, num_tokens, old, ref)
                for name, value in part.items():
                    totals[name] = totals.get(name, 0.0) + value / updates
            rate = learning_rate(config.optimizer, step * updates + number, config.num_steps * updates)
            norms.append(optimizer_step(self.optimizer, self.parameters, config.optimizer, rate))
        self.engine.load_weights(self.policy.model.named_parameters())
        metrics = totals | {"grad_norm": sum(norms) / updates, "learning_rate": rate}
        seconds = {"reference": referenced - started, "update": time.monotonic() - referenced}
        return metrics, batch.advantages, seconds

    def _batch(self, rollout: Rollout) -> Batch:
        config, size = self.config, self.config.num_generations
        valid = torch.tensor([total is not None for total in rollout.scores.total])
        rewards = torch.tensor([total or 0.0 for total in rollout.scores.total], dtype=torch.float64)
        keep = valid.clone()
        if config.mask_truncated_completions:
            keep &= torch.tensor([c.finish_reason == "stop" for c in rollout.completions])
        branches = [c.ids for c in rollout.completions]
        trees = [
            Tree(list(problem.prompt_ids), branches[g * size : (g + 1) * size])
            for g, problem in enumerate(rollout.problems)
        ]
        advantages = group_advantages(rewards, size, config.scale_rewards, valid).float()
        return Batch(trees, advantages, keep, size)

    def _logprobs(self, model: PreTrainedModel, batch: Batch, groups: list[int]) -> dict[int, torch.Tensor]:
        """Log-probabilities of every group's tokens, without gradient, by group."""
        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for micro in split_by_tokens(
                [batch.trees[g].num_tokens for g in groups], self.config.micro_batch_tokens
            ):
                layout = lay_out([[batch.trees[groups[i]]] for i in micro], self.pad_id, model.device)
                logprobs, _ = token_logprobs(model, layout, self.config.temperature)
                sizes = [sum(map(len, batch.trees[groups[i]].branches)) for i in micro]
                found |= {groups[i]: part for i, part in zip(micro, logprobs.split(sizes), strict=True)}
        return found

    def _reference_logprobs(self, batch: Batch, groups: list[int]) -> dict[int, torch.Tensor] | None:
        if self.config.beta == 0:
            return None
        if self.reference is not None:
            return self._logprobs(self.reference, batch, groups)
        with self.policy.without_adapters() as model:
            return self._logprobs(model, batch, groups)

    def _backward(
        self,
        batch: Batch,
        groups: list[int],
        weights: dict[int, torch.Tensor],
        num_tokens: int,
        old: dict[int, torch.Tensor] | None,
        ref: dict[int, torch.Tensor] | None,
    ) -> dict[str, float]:
        """Add one micro-batch's share of the gradient; returns its share of the step's metrics."""
        config, device = self.config, self.policy.model.device
        layout = lay_out([[batch.trees[g]] for g in groups], self.pad_id, device)
        logprobs, entropy = token_logprobs(self.policy.model, layout, config.temperature)
        old_logprobs = logprobs.detach() if old is None else torch.cat([old[g] for g in groups])
        advantages = torch.cat([batch.token_advantages(g) for g in groups]).to(device)
        weight = torch.cat([weights[g] for g in groups]).to(device)
        high = config.epsilon if config.epsilon_high is None else config.epsilon_high
        per_token = clipped_policy_loss(logprobs, old_logprobs, advantages, config.epsilon, high)
        share = {}
        if ref is not None:
            kl = kl_penalty(logprobs, torch.cat([ref[g] for g in groups]), "k3")
            per_token = per_token + config.beta * kl
            share["kl"] = kl.detach()
        loss = (weight * per_token).sum()
        loss.backward()
        low_clip, high_clip = clip_fractions(
            logprobs.detach(), old_logprobs, advantages, config.epsilon, high
        )
        share |= {
            "entropy": entropy.detach(),
            "clip_ratio/low_mean": low_clip.float(),
            "clip_ratio/high_mean": high_clip.float(),
            "clip_ratio/region_mean": (low_clip | high_clip).float(),
        }
        even = (weight > 0).float() / max(1, num_tokens)
        return {"loss": loss.item()} | {name: (even * value).sum().item() for name, value in share.items()}

    def _rows(self, rollout: Rollout, advantages: torch.Tensor) -> list[dict[str, Any]]:
        size = self.config.num_generations
        return [
            {
                "prompt": rollout.problems[i // size].prompt,
                "answer": rollout.problems[i // size].columns.get("answer"),
                "completion": text,
                "reward": rollout.scores.total[i],
                **{f"rewards/{name}": values[i] for name, values in rollout.scores.parts.items()},
                "advantage": float(advantages[i]),
                "finish_reason": rollout.completions[i].finish_reason,
                "tokens": len(rollout.completions[i].ids),
            }
            for i, text in enumerate(rollout.texts)
        ]


@dataclass(frozen=True)
class Batch:
    """A rollout as trees (one a group) with advantages [B]; `keep` [B] marks completions in the loss."""

    trees: list[Tree]
    advantages: torch.Tensor
    keep: torch.Tensor
    group_size: int

    def token_advantages(self, group: int) -> torch.Tensor:
        """Each branch token's advantage: its completion's."""
        start = group * self.group_size
        lengths = torch.tensor([len(b) for b in self.trees[group].branches])
        return self.advantages[start : start + self.group_size].repeat_interleave(lengths)

    def teaches(self, group: int) -> bool:
        """Whether any completion of the group has an advantage."""
        start = group * self.group_size
        return bool(self.advantages[start : start + self.group_size].any())

    def weights(self, groups: list[int], config: RLConfig) -> dict[int, torch.Tensor]:
        """Loss weight of each branch token by group, normalised over `groups`."""
        lengths = torch.tensor([[len(b) for b in self.trees[g].branches] for g in groups]).flatten()
        keep = torch.cat([self.keep[g * self.group_size : (g + 1) * self.group_size] for g in groups])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]) & keep[:, None]
        dense = token_weights(mask, config.loss_type, config.max_completion_length)
        found = {}
        for position, group in enumerate(groups):
            rows = range(position * self.group_size, (position + 1) * self.group_size)
            found[group] = torch.cat([dense[r, : lengths[r]] for r in rows])
        return found


def rollout_metrics(rollout: Rollout, config: RLConfig) -> dict[str, float]:
    """TRL's names for what was sampled and earned; lengths in tokens."""
    total = rollout.scores.total
    rewards = torch.tensor([t or 0.0 for t in total], dtype=torch.float64)
    valid = torch.tensor([t is not None for t in total])
    graded = rewards[valid]
    grouped = rewards.view(-1, config.num_generations)
    lengths = torch.tensor([len(c.ids) for c in rollout.completions], dtype=torch.float64)
    ended = torch.tensor([c.finish_reason == "stop" for c in rollout.completions])
    metrics = {
        "reward": graded.mean().item() if len(graded) else 0.0,
        "reward_std": grouped.std(1).mean().item(),
        "frac_reward_zero_std": zero_spread(rewards, config.num_generations, valid).double().mean().item(),
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": 1 - ended.double().mean().item(),
        "num_tokens": lengths.sum().item(),
    }
    for name, values in rollout.scores.parts.items():
        known = torch.tensor([v for v in values if v is not None], dtype=torch.float64)
        metrics[f"rewards/{name}/mean"] = known.mean().item() if len(known) else 0.0
        metrics[f"rewards/{name}/std"] = known.std().item() if len(known) > 1 else 0.0
        metrics[f"rewards/{name}/failures"] = float(len(values) - len(known))
    return metrics
