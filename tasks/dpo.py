"""Stage `dpo`: direct preference optimisation on pairs of completions, starting at the SFT model."""

from __future__ import annotations

from tasks.roles import held
from tasks.stage import Stage, resolve_model
from training.batches import Tree
from training.checkpoint import history_text
from training.dpo import evaluate_dpo, train_dpo, usable_pairs
from training.errors import BadInput
from training.models import load_model, load_tokenizer, pick_device, set_threads
from training.policy import Policy
from training.preferences import read_pairs
from training.prompts import PromptRenderer
from training.quantization import check_quantization


def dpo(stage: Stage) -> None:
    """Train on data/preferences/train.parquet and publish the policy with its history.

    The metrics hold the loss, accuracy and margin of the implicit reward on the pairs of validation.parquet.
    """
    config, params = stage.params.dpo, stage.params
    device = pick_device(params.device)
    check_quantization(config.lora, "dpo.lora", device)
    set_threads(params.threads)
    start = resolve_model(stage.folder("sft"))
    tokenizer = load_tokenizer(start)
    renderer = PromptRenderer(tokenizer, params.prompt)
    train, validation = (_read_pairs(stage, renderer, split) for split in ("train", "validation"))
    usable, held_out = (usable_pairs(pairs, config.max_length) for pairs in (train, validation))
    policy = Policy(load_model(start, device, config.lora.quantization), config.lora, params.seed)
    reference = None if policy.has_adapters else load_model(start, device)
    came_from = dict.fromkeys(("policy", "reference"), str(start.relative_to(stage.root)))
    stage.run.table("models", held({"policy": policy.model, "reference": reference}, came_from))
    pad_id = tokenizer.pad_token_id or 0
    history = train_dpo(
        policy,
        reference,
        usable,
        config,
        seed=params.seed,
        pad_id=pad_id,
        checkpoints=stage.scratch / "checkpoints",
        recorder=stage.run,
    )
    metrics = {
        "final_loss": history[-1]["loss"],
        "pairs": float(len(usable)),
        "dropped_too_long": float(len(train) - len(usable)),
        "validation_pairs": float(len(held_out)),
        "validation_dropped_too_long": float(len(validation) - len(held_out)),
    }
    if held_out:
        found = evaluate_dpo(policy, reference, held_out, config, pad_id=pad_id)
        metrics |= {
            "validation_loss": found["loss"],
            "validation_accuracy": found["rewards/accuracies"],
            "validation_margin": found["rewards/margins"],
        }
    with stage.publish(metrics) as folder:
        policy.save(folder, start, tokenizer)
        (folder / "history.jsonl").write_text(history_text(history))


def _read_pairs(stage: Stage, renderer: PromptRenderer, split: str) -> list[Tree]:
    path = stage.folder("preferences") / f"{split}.parquet"
    if not path.is_file():
        raise BadInput(
            f"{path}: missing; stage `preferences` writes the pairs, so `dpo` needs it switched on"
        )
    pairs = read_pairs(path)
    stage.run.input(path, split, "training" if split == "train" else "evaluation")
    if split == "train" and pairs:
        prompt = renderer.text(pairs[0].prompt, pairs[0].context)
        shown = f"chosen:\n{prompt}{pairs[0].chosen}\n\nrejected:\n{prompt}{pairs[0].rejected}"
        stage.run.text(shown, "rendered_prompt.txt")
    return [pair.tree(renderer) for pair in pairs]
