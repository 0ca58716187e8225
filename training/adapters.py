"""Adapters published without the model that they belong to, and put on it again.

A folder of one holds peft's adapter_model.safetensors and adapter_config.json, and base.json, which names the
model's folder, relative to its own, with the digest of that folder's manifest. That model may be an adapter too.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.errors import BadInput
from training.storage import MANIFEST, read_json, sha256_file, write_json

if (
    TYPE_CHECKING
):  # torch and its like take seconds, and a stage that is switched off only asks what a folder holds
    import transformers

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BASE = "base.json"


def is_adapter(folder: Path) -> bool:
    """Whether a model's folder holds an adapter alone."""
    return (folder / CONFIG).is_file()


def base_of(folder: Path) -> Path:
    """The folder of the model that the adapter in `folder` belongs to.

    Raises BadInput when that model is gone or is no longer the one that the adapter was trained on.
    """
    try:
        named = read_json(folder / BASE)
    except FileNotFoundError:
        raise BadInput(
            f"{folder}: holds an adapter but no {BASE} that names its model; publish the adapter merged"
        ) from None
    return unchanged(Path(os.path.normpath(folder / named["model"])), named["digest"], folder / BASE)


def unchanged(folder: Path, digest: str, named_by: Path) -> Path:
    """`folder`, if its manifest still has the digest by which the file `named_by` names it; BadInput otherwise."""
    manifest = folder / MANIFEST
    if not manifest.is_file() or sha256_file(manifest) != digest:
        raise BadInput(f"{named_by}: {folder} has changed since; run the pipeline again so that both agree")
    return folder


def whole_model(folder: Path) -> Path:
    """`folder` if it holds a whole model, else the whole model at the bottom of its adapters, all checked."""
    while is_adapter(folder):
        folder = base_of(folder)
    return folder


def save_adapter(peft: Any, folder: Path) -> None:
    """Write a peft model's adapter, with what else it trains, so that equal weights give equal bytes."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    config = copy.copy(peft.peft_config["default"])
    config.target_modules = sorted(
        config.target_modules
    )  # peft keeps a set, whose order is another each time
    config.base_model_name_or_path = None
    config.inference_mode = True
    config.save_pretrained(str(folder))
    tensors = get_peft_model_state_dict(peft, save_embedding_layers=False)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})


def name_base(folder: Path, base: Path) -> None:
    """Say in `folder` that its adapter belongs to the model in `base`, a published folder."""
    named = os.path.relpath(base, folder)
    write_json(folder / BASE, {"model": named, "digest": sha256_file(base / MANIFEST)})


def attach(model: transformers.PreTrainedModel, folder: Path) -> transformers.PreTrainedModel:
    """`model` with the adapter in `folder` merged into its weights, all of which can be trained again.

    The head that a reward model's adapter carries takes the place of the model's own; a policy's adapter fits any
    head. Raises BadInput when the adapter does not fit the model.
    """
    import torch
    from peft import LoraConfig, PeftModel

    config = LoraConfig.from_pretrained(str(folder))
    config.task_type = None  # the model's own class may be another than that of the model it was trained in
    with torch.random.fork_rng():
        try:
            adapted = PeftModel.from_pretrained(
                model, str(folder), config=config, torch_device=str(model.device)
            )
        except (RuntimeError, ValueError) as error:  # other shapes, or layers that are not there
            raise BadInput(f"{folder}: the adapter does not fit its model: {error}") from None
    merged: transformers.PreTrainedModel = adapted.merge_and_unload()
    return merged.requires_grad_(True)
