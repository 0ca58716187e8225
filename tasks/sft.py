"""Stage `sft`: supervised fine-tuning of the base model on prompts with reference completions."""

from __future__ import annotations

from tasks.stage import Stage
from training.batches import Tree
from training.checkpoint import history_text
from training.models import load_model, load_tokenizer, pick_device, set_threads
from training.policy import Policy
from training.prompts import PromptRenderer
from training.quantization import check_quantization
from training.rows import read_rows
from training.sft import train_sft, usable_examples


def sft(stage: Stage) -> None:
    """Train on data/prepared/train.parquet and publish the model with its history."""
    config = stage.params.sft
    device = pick_device(stage.params.device)
    check_quantization(config.lora, "sft.lora", device)
    set_threads(stage.params.threads)
    base, data = stage.folder("model"), stage.folder("prepare") / "train.parquet"
    tokenizer = load_tokenizer(base)
    renderer = PromptRenderer(tokenizer, stage.params.prompt)
    rows = read_rows(data, having="completion")
    stage.run.input(data, "train", "training")
    first = rows[0]
    stage.run.text(
        renderer.text(first["prompt"], first["context"]) + first["completion"], "rendered_prompt.txt"
    )
    examples = [
        Tree(renderer.ids(row["prompt"], row["context"]), [renderer.completion_ids(row["completion"])])
        for row in rows
    ]
    usable = usable_examples(examples, config.max_length)
    policy = Policy(load_model(base, device, config.lora.quantization), config.lora, stage.params.seed)
    history = train_sft(
        policy,
        usable,
        config,
        seed=stage.params.seed,
        pad_id=tokenizer.pad_token_id or 0,
        checkpoints=stage.scratch / "checkpoints",
        recorder=stage.run,
    )
    metrics = {
        "final_loss": history[-1]["loss"],
        "examples": float(len(usable)),
        "dropped_too_long": float(len(examples) - len(usable)),
    }
    with stage.publish(metrics) as folder:
        policy.save(folder, base, tokenizer)
        (folder / "history.jsonl").write_text(history_text(history))
