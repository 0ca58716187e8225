"""Small untrained models in float32, and what an engine's samples from them must be."""

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM

from training.rollout.native import NativeEngine
from training.rollout.protocol import Completion, Request, RolloutEngine, Sampling

LENGTH = 400
"""Context of the models, in tokens."""
PROMPTS = [tuple(3 + (7 * i + 5 * n) % 120 for i in range(length)) for n, length in enumerate((300, 140, 9))]
"""Two reach over a cache block of 128 tokens, one over two."""

ENDS = {1, 2, 3}
GREEDY = Sampling(1.0, 24, greedy=True)
TEMPERED = Sampling(0.7, 24)


def small_llama(seed: int = 0, tied: bool = False, vocab_size: int = 150) -> LlamaForCausalLM:
    """Two layers, grouped-query attention, peaked enough that greedy decoding has no near ties."""
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
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


def check_agrees(engine: RolloutEngine, model: transformers.PreTrainedModel) -> list[Completion]:
    """Greedy outputs equal the native engine's, log-probabilities of samples within 1e-4 nats, reasons right."""
    greedy = [Request(prompt, 0) for prompt in PROMPTS]
    ours = [c.ids for c in engine.generate(greedy, GREEDY)]
    assert ours == [c.ids for c in NativeEngine(model, ENDS).generate(greedy, GREEDY)]
    samples = engine.generate(requests(4), TEMPERED)
    for request, sample in zip(requests(4), samples, strict=True):
        assert sample.logprobs == pytest.approx(logprobs(model, request.prompt_ids, sample, 0.7), abs=1e-4)
        assert (sample.ids[-1] in ENDS) == (sample.finish_reason == "stop")
        assert not ENDS & set(sample.ids[:-1])
        assert len(sample.ids) <= 24
    assert {c.finish_reason for c in samples} == {"stop", "length"}
    return samples
