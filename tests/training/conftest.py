"""A small untrained Llama in float64, where rounding can't hide a mistake."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from training.models import character_tokenizer

ALPHABET = "0123456789+-= "


def small_model(seed: int = 0, tied: bool = True, dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """Two layers, grouped-query attention, vocabulary of the character tokenizer."""
    tokenizer = character_tokenizer(ALPHABET)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).to(dtype)


@pytest.fixture
def model() -> LlamaForCausalLM:
    return small_model().eval()


@pytest.fixture
def tokenizer():
    return character_tokenizer(ALPHABET)
