"""Which engine a recipe samples with."""

from __future__ import annotations

import transformers

from training.config import RLConfig
from training.rollout.installed import check_installed
from training.rollout.native import NativeEngine
from training.rollout.protocol import RolloutEngine


def build_engine(
    model: transformers.PreTrainedModel, end_ids: set[int], max_length: int, config: RLConfig
) -> RolloutEngine:
    """The engine of `rl.engine` for the policy `model`; `max_length` is the longest prompt with its completion, in tokens.

    It has the policy's weights after `load_weights`. Raises BadInput when it can't sample what the recipe asks for.
    """
    size = config.prompts_per_step * config.num_generations
    if config.engine == "native":
        return NativeEngine(model, end_ids, size)
    check_installed(config.engine)
    if config.engine == "vllm-server":
        from training.rollout.vllm_server import VLLMServerEngine

        return VLLMServerEngine(model, end_ids, config.vllm, config.lora)
    from training.rollout.vllm import VLLMEngine

    return VLLMEngine(model, end_ids, max_length, size, config.vllm, config.lora)
