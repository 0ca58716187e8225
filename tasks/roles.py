"""Which checkpoint each of RL's four models is: policy, reference, reward and value."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tasks.config import Params
from tasks.stage import Stage, resolve_model
from tasks.tracking import FURTHER_MODELS
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
    params: Params, key: str, folder: Path, tokenizer: PreTrainedTokenizerBase, longest: int = 0
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


def check_further_models(stage: Stage, tokenizer: PreTrainedTokenizerBase) -> None:
    """`check_reading` of models that are there before anything is trained, those of model.more."""
    for key in READ_THE_POLICYS_IDS:
        if (name := getattr(stage.params.rl, key)) in stage.params.model.more:
            check_reading(stage.params, key, stage.root / FURTHER_MODELS / name, tokenizer)
