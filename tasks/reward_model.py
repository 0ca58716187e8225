"""Stage `reward_model`: a scalar reward learnt from preference pairs, measured on held-out ones."""

from __future__ import annotations

from tasks.plots import plot_calibration
from tasks.stage import Stage, resolve_model
from training.checkpoint import history_text
from training.errors import BadInput
from training.models import load_tokenizer, new_reward_model, pick_device, set_threads
from training.policy import Policy
from training.preferences import SPLITS, read_pairs
from training.prompts import PromptRenderer
from training.quantization import check_quantization
from training.reward_model import (
    calibration,
    compared,
    held_out_metrics,
    score_branches,
    train_reward_model,
)
from training.storage import write_json


def reward_model(stage: Stage) -> None:
    """Train on data/preferences/train.parquet; publish the model, its history and its calibration."""
    config, seed = stage.params.reward_model, stage.params.seed
    device = pick_device(stage.params.device)
    check_quantization(config.lora, "reward_model.lora", device)
    set_threads(stage.params.threads)
    start = resolve_model(stage.folder("model" if config.init == "base" else "sft"))
    tokenizer = load_tokenizer(start)
    renderer = PromptRenderer(tokenizer, stage.params.prompt)
    files = {split: stage.folder("preferences") / f"{split}.parquet" for split in SPLITS}
    read = {split: read_pairs(file) for split, file in files.items()}
    for split, file in files.items():
        stage.run.input(file, split, "training" if split == "train" else "evaluation")
    first = read["train"][0]
    stage.run.text(renderer.text(first.prompt, first.context) + first.chosen, "rendered_prompt.txt")
    separator = stage.params.rewards.steps.separator
    both = {
        split: [compared(pair, renderer, config.supervision, separator) for pair in pairs]
        for split, pairs in read.items()
    }
    usable = {
        split: [pair for pair in pairs if pair.longest <= config.max_length] for split, pairs in both.items()
    }
    if not usable["validation"]:
        raise BadInput(
            f"reward_model.max_length = {config.max_length}: none of {len(both['validation'])} held-out pairs is as short"
        )
    model = new_reward_model(start, tokenizer, device, seed, config.lora.quantization)
    policy = Policy(model, config.lora, seed)
    pad_id = tokenizer.pad_token_id or 0
    history = train_reward_model(
        policy,
        usable["train"],
        config,
        seed=seed,
        pad_id=pad_id,
        checkpoints=stage.scratch / "checkpoints",
        recorder=stage.run,
    )
    held_out = [pair.tree for pair in usable["validation"]]
    rewards = score_branches(policy.model, held_out, pad_id, config.micro_batch_tokens).view(-1, 2)
    calibrated = calibration(rewards)
    metrics = {f"eval_{name}": value for name, value in held_out_metrics(rewards).items()} | {
        "eval_calibration_error": calibrated["expected_calibration_error"],
        "final_loss": history[-1]["loss"],
        **{f"pairs_{split}": float(len(pairs)) for split, pairs in usable.items()},
        "dropped_too_long": float(sum(len(both[split]) - len(usable[split]) for split in SPLITS)),
    }
    with stage.publish(metrics) as folder:
        policy.save(folder, start, tokenizer)
        (folder / "history.jsonl").write_text(history_text(history))
        write_json(folder / "calibration.json", calibrated)
        plot_calibration(folder / "calibration.png", "Reward model: calibration", calibrated["bins"])
    stage.run.artifact(stage.output / "calibration.png")
    print(
        f"reward_model: accuracy {metrics['eval_accuracy']:.3f} on {len(held_out)} held-out pairs, "
        f"calibration error {metrics['eval_calibration_error']:.3f}",
        flush=True,
    )
