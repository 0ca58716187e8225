"""Stage `preferences`: pairs of completions for `dpo` and `reward_model`, and solve rates for `rl`'s curriculum."""

from __future__ import annotations

from collections import Counter

from tasks.prepare import checked_digest, local_files
from tasks.stage import Stage, resolve_model
from training.curriculum import SolveRate, write_rates
from training.data.files import read_records
from training.data.sources import read_hub
from training.errors import BadInput
from training.models import (
    context_length,
    end_token_ids,
    load_model,
    load_tokenizer,
    pick_device,
    set_threads,
)
from training.preferences import (
    SPLITS,
    Pair,
    divide_pairs,
    pair_columns,
    pairs_from_rollouts,
    read_choices,
    write_pairs,
)
from training.prompts import PromptRenderer
from training.rewards import RewardSum
from training.rollout.native import NativeEngine
from training.rows import read_rows
from training.storage import write_json


def preferences(stage: Stage) -> None:
    """Publish train.parquet and validation.parquet; counts.json says where the pairs come from.

    Pairs made of rollouts come with solve_rates.parquet: how often each problem sampled was solved.
    """
    config = stage.params.preferences
    rates: list[SolveRate] = []
    if config.source == "rollouts":
        pairs, counts, rates = from_rollouts(stage)
    else:
        pairs, counts = from_choices(stage)
    splits = divide_pairs(pairs, config.validation)
    counts["duplicates"] = len(pairs) - sum(map(len, splits.values()))
    if not all(splits.values()):
        shown = ", ".join(f"{name} {number}" for name, number in counts.items())
        raise BadInput(
            f"preferences: {len(splits['train'])} pairs to train on and {len(splits['validation'])} held out, at least "
            f"one of each is needed ({shown}); give more rows, num_problems or num_samples, or another "
            f"preferences.validation than {config.validation}"
        )
    counts.update({f"pairs_{split}": len(splits[split]) for split in SPLITS})
    with stage.publish({name: float(number) for name, number in counts.items()}) as folder:
        for split in SPLITS:
            write_pairs(folder / f"{split}.parquet", splits[split])
        if rates:
            write_rates(folder / "solve_rates.parquet", rates)
        write_json(folder / "counts.json", {"source": config.source, "path": config.path, **counts})
    for split in SPLITS:
        stage.run.input(stage.output / f"{split}.parquet", split, split)
    columns = ("prompt", "chosen", "rejected", "margin")
    shown_pairs = [{name: getattr(pair, name) for name in columns} for pair in splits["train"][:32]]
    stage.run.table("pairs", shown_pairs)
    print(f"preferences: {', '.join(f'{name} {number}' for name, number in counts.items())}", flush=True)


def from_choices(stage: Stage) -> tuple[list[Pair], Counter[str]]:
    """People's choices, from files in the tree or its home, behind a URL, or from the hub."""
    config = stage.params.preferences
    path, columns = str(config.path), pair_columns(config)
    if config.source == "hub":
        records = read_hub(path, config.config, config.hub_split, str(config.revision), columns)
        return read_choices(records, config)
    files = local_files(stage, path)
    checked_digest(path, files, config.sha256)
    every = (record for name, file in files.items() for record in read_records(file, columns, name))
    return read_choices(every, config)


def from_rollouts(stage: Stage) -> tuple[list[Pair], Counter[str], list[SolveRate]]:
    """Completions of train problems, sampled from the SFT model and graded by `rewards.grader`."""
    params, config = stage.params, stage.params.preferences
    set_threads(params.threads)
    folder, data = resolve_model(stage.folder("sft")), stage.folder("prepare") / "train.parquet"
    rows = read_rows(data, having="answer")
    if config.num_problems is not None and config.num_problems > len(rows):
        raise BadInput(
            f"preferences.num_problems = {config.num_problems}: {data.name} holds {len(rows)} problems; "
            "ask for at most as many, or for all with null"
        )
    rows = rows[: config.num_problems]
    tokenizer = load_tokenizer(folder)
    renderer = PromptRenderer(tokenizer, params.prompt)
    longest = max(len(renderer.ids(row["prompt"], row["context"])) for row in rows)
    context = context_length(folder)
    if longest + config.max_completion_length > context:
        raise BadInput(
            f"preferences.max_completion_length = {config.max_completion_length}: with the longest prompt ({longest} "
            f"tokens) it exceeds the model's context of {context} tokens; at most {context - longest} fit"
        )
    stage.run.input(data, "train", "training")
    stage.run.text(renderer.text(rows[0]["prompt"], rows[0]["context"]), "rendered_prompt.txt")
    model = load_model(folder, pick_device(params.device))
    engine = NativeEngine(model, end_token_ids(model, tokenizer), config.batch_size)
    grader = RewardSum([params.rewards.grader], None, params.rewards)
    return pairs_from_rollouts(rows, engine, renderer, grader, config, params.seed, stage.run)
