"""The model being trained: full weights or LoRA adapters, and its frozen reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from training.adapters import attach, name_base, save_adapter
from training.config import LoraConfig
from training.models import load_checkpoint, new_reward_model
from training.randomness import derive_seed


class Policy:
    """A causal language model, a reward model, or a value model's transformer, with its trainable parameters.

    With LoRA the wrapped model shares the base model's weights, so switching the adapter off gives the
    reference without a second copy.
    """

    def __init__(self, model: transformers.PreTrainedModel, lora: LoraConfig, seed: int) -> None:
        self.lora = lora
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
    def without_adapters(self) -> Iterator[transformers.PreTrainedModel]:
        """The model as it was before training, while the block lasts."""
        with self._peft.disable_adapter():
            yield self.model

    def keep_adapters(self) -> dict[str, torch.nn.Parameter]:
        """Make a copy of the adapters the reference's from now on; returns it by the adapters' names."""
        copies = [torch.nn.Parameter(p.detach().clone(), False) for p in self.parameters.values()]
        self.kept = torch.nn.ParameterList(copies)
        return dict(zip(self.parameters, self.kept, strict=True))

    @contextmanager
    def as_reference(self) -> Iterator[transformers.PreTrainedModel]:
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

    def sampler(self) -> transformers.PreTrainedModel:
        """A frozen copy of the model as it is now, adapters included, that is sampled from while this one changes."""
        return copy.deepcopy(self.model).requires_grad_(False).eval()

    def merged(self) -> transformers.PreTrainedModel:
        """The plain model to save; adapters are merged into its weights. The policy is used up."""
        if self._peft is not None:
            return self._peft.merge_and_unload()
        return self.model

    def save(self, folder: Path, start: Path, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        """Write the model with its tokenizer, whole or as adapters to the model in `start`. It is used up."""
        cpu = torch.device("cpu")

        def plain() -> transformers.PreTrainedModel:
            if hasattr(self.model, "score"):
                return new_reward_model(start, tokenizer, cpu, seed=0)
            return load_checkpoint(start, cpu)

        self.write(folder, start, plain)
        tokenizer.save_pretrained(folder)

    def write(self, folder: Path, start: Path, plain: Callable[[], transformers.PreTrainedModel]) -> None:
        """`save` without a tokenizer. Adapters on 4-bit weights are merged into those of `plain()`, unquantised."""
        if self.lora.output == "adapter":
            save_adapter(self._peft, folder)
            name_base(folder, start)
        elif self.lora.quantization is None:
            self.merged().save_pretrained(folder)
        else:
            with TemporaryDirectory() as adapter:
                save_adapter(self._peft, Path(adapter))
                attach(plain(), Path(adapter)).save_pretrained(folder)

    def _put(self, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters.values(), values, strict=True):
            parameter.data = value


def _with_adapters(model: transformers.PreTrainedModel, lora: LoraConfig, seed: int) -> Any:
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    task = "FEATURE_EXTRACTION" if model.get_output_embeddings() is None else "CAUSAL_LM"
    if hasattr(model, "score"):
        task = "SEQ_CLS"  # a reward model's head is trained whole
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
