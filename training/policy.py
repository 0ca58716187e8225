"""The model being trained: full weights or LoRA adapters, and its frozen reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from training.config import LoraConfig
from training.randomness import derive_seed


class Policy:
    """A causal language model, or a reward model, with its trainable parameters.

    With LoRA the wrapped model shares the base model's weights, so switching the adapter off gives the
    reference without a second copy.
    """

    def __init__(self, model: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
        self._peft: Any = None
        if lora.enabled:
            self._peft = _with_adapters(model, lora, seed)
        self.model = model
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.kept = torch.nn.ParameterList()
        """What the adapters are in the reference, in the order of `parameters`; empty: the reference has none."""
        model.train()

    @property
    def has_adapters(self) -> bool:
        return self._peft is not None

    @contextmanager
    def without_adapters(self) -> Iterator[PreTrainedModel]:
        """The model as it was before training, while the block lasts."""
        with self._peft.disable_adapter():
            yield self.model

    def keep_adapters(self) -> dict[str, torch.nn.Parameter]:
        """Make a copy of the adapters the reference's from now on; returns it by the adapters' names."""
        copies = [torch.nn.Parameter(p.detach().clone(), False) for p in self.parameters.values()]
        self.kept = torch.nn.ParameterList(copies)
        return dict(zip(self.parameters, self.kept, strict=True))

    @contextmanager
    def as_reference(self) -> Iterator[PreTrainedModel]:
        """The model with the kept adapters, or with none where none were kept, while the block lasts.

        A gradient must not cross the block.
        """
        if not self.kept:
            with self.without_adapters() as model:
                yield model
            return
        trained = [p.data for p in self.parameters.values()]
        try:
            self._put([p.data for p in self.kept])
            yield self.model
        finally:
            self._put(trained)

    def merged(self) -> PreTrainedModel:
        """The plain model to save; adapters are merged into its weights. The policy is used up."""
        if self._peft is not None:
            return self._peft.merge_and_unload()
        return self.model

    def _put(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters.values(), values, strict=True):
            parameter.data = value


def _with_adapters(model: PreTrainedModel, lora: LoraConfig, seed: int) -> Any:
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    task = "SEQ_CLS" if hasattr(model, "score") else "CAUSAL_LM"  # a reward model's head is trained whole
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, "lora/init"))
        return get_peft_model(
            model,
            PeftLora(
                task_type=task,
                r=lora.r,
                lora_alpha=lora.alpha,  # type: ignore[arg-type]
                lora_dropout=lora.dropout,
                target_modules=lora.target_modules,
            ),
        )
