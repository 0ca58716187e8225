"""The RL loop: sample, grade, compare with the baseline, update. An algorithm is a choice on its switches.

for step:
    where an outer iteration begins, the reference and the reward model move on      training/iterative.py
    prompts     = a function of (seed, step)                    training/curriculum.py may order them
    completions = engine.generate(prompts x group)              roll_out
    rewards     = the rules' weighted sum                       roll_out
    advantages  = reward against the baseline                   compare     GRPO: the group's mean; PPO: a value model
    loss        = surrogate + KL + value loss                   update      num_iterations x num_minibatches

With `one_step_off` the next step's prompts are sampled and graded while this step's update runs   training/ahead.py
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from training.ahead import Ahead
from training.algorithms.kl import adaptive_kl_coef, kl_penalty
from training.algorithms.losses import value_loss
from training.batches import lay_out, split_by_tokens
from training.checkpoint import Checkpoints
from training.config import RLConfig
from training.critic import Critic
from training.curriculum import in_order
from training.errors import BadInput
from training.experience import (
    Batch,
    Problem,
    Rollout,
    advantages_of,
    batch_of,
    has_spread,
    reward_columns,
    rollout_metrics,
)
from training.iterative import Iterations, RewardLearner
from training.logprobs import hidden_states, logprobs_of
from training.objective import loss_weights, policy_loss
from training.optimizer import build_optimizer, learning_rate, optimizer_step
from training.policy import Policy
from training.prompts import PromptRenderer
from training.randomness import batch_indices, derive_seed
from training.recorder import Recorder, replay
from training.rewards import RewardSum, Scores
from training.rewards.process import score_steps, shown_steps
from training.rollout.protocol import Completion, Request, RolloutEngine, Sampling


class RLTrainer:
    """Everything that stays the same from step to step; `train` runs the loop.

    `reference` is the frozen model of the KL penalty; None with a penalty means the policy without its adapters.
    `critic` is the value model of advantage_estimator gae; `learner` goes on training the reward model where
    `iterative` says so; `sampler` is a copy of the policy for rollouts that run beside the update (one_step_off).
    """

    def __init__(
        self,
        policy: Policy,
        reference: transformers.PreTrainedModel | None,
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
        critic: Critic | None = None,
        learner: RewardLearner | None = None,
        sampler: transformers.PreTrainedModel | None = None,
    ) -> None:
        if len(problems) < config.prompts_per_step:
            raise BadInput(
                f"rl.prompts_per_step = {config.prompts_per_step}: the train split has only {len(problems)} rows"
            )
        if config.one_step_off != (sampler is not None):
            raise ValueError("one_step_off needs a sampler, and nothing else does")
        if config.sync_ref_model and config.beta and reference is None:
            raise BadInput(
                "rl.sync_ref_model: the reference is the model without its adapters and can't move"
            )
        if config.sync_ref_model and reference is not None:
            ours = {name: p.shape for name, p in policy.model.named_parameters()}
            if ours != {name: p.shape for name, p in reference.named_parameters()}:
                raise BadInput(
                    f"rl.sync_ref_model: the reference (rl.reference = {config.reference!r}) has other parameters than "
                    "the policy, or the policy has adapters, so it can't move towards it"
                )
        self.policy, self.reference, self.engine, self.critic = policy, reference, engine, critic
        self.rewards, self.renderer, self.problems = rewards, renderer, problems
        self.config, self.seed, self.pad_id, self.recorder = config, seed, pad_id, recorder
        self.kl_coef = config.beta
        self.parameters = list(policy.parameters.values())
        self.optimizer = build_optimizer(self.parameters, config.optimizer)
        changing, optimizers = dict(policy.parameters), [self.optimizer]
        if critic is not None:
            self.critic_optimizer = build_optimizer(list(critic.parameters.values()), config.critic_optimizer)
            changing |= critic.parameters
            optimizers.append(self.critic_optimizer)
        if config.sync_ref_model and reference is not None:
            changing |= {f"reference.{name}": p for name, p in reference.named_parameters()}
        self.iterations = Iterations(config, policy, reference, learner)
        changing |= self.iterations.changing
        self.sampler = sampler
        if sampler is not None:
            own = dict(sampler.named_parameters())
            self.sampled_by = {name: own[name] for name in policy.parameters}
            changing |= {f"sampler.{name}": p for name, p in self.sampled_by.items()}
        self.checkpoints = Checkpoints(checkpoints, changing, *optimizers, *self.iterations.optimizers)

    def train(self) -> list[dict[str, Any]]:
        """Run all steps, from the latest checkpoint on; returns the metrics of every step."""
        config = self.config
        first, history, extra = self.checkpoints.restore()
        self.kl_coef = extra.get("kl_coef", config.beta)
        self.iterations.restore(extra)
        replay(history, self.recorder)
        self.engine.load_weights((self.sampler or self.policy.model).named_parameters())
        ahead = Ahead(self.roll_out, range(first, config.num_steps), self._catch_up if self.sampler else None)
        for step in range(first, config.num_steps):
            began = self.iterations.begin(step)
            rollout, waited = ahead.take(step)
            self.iterations.collect(rollout, step)
            batch, seconds = self.compare(rollout)
            values, update_seconds = self.update(batch, step)
            self._move_reference(step)
            values = rollout_metrics(rollout, config) | values | began
            timings = rollout.seconds | {"compare": seconds, "update": update_seconds}
            if self.sampler is not None:
                # the first rollout of all is the start's own, every other one update behind
                values["sampling/staleness"] = float(step > 0)
                timings["waiting"] = waited
            history.append({"step": step + 1} | values)
            self.recorder.metrics(values | {f"time/{name}": s for name, s in timings.items()}, step + 1)
            self.recorder.table(f"completions/step-{step + 1:06d}", self._rows(rollout, batch))
            self.recorder.progress(
                step + 1, config.num_steps, reward=values["reward"], tokens=values["completions/mean_length"]
            )
            if (step + 1) % config.checkpoint_every == 0 and step + 1 < config.num_steps:
                extra = {"kl_coef": self.kl_coef} | self.iterations.state()
                self.checkpoints.save(step + 1, history, extra)
        return history

    def roll_out(self, step: int) -> Rollout:
        """Sample and grade a group for each of the step's prompts; groups without spread may be replaced."""
        config = self.config
        rollout = self._sample(step, 0, set())
        if not config.dynamic_sampling_rounds:
            return rollout
        groups, tried = _groups(rollout, config), set(self._prompts(step, 0))
        rounds = 0
        while (
            rounds < config.dynamic_sampling_rounds
            and sum(g.spread for g in groups) < config.prompts_per_step
        ):
            rounds += 1
            more = self._sample(step, rounds, tried)
            tried |= set(self._prompts(step, rounds))
            groups += _groups(more, config)
            rollout.seconds["rollout"] += more.seconds["rollout"]
            rollout.seconds["grade"] += more.seconds["grade"]
        # a stable sort: those with spread first, each kind in its order
        groups.sort(key=lambda group: not group.spread)
        kept = groups[: config.prompts_per_step]
        metrics = {"dynamic_sampling/rounds": rounds, "dynamic_sampling/discarded": len(groups) - len(kept)}
        return _joined(kept, rollout.seconds, {name: float(value) for name, value in metrics.items()})

    def compare(self, rollout: Rollout) -> tuple[Batch, float]:
        """The rollout as a batch with all that the update needs; returns it and the seconds that took.

        The old log-probabilities of an on-policy update are its own, and nothing is computed for them.
        """
        config, started = self.config, time.monotonic()
        batch = batch_of(rollout, config)
        penalised = config.beta and config.kl_in == "reward"
        if penalised or config.num_iterations * config.num_minibatches > 1:
            batch.old_logprobs = self._logprobs(self.policy.model, batch)
        if config.beta:
            if self.reference is not None:
                batch.ref_logprobs = self._logprobs(self.reference, batch)
            else:
                with self.policy.as_reference() as model:
                    batch.ref_logprobs = self._logprobs(model, batch)
        if self.critic is not None:
            batch.values = self._values(batch)
        kl = None
        if penalised:
            assert batch.old_logprobs is not None
            assert batch.ref_logprobs is not None
            kl = kl_penalty(batch.old_logprobs, batch.ref_logprobs, config.kl_in_force) * batch.mask
        advantages_of(batch, config, kl, self.kl_coef)
        return batch, time.monotonic() - started

    def update(self, batch: Batch, step: int) -> tuple[dict[str, float], float]:
        """Take the step's optimizer steps; returns its metrics and seconds.

        Entropy, clip ratios and KL are means over the tokens that were computed: without a KL term, an entropy
        bonus or a critic, those of groups with an advantage; a step without any has none of these metrics.
        """
        config, started = self.config, time.monotonic()
        totals = {"loss": 0.0}
        norms, critic_norms = [], []
        updates = config.num_iterations * config.num_minibatches
        for number in range(updates):
            groups = batch.groups[number % config.num_minibatches :: config.num_minibatches]
            weights = loss_weights(batch.loss_mask[batch.rows(groups)], config)
            by_group = dict(zip(groups, weights.split(batch.group_size), strict=True))
            # a group without advantage adds nothing to the gradient, unless another term looks at it
            everything = config.beta or config.entropy_coef or self.critic is not None
            taught = [g for g in groups if everything or batch.has_advantage(g)]
            num_tokens = sum(int((by_group[g] > 0).sum()) for g in taught)
            for micro in self._micro_batches(batch, taught):
                part = self._backward(batch, micro, torch.cat([by_group[g] for g in micro]), num_tokens)
                for name, value in part.items():
                    totals[name] = totals.get(name, 0.0) + value / updates
            position, last = step * updates + number, config.num_steps * updates
            rate = learning_rate(config.optimizer, position, last)
            norms.append(optimizer_step(self.optimizer, self.parameters, config.optimizer, rate))
            if self.critic is not None:
                rate_of_critic = learning_rate(config.critic_optimizer, position, last)
                trained = list(self.critic.parameters.values())
                critic_norms.append(
                    optimizer_step(self.critic_optimizer, trained, config.critic_optimizer, rate_of_critic)
                )
        if self.sampler is None:
            self.engine.load_weights(self.policy.model.named_parameters())
        metrics = totals | {"grad_norm": sum(norms) / updates, "learning_rate": rate}
        if self.critic is not None:
            metrics |= {"critic/grad_norm": sum(critic_norms) / updates} | _explained(batch)
        if config.kl_target is not None:
            metrics["kl_coef"] = self.kl_coef
            self.kl_coef = adaptive_kl_coef(self.kl_coef, totals["kl"], config.kl_target)
        return metrics, time.monotonic() - started

    def _catch_up(self) -> None:
        """Give the sampler the policy's weights."""
        assert self.sampler is not None
        with torch.no_grad():
            for name, parameter in self.policy.parameters.items():
                self.sampled_by[name].copy_(parameter)
        self.engine.load_weights(self.sampler.named_parameters())

    def _prompts(self, step: int, round_: int) -> list[int]:
        config = self.config
        if round_ == 0 and config.curriculum.enabled and config.curriculum.order != "none":
            return in_order(step, config.prompts_per_step, config.num_steps, len(self.problems))
        purpose = "rl/prompts" if round_ == 0 else f"rl/prompts/refill-{round_}"
        return batch_indices(self.seed, purpose, step, self.config.prompts_per_step, len(self.problems))

    def _sample(self, step: int, round_: int, tried: set[int]) -> Rollout:
        config, started = self.config, time.monotonic()
        problems = [self.problems[i] for i in self._prompts(step, round_) if i not in tried]
        if not problems:
            return Rollout([], [], [], Scores([], {}), {"rollout": 0.0, "grade": 0.0}, {})
        size = config.num_generations
        first = round_ * config.prompts_per_step * size
        requests = [
            Request(problem.prompt_ids, derive_seed(self.seed, "rl/sample", step, first + p * size + g))
            for p, problem in enumerate(problems)
            for g in range(size)
        ]
        sampling = Sampling(config.temperature, config.max_completion_length)
        completions = self.engine.generate(requests, sampling)
        texts = [self.renderer.decode(completion.ids) for completion in completions]
        sampled = time.monotonic()
        prompts = [problem.prompt for problem in problems for _ in range(size)]
        columns = reward_columns(problems, completions, size)
        if config.supervision == "process":
            scores = score_steps(self.rewards, prompts, texts, self.renderer.decode, **columns)
        else:
            scores = self.rewards.score(prompts, texts, **columns)
        seconds = {"rollout": sampled - started, "grade": time.monotonic() - sampled}
        return Rollout(problems, completions, texts, scores, seconds, {})

    def _micro_batches(self, batch: Batch, groups: list[int]) -> list[list[int]]:
        sizes = [batch.trees[g].num_tokens for g in groups]
        return [
            [groups[i] for i in micro] for micro in split_by_tokens(sizes, self.config.micro_batch_tokens)
        ]

    def _logprobs(self, model: transformers.PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Log-probabilities [B, T] of every completion under a model, without gradient."""
        found = torch.zeros(batch.mask.shape)
        with torch.no_grad():
            for groups in self._micro_batches(batch, batch.groups):
                layout = lay_out([[batch.trees[g]] for g in groups], self.pad_id, model.device)
                flat, _ = logprobs_of(
                    model,
                    hidden_states(model, layout, layout.sources),
                    layout.targets,
                    self.config.temperature,
                )
                found = found.to(flat.dtype)
                found[batch.rows(groups)] = batch.dense(flat, groups).cpu()
        return found

    def _values(self, batch: Batch) -> torch.Tensor:
        """Values [B, T] before every token, without gradient."""
        assert self.critic is not None
        found = torch.zeros(batch.mask.shape)
        with torch.no_grad():
            for groups in self._micro_batches(batch, batch.groups):
                layout = lay_out([[batch.trees[g]] for g in groups], self.pad_id, self.critic.trunk.device)
                found[batch.rows(groups)] = batch.dense(self.critic(layout), groups).cpu()
        return found

    def _backward(
        self, batch: Batch, groups: list[int], weights: torch.Tensor, num_tokens: int
    ) -> dict[str, float]:
        """Add one micro-batch's share of the gradient; returns its share of the step's metrics."""
        config, device, rows = self.config, self.policy.model.device, batch.rows(groups)
        layout = lay_out([[batch.trees[g]] for g in groups], self.pad_id, device)
        hidden = hidden_states(self.policy.model, layout, layout.sources)
        flat_logprobs, flat_entropy = logprobs_of(
            self.policy.model, hidden, layout.targets, config.temperature
        )
        logprobs, entropy = batch.dense(flat_logprobs, groups), batch.dense(flat_entropy, groups)

        def there(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[rows].to(device)

        assert batch.advantages is not None
        loss, shares = policy_loss(
            config,
            logprobs,
            entropy,
            logprobs.detach() if batch.old_logprobs is None else there(batch.old_logprobs),
            there(batch.advantages),
            there(batch.mask),
            None if batch.ref_logprobs is None else there(batch.ref_logprobs),
            there(batch.sampler_logprobs),
            self.kl_coef,
        )
        weights = weights.to(device)
        total = (weights * loss).sum()
        even = (weights > 0).float() / max(1, num_tokens)
        metrics = {"loss": total.item()} | {name: (even * v).sum().item() for name, v in shares.items()}
        if self.critic is not None:
            assert batch.values is not None
            assert batch.returns is not None
            values = batch.dense(self.critic(layout, hidden if self.critic.shared else None), groups)
            errors = value_loss(values, there(batch.values), there(batch.returns), config.cliprange_value)
            # over tokens, whatever the policy's loss averages over
            of_values = (even * errors).sum()
            metrics["critic/loss"] = of_values.item()
            total = total + config.vf_coef * of_values
        total.backward()
        return metrics

    def _move_reference(self, step: int) -> None:
        config = self.config
        if not (config.sync_ref_model and config.beta) or (step + 1) % config.ref_model_sync_steps:
            return
        assert self.reference is not None
        with torch.no_grad():
            ours = dict(self.policy.model.named_parameters())
            for name, parameter in self.reference.named_parameters():
                parameter.lerp_(ours[name], config.ref_model_mixup_alpha)

    def _rows(self, rollout: Rollout, batch: Batch) -> list[dict[str, Any]]:
        size = self.config.num_generations
        assert batch.advantages is not None
        mean = batch.advantages.sum(1) / batch.mask.sum(1).clamp(min=1)
        return [
            {
                "prompt": rollout.problems[i // size].prompt,
                "answer": rollout.problems[i // size].columns.get("answer"),
                "completion": text,
                "reward": rollout.scores.total[i],
                **{f"rewards/{name}": values[i] for name, values in rollout.scores.parts.items()},
                **shown_steps(rollout.scores, i),
                "advantage": float(mean[i]),
                "finish_reason": rollout.completions[i].finish_reason,
                "tokens": len(rollout.completions[i].ids),
            }
            for i, text in enumerate(rollout.texts)
        ]


class _Group:
    """One prompt's completions, cut out of a rollout."""

    def __init__(self, rollout: Rollout, number: int, size: int, spread: bool) -> None:
        part = slice(number * size, (number + 1) * size)
        self.problem: Problem = rollout.problems[number]
        self.completions: list[Completion] = rollout.completions[part]
        self.texts = rollout.texts[part]
        self.scores = rollout.scores.part(part)
        self.spread = spread


def _groups(rollout: Rollout, config: RLConfig) -> list[_Group]:
    if not rollout.problems:
        return []
    spread = has_spread(rollout, config)
    return [_Group(rollout, g, config.num_generations, spread[g]) for g in range(len(rollout.problems))]


def _joined(groups: list[_Group], seconds: dict[str, float], metrics: dict[str, float]) -> Rollout:
    return Rollout(
        [group.problem for group in groups],
        [c for group in groups for c in group.completions],
        [t for group in groups for t in group.texts],
        Scores.joined([group.scores for group in groups]),
        seconds,
        metrics,
    )


def _explained(batch: Batch) -> dict[str, float]:
    """Share of the returns' variance that the values foresaw (1 is all, 0 is none), over graded tokens."""
    assert batch.values is not None
    assert batch.returns is not None
    known = batch.mask & batch.valid[:, None]
    returns, errors = batch.returns[known], (batch.returns - batch.values)[known]
    variance = returns.var(unbiased=False).item() if len(returns) else 0.0
    explained = 1 - errors.var(unbiased=False).item() / variance if variance > 0 else 0.0
    return {
        "critic/explained_variance": explained,
        "critic/value_mean": batch.values[known].mean().item() if len(returns) else 0.0,
    }
