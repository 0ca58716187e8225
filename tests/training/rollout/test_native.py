import pytest
import torch
import transformers

from training.batches import Tree, lay_out
from training.logprobs import token_logprobs
from training.rollout.cache import ROOM, RoomyLayer, roomy_cache
from training.rollout.native import BLOCK, NativeEngine, sample
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


def test_a_draw_in_blocks_is_the_plain_inversion_of_the_distribution():
    """Vocabularies that fill their last block and that don't, flat and peaked, against one cumulative sum."""
    for size, scale in ((5, 1.0), (BLOCK, 3.0), (BLOCK + 1, 8.0), (3 * BLOCK - 7, 0.1)):
        logits = scale * torch.randn(
            64, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64
        )
        uniforms = torch.linspace(0, 1 - 2**-53, 64, dtype=torch.float64)
        plain = torch.softmax(logits / 0.7, -1).cumsum(-1)
        expected = torch.searchsorted(plain, uniforms[:, None], right=True).squeeze(-1).clamp(max=size - 1)
        tokens, logprobs = sample(logits, uniforms, Sampling(0.7, 1))
        assert tokens.tolist() == expected.tolist()
        wanted = torch.log_softmax(logits / 0.7, -1).gather(-1, tokens[:, None]).squeeze(-1)
        torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-12)


def test_a_token_without_probability_is_never_drawn():
    logits = torch.full((3, 2 * BLOCK), -torch.inf)
    logits[:, 7] = 0.0
    tokens, _ = sample(logits, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64), Sampling(1.0, 1))
    assert tokens.tolist() == [7, 7, 7]


def test_a_cache_with_room_holds_what_transformers_own_holds(model):
    """Through growth beyond the room, selections of rows, and a chunk of several tokens at once."""
    roomy, plain = roomy_cache(model.config), transformers.DynamicCache(config=model.config)
    assert {type(layer) for layer in roomy.layers} == {RoomyLayer}
    draw = torch.Generator().manual_seed(1)
    rows = 5
    for step, tokens in enumerate([9, *[1] * ROOM, 3, 1, 1]):
        keys, values = torch.randn(2, rows, 2, tokens, 4, generator=draw)
        for layer in range(len(plain.layers)):
            ours, theirs = (cache.update(keys, values, layer) for cache in (roomy, plain))
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        if step in (2, ROOM):
            kept = torch.tensor([0, 2, 3][: rows - 1])
            roomy.batch_select_indices(kept)
            plain.batch_select_indices(kept)
            rows = len(kept)
    assert roomy.get_seq_length() == plain.get_seq_length()


def test_weights_are_taken_over(model):
    from tests.training.conftest import small_model

    other = small_model(seed=5)
    engine = NativeEngine(model, {1})
    engine.load_weights(other.named_parameters())
    ours = engine.generate(requests(1), Sampling(1.0, 6))
    assert [c.ids for c in ours] == [
        c.ids for c in NativeEngine(other, {1}).generate(requests(1), Sampling(1.0, 6))
    ]
