"""One measurement of Gradeline: `python -m benchmarks.bench.ours WORK STEPS [--variant V] [--gsm8k FILE]` prints JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench.work import (
    LEARNING_RATE,
    SEED,
    TEMPLATE,
    VARIANTS,
    WORKS,
    Shape,
    Work,
    half_solved,
    hashed,
    lengths,
    model_folder,
    needed,
    rows,
    worse,
)
from training.batches import Tree
from training.config import (
    LoraConfig,
    OptimizerConfig,
    PromptConfig,
    RewardModelConfig,
    RewardsConfig,
    RLConfig,
    SFTConfig,
)
from training.critic import Critic
from training.experience import Problem
from training.models import load_model, load_tokenizer, new_reward_model
from training.policy import Policy
from training.preferences import Pair
from training.prompts import PromptRenderer
from training.recorder import NullRecorder
from training.reward_model import compared, train_reward_model
from training.rewards import Reward, RewardSum
from training.rewards.model import ModelReward
from training.rl import RLTrainer
from training.rollout.native import NativeEngine
from training.sft import train_sft

OPTIMIZER = OptimizerConfig(learning_rate=LEARNING_RATE, schedule="constant", weight_decay=0.0)
PPO: dict[str, Any] = {
    "advantage_estimator": "gae",
    "lam": 0.95,
    "kl_in": "reward",
    "reward_funcs": ["model"],
    "critic_optimizer": OPTIMIZER,
}
CPU = torch.device("cpu")


class Clock(NullRecorder):
    """Keeps every step's timings, and when it ended."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.ended = [time.monotonic()]

    def metrics(self, values: dict[str, float], step: int) -> None:
        self.steps.append({n.removeprefix("time/"): v for n, v in values.items() if n.startswith("time/")})

    def progress(self, step: int, total: int, **shown: float) -> None:
        self.ended.append(time.monotonic())

    def seconds(self) -> list[dict[str, float]]:
        """By step: `total`, and those of its phases that were measured."""
        totals = [after - before for before, after in zip(self.ended, self.ended[1:], strict=False)]
        return [step | {"total": total} for step, total in zip(self.steps, totals, strict=True)]


def rl_config(work: Work, num_steps: int) -> RLConfig:
    """The work as Gradeline's settings; TRL's are in `peer` and `ppo`."""
    ahead: dict[str, Any] = {"one_step_off": True, "importance_sampling_cap": 2.0}
    return RLConfig(
        num_steps=num_steps,
        prompts_per_step=work.num_prompts,
        num_generations=work.num_generations,
        max_completion_length=work.completion_length,
        beta=work.beta,
        loss_type="grpo",
        checkpoint_every=num_steps + 1,
        optimizer=OPTIMIZER,
        **({} if work.kind == "grpo" else PPO),
        **(ahead if work.variant == "one_step_off" else {}),
    )


def trainer(work: Work, data: list[dict[str, str]], num_steps: int, clock: Any, folder: Path) -> RLTrainer:
    """GRPO on the work's prompts with the hash as the reward, or PPO with four models."""
    config = rl_config(work, num_steps)
    tokenizer = load_tokenizer(model_folder())
    renderer = PromptRenderer(tokenizer, PromptConfig(chat_template=TEMPLATE))
    policy = Policy(load_model(model_folder(), CPU), LoraConfig(), SEED)
    reference = load_model(model_folder(), CPU) if work.beta else None
    given: dict[str, Reward] = {"hashed": half_solved if work.variant == "solved" else hashed}
    critic = None
    if work.kind == "ppo":
        reward_model = new_reward_model(model_folder(), tokenizer, CPU, SEED, None).requires_grad_(False)
        given = {"model": ModelReward(reward_model, renderer)}
        critic = Critic(load_model(model_folder(), CPU), shared=False)
    sampler = policy.sampler() if config.one_step_off else None
    return RLTrainer(
        policy,
        reference,
        NativeEngine(sampler or policy.model, set()),
        RewardSum(list(given), None, RewardsConfig(), given),
        renderer,
        [Problem(row["question"], tuple(renderer.ids(row["question"])), {}) for row in data],
        config,
        seed=SEED,
        pad_id=tokenizer.pad_token_id or 0,
        checkpoints=folder,
        recorder=clock,
        critic=critic,
        sampler=sampler,
    )


def measure(work: Work, num_steps: int, gsm8k: Path | None) -> dict[str, Any]:
    """Steps of the work after one that warms up: seconds by phase, peak memory, FLOPs needed."""
    data = rows(work, gsm8k, work.num_prompts)
    tokenizer = load_tokenizer(model_folder())
    renderer = PromptRenderer(tokenizer, PromptConfig(chat_template=TEMPLATE))
    pad_id = tokenizer.pad_token_id or 0
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock()
        common: dict[str, Any] = {
            "seed": SEED,
            "pad_id": pad_id,
            "checkpoints": Path(folder),
            "recorder": clock,
        }
        run: Callable[[], Any]
        if work.kind in ("grpo", "ppo"):
            made = trainer(work, data, num_steps + 1, clock, Path(folder))
            model, run = made.policy.model, made.train
        elif work.kind == "sft":
            config = SFTConfig(
                num_steps=num_steps + 1, batch_size=work.num_prompts, checkpoint_every=99, optimizer=OPTIMIZER
            )
            model = load_model(model_folder(), CPU)
            policy = Policy(model, LoraConfig(), SEED)
            examples = [
                Tree(renderer.ids(row["question"]), [renderer.completion_ids(row["solution"])])
                for row in data
            ]

            def run() -> Any:
                return train_sft(policy, examples, config, **common)
        else:
            of_pairs = RewardModelConfig(
                num_steps=num_steps + 1, batch_size=work.num_prompts, checkpoint_every=99, optimizer=OPTIMIZER
            )
            model = new_reward_model(model_folder(), tokenizer, CPU, SEED, None)
            learner = Policy(model, LoraConfig(), SEED)
            pairs = [
                compared(
                    Pair(prompt=row["question"], chosen=row["solution"], rejected=worse(row)),
                    renderer,
                    "outcome",
                    "\n",
                )
                for row in data
            ]

            def run() -> Any:
                return train_reward_model(learner, pairs, of_pairs, **common)

        clock.ended = [time.monotonic()]
        run()
    language_model = load_model(model_folder(), CPU) if work.kind == "reward_model" else model
    return {
        "steps": [phases(step) for step in clock.seconds()[1:]],
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "flops": needed(work, Shape.of(language_model), *lengths(work, renderer, data)),
        "tokens": sum(lengths(work, renderer, data)[1]),
    }


def phases(step: dict[str, float]) -> dict[str, float]:
    """Seconds of a step: rollout, scoring (rewards, reference, values), update and rest make up the total.

    With rollouts beside the update they overlap, and `rest` is what is left of the total, negative as a rule.
    """
    update = step["update"] if "update" in step else step["step"]
    scoring = step.get("grade", 0.0) + step.get("compare", 0.0)
    found = {"rollout": step.get("rollout", 0.0), "scoring": scoring, "update": update}
    return found | {"rest": step["total"] - sum(found.values()), "total": step["total"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=list(WORKS))
    parser.add_argument("steps", type=int)
    parser.add_argument("--variant", choices=["plain", *VARIANTS], default="plain")
    parser.add_argument("--gsm8k", type=Path)
    arguments = parser.parse_args()
    work = dataclasses.replace(WORKS[arguments.work], variant=arguments.variant)
    print(json.dumps(measure(work, arguments.steps, arguments.gsm8k)))


if __name__ == "__main__":
    main()
