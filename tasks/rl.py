"""Stage `rl`: reinforcement learning from graded completions, starting at the DPO or SFT model."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import transformers

from tasks.prepare import checked_digest, local_files
from tasks.roles import READ_THE_POLICYS_IDS, check_reading, checkpoints, held
from tasks.stage import Stage
from training.checkpoint import history_text
from training.critic import Critic
from training.curriculum import choose, histogram, read_rates
from training.experience import Problem
from training.iterative import RewardLearner
from training.models import (
    end_token_ids,
    load_checkpoint,
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
from training.quantization import check_quantization
from training.rewards import Reward, RewardSum
from training.rewards.model import ModelReward, renderer_of
from training.rl import RLTrainer
from training.rollout.engines import build_engine
from training.rows import read_rows


def rl(stage: Stage) -> None:
    """Train on data/prepared/train.parquet and publish the policy with its history."""
    config, params = stage.params.rl, stage.params
    device = pick_device(params.device)
    check_quantization(config.lora, "rl.lora", device)
    check_quantization(config.critic_lora, "rl.critic_lora", device)
    set_threads(params.threads)
    folders, data = checkpoints(stage), stage.folder("prepare") / "train.parquet"
    start = folders["policy"]
    tokenizer = load_tokenizer(start)
    renderer = PromptRenderer(tokenizer, params.prompt)
    rows, curriculum = follow_curriculum(stage, read_rows(data, having="answer"))
    stage.run.input(data, "train", "training")
    stage.run.text(renderer.text(rows[0]["prompt"], rows[0]["context"]), "rendered_prompt.txt")
    problems = [
        Problem(
            row["prompt"],
            tuple(renderer.ids(row["prompt"], row["context"])),
            {name: value for name, value in row.items() if name != "prompt"},
        )
        for row in rows
    ]
    longest = max(len(problem.prompt_ids) for problem in problems) + config.max_completion_length
    for key in READ_THE_POLICYS_IDS:
        chosen = folders.get(key.removesuffix("_model"), start)
        if chosen != start:
            check_reading(params, key, chosen, tokenizer, longest)
    given: dict[str, Reward] = {}
    reward_model, learner = None, None
    if folder := folders.get("reward"):
        shows, own = renderer_of(load_tokenizer(folder), renderer)
        reward_model = load_reward_model(folder, device)
        reward_model.requires_grad_(config.iterative.reward_model_steps > 0)
        given["model"] = ModelReward(reward_model, shows, config.micro_batch_tokens, own)
        if config.iterative.reward_model_steps:
            learner = reward_learner(stage, reward_model, shows)
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
    sampler = policy.sampler() if config.one_step_off else None
    engine = build_engine(sampler or model, end_token_ids(model, tokenizer), longest, config)
    trainer = RLTrainer(
        policy,
        reference,
        engine,
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
        sampler=sampler,
    )
    came_from = {role: str(folder.relative_to(stage.root)) for role, folder in folders.items()}
    models = {
        "policy": model,
        "reference": reference or policy.kept or None,
        "reward": reward_model,
        "value": critic,
        "sampler": sampler,
    }
    stage.run.table("models", held(models, came_from))
    stage.run.metrics(curriculum)
    with closing(engine):
        history = trainer.train()
    metrics = {
        "first_reward": history[0]["reward"],
        "final_reward": history[-1]["reward"],
        "generated_tokens": sum(row["num_tokens"] for row in history),
    }
    with stage.publish(metrics | curriculum) as folder:
        policy.save(folder, start, tokenizer)
        (folder / "history.jsonl").write_text(history_text(history))
        if critic is not None:
            critic.save(folder / "critic", folders["value"])
        if learner is not None:
            save_model(learner.model, learner.renderer.tokenizer, folder / "reward")


def follow_curriculum(
    stage: Stage, rows: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The train problems that `rl.curriculum` leaves, in its order, and its counts as metrics; all of them where it is off."""
    config = stage.params.rl.curriculum
    if not config.enabled:
        return rows, {}
    if config.path is None:
        file = stage.folder("preferences") / "solve_rates.parquet"
    else:
        [file] = (found := local_files(stage, config.path)).values()
        checked_digest(config.path, found, config.sha256)
    rates = read_rates(file, config.path)
    stage.run.input(file, "solve_rates", "training")
    kept, counts = choose([row["id"] for row in rows], rates, config)
    shown = histogram([rates[row["id"]].rate for row in rows if row["id"] in rates])
    stage.run.text(shown + "\n", "solve_rates.txt")
    print(f"rl: {', '.join(f'{name} {number}' for name, number in counts.items())}; {shown}", flush=True)
    return [rows[i] for i in kept], {f"curriculum/{name}": float(number) for name, number in counts.items()}


def reward_learner(
    stage: Stage, model: transformers.PreTrainedModel, renderer: PromptRenderer
) -> RewardLearner:
    """What goes on training the reward model; its history is the pairs of stage `preferences`, where there are any."""
    params = stage.params
    pairs, file = [], stage.folder("preferences") / "train.parquet"
    if file.is_file():
        pairs = read_pairs(file)
        stage.run.input(file, "preferences", "training")
    grader = RewardSum([params.rewards.grader], None, params.rewards)
    return RewardLearner(model, renderer, grader, pairs, params.rl, params.reward_model, seed=params.seed)
