"""The models that learners hold: which checkpoint each of RL's four is, what each takes in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from tasks.config import Params
from tasks.stage import Stage, resolve_model
from tasks.tracking import FURTHER_MODELS
from training.critic import Critic
from training.errors import BadInput
from training.models import context_length, load_tokenizer

PUBLISHED_BY = {
    "base": "model",
    "sft": "sft",
    "dpo": "dpo",
    "reward_model": "reward_model",
    "stage": "reward_model",
}
"""The stage that publishes what a key of `rl` calls so; other names are of model.more."""
READ_THE_POLICYS_IDS = ("reference", "value_model")
"""Keys of `rl` whose models must have the policy's vocabulary."""


def checkpoints(stage: Stage) -> dict[str, Path]:
    """The folder with the weights of every model that RL loads, by role.

    `policy` is always there, `reference` with a KL penalty, `reward` with the reward `model`, `value` with gae.
    """
    config = stage.params.rl
    start = resolve_model(stage.folder("dpo"))

    def folder(name: str) -> Path:
        if name in ("start", "policy", "trunk"):
            return start
        if name in PUBLISHED_BY:
            return resolve_model(stage.folder(PUBLISHED_BY[name]))
        return stage.root / FURTHER_MODELS / name

    found = {"policy": start}
    if config.beta:
        found["reference"] = folder(config.reference)
    if "model" in config.reward_funcs:
        found["reward"] = folder(config.reward_model)
    if config.advantage_estimator == "gae":
        found["value"] = folder(config.value_model)
    return found


def check_reading(
    params: Params, key: str, folder: Path, tokenizer: transformers.PreTrainedTokenizerBase, longest: int = 0
) -> None:
    """Raise BadInput unless the model in `folder`, chosen by `rl.<key>`, can read the policy's ids.

    Its tokenizer must have the vocabulary of `tokenizer`, and its context hold `longest` tokens.
    """
    named = f"rl.{key} = {getattr(params.rl, key)!r}"
    ours, theirs = tokenizer.get_vocab(), load_tokenizer(folder).get_vocab()
    if ours != theirs:
        other = len(theirs.items() ^ ours.items())
        raise BadInput(
            f"{named}: it reads the policy's token ids, but its tokenizer has another vocabulary ({len(theirs)} tokens, "
            f"the policy's {len(ours)}, {other} entries differ); choose a model with the same tokenizer"
        )
    if (context := context_length(folder)) < longest:
        raise BadInput(
            f"{named}: its context of {context} tokens is shorter than the longest prompt with "
            f"rl.max_completion_length = {params.rl.max_completion_length}, {longest} tokens"
        )


def check_further_models(stage: Stage, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """`check_reading` of models that are there before anything is trained, those of model.more."""
    for key in READ_THE_POLICYS_IDS:
        if (name := getattr(stage.params.rl, key)) in stage.params.model.more:
            check_reading(stage.params, key, stage.root / FURTHER_MODELS / name, tokenizer)


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
                "trained": sum(p.numel() for p in tensors if p.requires_grad and name != "reference"),
                "weights_gib": sum(p.numel() * p.element_size() for p in tensors) / 2**30,
            }
        )
    return rows
