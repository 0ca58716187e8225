import pytest
import torch

from training.batches import Tree, lay_out
from training.logprobs import token_logprobs
from training.rollout.native import NativeEngine, sample
from training.rollout.protocol import Request, Sampling

PROMPTS = [(3, 4, 5), (6,), (7, 8, 9, 10, 11)]


def requests(per_prompt: int = 6) -> list[Request]:
    return [Request(p, 100 * i + g) for i, p in enumerate(PROMPTS) for g in range(per_prompt)]


def test_logprobs_are_the_trainers(model, tokenizer):
    completions = NativeEngine(model, {1}).generate(requests(), Sampling(0.8, 12))
    trees = [Tree(list(p), [c.ids for c in completions[6 * i : 6 * i + 6]]) for i, p in enumerate(PROMPTS)]
    expected, _ = token_logprobs(model, lay_out([[t] for t in trees], 0, model.device), 0.8)
    got = torch.tensor([x for c in completions for x in c.logprobs], dtype=torch.float64)
    torch.testing.assert_close(got, expected.detach(), rtol=0, atol=1e-11)


def test_a_completion_depends_on_its_prompt_and_seed_only(model):
    together = NativeEngine(model, {1}).generate(requests(), Sampling(1.0, 12))
    one_by_one = [NativeEngine(model, {1}).generate([r], Sampling(1.0, 12))[0] for r in requests()]
    in_threes = NativeEngine(model, {1}, max_batch_size=3).generate(requests(), Sampling(1.0, 12))
    assert [c.ids for c in together] == [c.ids for c in one_by_one] == [c.ids for c in in_threes]
    assert len({tuple(c.ids) for c in together[:6]}) > 1, "samples of a group must differ"


def test_completions_end_with_the_end_token_or_are_truncated(model):
    completions = NativeEngine(model, {1, 2}).generate(requests(40), Sampling(1.0, 8))
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for c in completions:
        assert len(c.ids) == len(c.logprobs) <= 8
        assert (c.ids[-1] in {1, 2}) == (c.finish_reason == "stop")
        assert not {1, 2} & set(c.ids[:-1])
    assert any(len(c.ids) == 8 and c.finish_reason == "stop" for c in completions), (
        "an end token in the last place ends"
    )


def test_an_end_token_at_once_is_a_completion(model):
    everything = set(range(model.config.vocab_size))
    completions = NativeEngine(model, everything).generate(requests(2), Sampling(1.0, 5))
    assert all(len(c.ids) == 1 and c.finish_reason == "stop" for c in completions)


def test_greedy_equals_transformers(model, tokenizer):
    ours = NativeEngine(model, {1}).generate([Request(p, 0) for p in PROMPTS], Sampling(1.0, 10, greedy=True))
    for prompt, completion in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        assert theirs[0, len(prompt) :].tolist() == completion.ids


def test_samples_follow_the_tempered_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(200_000, 4)
    uniforms = torch.from_numpy(__import__("numpy").random.default_rng(7).random(200_000))
    tokens, logprobs = sample(logits, uniforms, Sampling(0.5, 1))
    expected = torch.softmax(logits[0] / 0.5, -1)
    observed = torch.bincount(tokens, minlength=4) / len(tokens)
    torch.testing.assert_close(observed, expected, rtol=0, atol=4e-3)  # 3.5 sigma of 200,000 draws
    torch.testing.assert_close(logprobs.exp(), expected[tokens])


@pytest.mark.parametrize(("top_p", "support"), [(0.6, {0}), (0.7, {0, 1}), (1.0, {0, 1, 2, 3})])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, support):
    logits = torch.tensor([[0.65, 0.2, 0.1, 0.05]]).log().expand(5_000, 4)
    uniforms = torch.linspace(0, 1, 5_000, dtype=torch.float64) * 0.999999
    tokens, _ = sample(logits, uniforms, Sampling(1.0, 1, top_p=top_p))
    assert set(tokens.tolist()) == support


def test_weights_are_taken_over(model):
    from tests.training.conftest import small_model

    other = small_model(seed=5)
    engine = NativeEngine(model, {1})
    engine.load_weights(other.named_parameters())
    ours = engine.generate(requests(1), Sampling(1.0, 6))
    assert [c.ids for c in ours] == [
        c.ids for c in NativeEngine(other, {1}).generate(requests(1), Sampling(1.0, 6))
    ]
