"""Iterative GRPO (Shao et al. 2024, arXiv:2402.03300, algorithm 1 and §4.1.4): outer iterations around the RL loop.

before the first step of every iteration but the first:
    reference     <- policy
    pairs         =  the last iteration's completions, graded by the rule, better against worse
    reward model  <- reward_model_steps steps on batches of such pairs and a share of earlier ones     RewardLearner

The first iteration begins with both as they were given. After the last one nothing is left to learn for, so the
reward model that is published is the one that graded it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers

from training.config import RewardModelConfig, RLConfig
from training.errors import BadInput
from training.experience import Rollout, reward_columns
from training.optimizer import build_optimizer
from training.policy import Policy
from training.preferences import Pair, pair_up
from training.prompts import PromptRenderer
from training.randomness import batch_indices, generator
from training.reward_model import (
    ComparedPair,
    compared,
    held_out_metrics,
    reward_model_step,
    score_branches,
)
from training.rewards import RewardSum


class RewardLearner:
    """Goes on training the reward model in `model`, in place, between iterations.

    `pairs` are the history to start from: those that the reward model was trained on. `grader` is the rule that
    labels new ones. The loss is that of `loss` (margin, centring, lengths); batches, steps and optimizer are those
    of `config.iterative`. All weights are trained, also of a model that was made with adapters: it was published
    with them merged.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        renderer: PromptRenderer,
        grader: RewardSum,
        pairs: Sequence[Pair],
        config: RLConfig,
        loss: RewardModelConfig,
        *,
        seed: int,
    ) -> None:
        own = config.iterative
        self.model, self.renderer, self.grader, self.config, self.seed = model, renderer, grader, config, seed
        self.loss = loss.model_copy(
            update={
                "num_steps": (own.iterations - 1) * own.reward_model_steps,
                "optimizer": own.optimizer,
            }
        )
        self.pad_id = renderer.tokenizer.pad_token_id or 0
        self.parameters = {f"reward_model.{name}": p for name, p in model.named_parameters()}
        self.optimizer = build_optimizer(list(self.parameters.values()), own.optimizer)
        self.fresh: list[Pair] = []
        """Of this iteration's completions."""
        self.earlier: list[Pair] = []
        """Of earlier iterations' completions."""
        self.history = self._usable(pairs)

    def collect(self, rollout: Rollout, step: int) -> None:
        """Pair the completions that step `step` sampled, group by group."""
        size, own = self.config.num_generations, self.config.iterative
        rewards = self._labels(rollout)
        reasons = [completion.finish_reason for completion in rollout.completions]
        for number, problem in enumerate(rollout.problems):
            group = slice(number * size, (number + 1) * size)
            random = generator(self.seed, "rl/iterative/pairs", step, number)
            self.fresh += pair_up(
                problem.prompt,
                rollout.texts[group],
                rewards[group],
                reasons[group],
                own.max_pairs_per_problem,
                random,
                problem.columns.get("context") or (),
            )

    def learn(self, iteration: int) -> dict[str, float]:
        """Train on the collected pairs before iteration `iteration` (0-based, from 1 on); they then become history.

        A batch holds round(replay x batch_size) pairs of the history and fresh ones in the other places, each kind
        in a random order that comes to a pair again only after all others; where there are fewer, it is smaller by
        those missing. Without a fresh pair the reward model stays as it is. Returns the counts of pairs and the
        model's loss (nats) and accuracy on the fresh pairs before and after.
        """
        own = self.config.iterative
        fresh, history = list(self._usable(self.fresh).values()), list(self.history.values())
        replayed = min(round(own.replay * own.batch_size), len(history))
        new = min(own.batch_size - round(own.replay * own.batch_size), len(fresh))
        metrics = {
            "fresh_pairs": len(fresh),
            "history_pairs": len(history),
            "skipped": not fresh,
            "missing_pairs": own.batch_size - replayed - new,
            "replayed_share": replayed / (replayed + new) if fresh else 0.0,
        }
        if fresh:
            metrics |= self._quality(fresh, "before")
            self.model.train()
            for number in range(own.reward_model_steps):
                batch = [
                    pairs[i]
                    for name, size, pairs in (("fresh", new, fresh), ("replay", replayed, history))
                    for i in batch_indices(
                        self.seed, f"rl/iterative/{name}/{iteration}", number, size, len(pairs)
                    )
                ]
                step = (iteration - 1) * own.reward_model_steps + number
                parameters = list(self.parameters.values())
                taken = reward_model_step(
                    self.model, self.optimizer, parameters, batch, self.loss, step, self.pad_id
                )
            self.model.eval()
            metrics |= self._quality(fresh, "after")
            metrics |= {f"reward_model/{name}": taken[name] for name in ("grad_norm", "learning_rate")}
        self._remember(self.fresh)
        self.fresh = []
        return {f"iterative/{name}": float(value) for name, value in metrics.items()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the tensors: the pairs made so far, as plain values."""
        return {name: [_plain(pair) for pair in getattr(self, name)] for name in ("fresh", "earlier")}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.fresh = [_pair(values) for values in state["fresh"]]
        self._remember([_pair(values) for values in state["earlier"]])

    def _labels(self, rollout: Rollout) -> list[float | None]:
        """The rule's rewards; where it is one of RL's own rewards they are there already."""
        [name] = self.grader.names
        if name in rollout.scores.parts:
            return rollout.scores.parts[name]
        columns = reward_columns(rollout.problems, rollout.completions, self.config.num_generations)
        prompts = [problem.prompt for problem in rollout.problems for _ in range(self.config.num_generations)]
        return self.grader.score(prompts, rollout.texts, **columns).total

    def _quality(self, pairs: list[ComparedPair], when: str) -> dict[str, float]:
        trees = [pair.tree for pair in pairs]
        scores = score_branches(self.model, trees, self.pad_id, self.loss.micro_batch_tokens)
        found = held_out_metrics(scores.view(-1, 2))
        return {f"reward_model/{name}_{when}": found[name] for name in ("loss", "accuracy")}

    def _remember(self, pairs: list[Pair]) -> None:
        self.earlier += pairs
        self.history |= self._usable(pairs)

    def _usable(self, pairs: Iterable[Pair]) -> dict[str, ComparedPair]:
        """Distinct pairs as token ids by their id, those too long for the reward model left out."""
        kind, separator = self.loss.supervision, self.grader.separator
        found = {pair.id: compared(pair, self.renderer, kind, separator) for pair in pairs}
        return {id_: pair for id_, pair in found.items() if pair.longest <= self.loss.max_length}


class Iterations:
    """The outer loop of a run: what happens before the first step of every iteration but the first.

    `reference` and `learner` are None where there is nothing of the kind. With one iteration it does nothing.
    """

    def __init__(
        self,
        config: RLConfig,
        policy: Policy,
        reference: transformers.PreTrainedModel | None,
        learner: RewardLearner | None,
    ) -> None:
        own = config.iterative
        if bool(own.reward_model_steps) != (learner is not None):
            raise ValueError(
                "a reward learner goes with rl.iterative.reward_model_steps > 0, and only with it"
            )
        self.steps, self.last = config.num_steps // own.iterations, own.iterations - 1
        self.policy, self.learner = policy, learner
        self.moving: dict[str, torch.nn.Parameter] = {}
        """The reference's tensors that become the policy's, by the names that those have there."""
        if own.iterations > 1 and config.beta:
            if policy.has_adapters and reference is not None:
                raise BadInput(
                    f"rl.iterative.iterations = {own.iterations}: with adapters the reference is reset to the policy "
                    "with its adapters kept aside; it can't be a model of its own"
                )
            self.moving = policy.keep_adapters() if reference is None else dict(reference.named_parameters())
        self.changing = {f"reference.{name}": p for name, p in self.moving.items()}
        self.optimizers: list[torch.optim.Optimizer] = []
        if learner is not None:
            self.changing |= learner.parameters
            self.optimizers.append(learner.optimizer)

    def begin(self, step: int) -> dict[str, float]:
        """Do what comes before step `step`; returns its metrics, none where no iteration begins."""
        iteration, place = divmod(step, self.steps)
        if place or not iteration:
            return {}
        ours = dict(self.policy.model.named_parameters())
        with torch.no_grad():
            for name, parameter in self.moving.items():
                parameter.copy_(ours[name])
        learnt = {} if self.learner is None else self.learner.learn(iteration)
        return {"iterative/iteration": float(iteration + 1)} | learnt

    def collect(self, rollout: Rollout, step: int) -> None:
        """Keep what the next iteration learns from."""
        if self.learner is not None and step // self.steps < self.last:
            self.learner.collect(rollout, step)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the tensors in `changing`."""
        return {} if self.learner is None else {"reward_learner": self.learner.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned; nothing without a checkpoint."""
        if self.learner is not None and state:
            self.learner.restore(state["reward_learner"])


def _plain(pair: Pair) -> list[Any]:
    return [pair.prompt, pair.chosen, pair.rejected, pair.margin, list(pair.context)]


def _pair(values: list[Any]) -> Pair:
    prompt, chosen, rejected, margin, context = values
    return Pair(prompt, chosen, rejected, margin, tuple(context))
