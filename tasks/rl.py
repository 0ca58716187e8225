"""Stage `rl`: reinforcement learning from graded completions, starting at the DPO or SFT model."""

from __future__ import annotations

from typing import Any

import pandas as pd

from tasks.stage import Stage, resolve_model, run_stage
from training.checkpoint import history_text
from training.critic import Critic
from training.experience import Problem
from training.iterative import RewardLearner
from training.models import (
    end_token_ids,
    load_model,
    load_reward_model,
    load_tokenizer,
    pick_device,
    save_model,
    set_threads,
)
from training.policy import Policy
from training.preferences import read_pairs
from training.prompts import PromptRenderer
from training.rewards import Reward, RewardSum
from training.rewards.model import ModelReward
from training.rl import RLTrainer
from training.rollout.native import NativeEngine


def rl(stage: Stage) -> None:
    """Train on data/prepared/train.parquet and publish the policy with its history."""
    config, params = stage.params.rl, stage.params
    if not config.enabled:
        return stage.disable("dpo")
    set_threads(params.threads)
    start, data, device = (
        resolve_model(stage.folder("dpo")),
        stage.folder("prepare") / "train.parquet",
        pick_device(params.device),
    )
    tokenizer = load_tokenizer(start)
    renderer = PromptRenderer(tokenizer, params.prompt)
    rows = pd.read_parquet(data)
    stage.run.input(data, "train", "training")
    stage.run.text(renderer.text(rows["prompt"].iloc[0]), "rendered_prompt.txt")
    problems = [
        Problem(
            row["prompt"],
            tuple(renderer.ids(row["prompt"])),
            {str(k): v for k, v in row.items() if k != "prompt"},
        )
        for row in rows.to_dict("records")
    ]
    given: dict[str, Reward] = {}
    reward_model, learner = None, None
    if "model" in config.reward_funcs:
        reward_model = load_reward_model(resolve_model(stage.folder("reward_model")), device)
        given["model"] = ModelReward(reward_model, renderer, config.micro_batch_tokens)
        reward_model.requires_grad_(config.iterative.reward_model_steps > 0)
        if config.iterative.reward_model_steps:
            grader = RewardSum([params.rewards.grader], None, params.rewards)
            earlier = stage.folder("preferences") / "train.parquet"
            stage.run.input(earlier, "preferences", "training")
            learner = RewardLearner(
                reward_model,
                renderer,
                grader,
                read_pairs(earlier),
                config,
                params.reward_model,
                seed=params.seed,
            )
    rewards = RewardSum(config.reward_funcs, config.reward_weights, params.rewards, given)
    model = load_model(start, device)
    policy = Policy(model, config.lora, params.seed)
    reference = load_model(start, device) if config.beta and not policy.has_adapters else None
    critic = None
    if config.advantage_estimator == "gae":
        shared = config.value_model == "trunk"
        critic = Critic(model if shared else load_model(start, device), shared)
    trainer = RLTrainer(
        policy,
        reference,
        NativeEngine(
            model, end_token_ids(model, tokenizer), config.prompts_per_step * config.num_generations
        ),
        rewards,
        renderer,
        problems,
        config,
        seed=params.seed,
        pad_id=tokenizer.pad_token_id or 0,
        checkpoints=stage.scratch / "checkpoints",
        recorder=stage.run,
        critic=critic,
        learner=learner,
    )
    kept = reference or policy.kept or None
    stage.run.table("models", held(policy=model, reference=kept, reward=reward_model, value=critic))
    history = trainer.train()
    metrics = {
        "first_reward": history[0]["reward"],
        "final_reward": history[-1]["reward"],
        "generated_tokens": sum(row["num_tokens"] for row in history),
    }
    with stage.publish(metrics) as folder:
        save_model(policy.merged(), tokenizer, folder)
        (folder / "history.jsonl").write_text(history_text(history))
        if critic is not None:
            critic.save(folder / "critic")
        if learner is not None:
            save_model(learner.model, tokenizer, folder / "reward")


def held(**models: Any) -> list[dict[str, Any]]:
    """The models that the run holds in memory: parameters and size of the weights, each counted once."""
    counted: set[int] = set()
    rows = []
    for name, model in models.items():
        if model is None:
            continue
        modules = (
            [model.head, *([] if model.shared else [model.trunk])] if isinstance(model, Critic) else [model]
        )
        tensors = [p for module in modules for p in module.parameters() if id(p) not in counted]
        counted |= {id(p) for p in tensors}
        rows.append(
            {
                "model": name,
                "parameters": sum(p.numel() for p in tensors),
                "trained": sum(p.numel() for p in tensors if p.requires_grad and name != "reference"),
                "weights_gib": sum(p.numel() * p.element_size() for p in tensors) / 2**30,
            }
        )
    return rows


if __name__ == "__main__":
    run_stage("rl", rl)
