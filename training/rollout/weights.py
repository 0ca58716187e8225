"""The policy's weights as vLLM reads them: a folder that always holds the ones given last.

A policy with adapters gives its frozen weights once; after that only the adapter is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from training.errors import BadInput
from training.storage import write_json

WEIGHTS = "model.safetensors"
_BASE = ".base_layer."
_LORA = {".lora_A.default.": ".lora_A.", ".lora_B.default.": ".lora_B."}


class WeightFolder:
    """A model's folder, `model`, that an engine can start from, and its adapter's, if the policy has one.

    Every version of an adapter has a folder of its own, of which the last is kept.
    """

    def __init__(self, folder: Path, config: transformers.PreTrainedConfig, alpha: float) -> None:
        self.model = folder / "model"
        self.adapter: Path | None = None
        self.version = 0
        self._folder, self._alpha = folder, alpha
        config.save_pretrained(self.model)

    @property
    def weights(self) -> Path:
        """The file with the whole model's weights (without the adapter's)."""
        return self.model / WEIGHTS

    def put(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write the weights, by the names they have in transformers or under peft's adapters."""
        base, lora = split(named_tensors)
        self.version += 1
        if not (lora and self.weights.exists()):
            _write(base, self.weights)
        if lora:
            self._put_adapter(lora)

    def _put_adapter(self, lora: dict[str, torch.Tensor]) -> None:
        last, folder = self.adapter, self._folder / f"adapter-{self.version}"
        folder.mkdir()
        _write(
            {f"base_model.model.{name}": t for name, t in lora.items()}, folder / "adapter_model.safetensors"
        )
        write_json(
            folder / "adapter_config.json",
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": rank_of(lora),
                "lora_alpha": self._alpha,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in lora}),
            },
        )
        self.adapter = folder
        if last is not None:
            shutil.rmtree(last)


def split(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The whole model's tensors and the adapter's, by plain names (`...q_proj.weight`, `...q_proj.lora_A.weight`).

    Raises BadInput for what peft trains otherwise than by LoRA's two matrices on a linear layer.
    """
    base, lora = {}, {}
    for name, tensor in named_tensors:
        marker = next((m for m in _LORA if m in name), None)
        if marker is not None:
            lora[name.replace(marker, _LORA[marker])] = tensor
        elif ".lora_" in name or ".modules_to_save." in name:
            raise BadInput(
                f"rl.lora: {name} is no matrix of a linear layer's adapter, and vLLM can't take it; "
                "name linear layers in target_modules, or use engine native"
            )
        else:
            base[name.replace(_BASE, ".")] = tensor
    return base, lora


def rank_of(lora: dict[str, torch.Tensor]) -> int:
    """The rank of an adapter whose tensors `split` gave."""
    return next(tensor.shape[0] for name, tensor in lora.items() if ".lora_A." in name)


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Whole or not at all, in place of what was there."""
    temporary = path.with_suffix(".part")
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, temporary, metadata={"format": "pt"})
    temporary.replace(path)
