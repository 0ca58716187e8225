"""Frozen weights in 4 bits under trained adapters: QLoRA (Dettmers et al. 2023, arXiv:2305.14314)."""

from __future__ import annotations

import torch
import transformers
from transformers.utils import is_bitsandbytes_available

from training.config import LoraConfig
from training.errors import BadInput


def check_quantization(lora: LoraConfig, key: str, device: torch.device) -> None:
    """Raise BadInput, naming `key`, when `lora` asks for quantised weights and they can't be had here."""
    if lora.quantization is None or (device.type == "cuda" and is_bitsandbytes_available()):
        return
    lacking = "bitsandbytes is missing or too old" if device.type == "cuda" else f"device is {device.type}"
    raise BadInput(
        f"{key}.quantization = {lora.quantization!r}: {lacking}; it needs a CUDA GPU and `pip install bitsandbytes`; "
        "use null here"
    )


def four_bit() -> transformers.BitsAndBytesConfig:
    """NormalFloat4 with double quantisation; products are computed in bfloat16.

    The output layer, embeddings and norms stay as they are. peft's `prepare_model_for_kbit_training` is not needed:
    adapters freeze the rest themselves, and its casts and input gradients serve gradient checkpointing.
    """
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
