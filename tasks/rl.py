"""Stage `rl`: reinforcement learning from graded completions, starting at the DPO or SFT model."""

from __future__ import annotations

from typing import Any

import pandas as pd

from tasks.roles import READ_THE_POLICYS_IDS, check_reading, checkpoints
from tasks.stage import Stage, run_stage
from training.checkpoint import history_text
from training.critic import Critic
from training.experience import Problem
from training.models import (
    end_token_ids,
    load_checkpoint,
    load_model,
    load_reward_model,
    load_tokenizer,
    pick_device,
    set_threads,
)
from training.policy import Policy
from training.prompts import PromptRenderer
from training.quantization import check_quantization
from training.rewards import Reward, RewardSum
from training.rewards.model import ModelReward, renderer_of
from training.rl import RLTrainer
from training.rollout.native import NativeEngine

FROZEN = ("reference", "reward")
"""Models that nothing trains."""


def rl(stage: Stage) -> None:
    """Train on data/prepared/train.parquet and publish the policy with its history."""
    config, params = stage.params.rl, stage.params
    if not config.enabled:
        return stage.disable("dpo")
    device = pick_device(params.device)
    check_quantization(config.lora, "rl.lora", device)
    check_quantization(config.critic_lora, "rl.critic_lora", device)
    set_threads(params.threads)
    folders, data = checkpoints(stage), stage.folder("prepare") / "train.parquet"
    start = folders["policy"]
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
    longest = max(len(problem.prompt_ids) for problem in problems) + config.max_completion_length
    for key in READ_THE_POLICYS_IDS:
        chosen = folders.get(key.removesuffix("_model"), start)
        if chosen != start:
            check_reading(params, key, chosen, tokenizer, longest)
    given: dict[str, Reward] = {}
    reward_model = None
    if folder := folders.get("reward"):
        shows, own = renderer_of(load_tokenizer(folder), renderer)
        reward_model = load_reward_model(folder, device)
        given["model"] = ModelReward(reward_model, shows, config.micro_batch_tokens, own)
    rewards = RewardSum(config.reward_funcs, config.reward_weights, params.rewards, given)
    model = load_model(start, device, config.lora.quantization)
    policy = Policy(model, config.lora, params.seed)
    reference = None
    if config.beta and not (policy.has_adapters and config.reference == "start"):
        reference = load_model(folders["reference"], device)
    critic = None
    if folder := folders.get("value"):
        if config.value_model == "trunk":
            critic = Critic(model, shared=True)
        else:
            own_model = load_checkpoint(folder, device, config.critic_lora.quantization)
            critic = Critic(own_model, shared=False, lora=config.critic_lora, seed=params.seed)
    came_from = {role: str(folder.relative_to(stage.root)) for role, folder in folders.items()}
    models = {"policy": model, "reference": reference, "reward": reward_model, "value": critic}
    stage.run.table("models", held(models, came_from))
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
    )
    history = trainer.train()
    metrics = {
        "first_reward": history[0]["reward"],
        "final_reward": history[-1]["reward"],
        "generated_tokens": sum(row["num_tokens"] for row in history),
    }
    with stage.publish(metrics) as folder:
        policy.save(folder, start, tokenizer)
        (folder / "history.jsonl").write_text(history_text(history))
        if critic is not None:
            critic.save(folder / "critic", folders["value"])


def held(models: dict[str, Any], came_from: dict[str, str]) -> list[dict[str, Any]]:
    """The models that the run holds in memory, by role: parameters and size of the weights, each counted once.

    `came_from` names the checkpoint that each was loaded from. A model that shares another's weights has none of
    its own: a value head on the policy's trunk, or the reference that is the policy without its adapters.
    """
    counted: set[int] = set()
    rows = []
    for name, model in models.items():
        if model is None and name not in came_from:
            continue
        modules = [] if model is None else [model]
        if isinstance(model, Critic):
            modules = [model.head, *([] if model.shared else [model.trunk])]
        tensors = [p for module in modules for p in module.parameters() if id(p) not in counted]
        counted |= {id(p) for p in tensors}
        rows.append(
            {
                "model": name,
                "checkpoint": came_from.get(name),
                "parameters": sum(p.numel() for p in tensors),
                "trained": sum(p.numel() for p in tensors if p.requires_grad and name not in FROZEN),
                "weights_gib": sum(p.numel() * p.element_size() for p in tensors) / 2**30,
            }
        )
    return rows


if __name__ == "__main__":
    run_stage("rl", rl)
