"""Small untrained models in float32, and the log-probabilities that transformers gives."""

import torch
import transformers
from transformers import LlamaForCausalLM

from training.rollout.protocol import Completion, Request

LENGTH = 400
"""Context of the models, in tokens."""
PROMPTS = [tuple(3 + (7 * i + 5 * n) % 120 for i in range(length)) for n, length in enumerate((300, 140, 9))]
"""Two reach over a cache block of 128 tokens, one over two."""


def small_llama(seed: int = 0, tied: bool = False) -> LlamaForCausalLM:
    """Two layers, grouped-query attention, peaked enough that greedy decoding has no near ties."""
    config = transformers.LlamaConfig(
        vocab_size=150,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).float().eval()


def requests(per_prompt: int) -> list[Request]:
    return [Request(p, 2**62 + 100 * i + g) for i, p in enumerate(PROMPTS) for g in range(per_prompt)]


def logprobs(
    model: torch.nn.Module, prompt: tuple[int, ...], completion: Completion, temperature: float
) -> list[float]:
    """What `model` itself gives the completion's tokens, in one pass without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion.ids]])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(completion.ids)[:, None]
    return torch.log_softmax(logits.double() / temperature, -1).gather(-1, chosen).squeeze(-1).tolist()
