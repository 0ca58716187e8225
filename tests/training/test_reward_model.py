from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.training.conftest import ALPHABET, small_model
from training.batches import Tree, lay_out
from training.config import LoraConfig, OptimizerConfig, PromptConfig, RewardModelConfig
from training.errors import BadInput
from training.models import character_tokenizer, load_reward_model, new_reward_model, save_model
from training.policy import Policy
from training.preferences import Pair
from training.prompts import PromptRenderer
from training.recorder import NullRecorder
from training.reward_model import (
    ComparedPair,
    branch_scores,
    calibration,
    compared,
    held_out_metrics,
    score_branches,
    train_reward_model,
)
from training.rewards.model import ModelReward, renderer_of

CPU = torch.device("cpu")
PLUS, MINUS = 13, 14  # ids of two characters
PAIRS = [
    ComparedPair(Tree([3 + i % 7, 4], [[3 + i % 5, PLUS, 3 + i % 3, 1], [3 + i % 4, MINUS, 1]]), 0.5)
    for i in range(40)
]
TREES = [
    Tree([5, 6], [[7, 8, 1], [1], [9, 10, 11, 12]]),
    Tree([4], [[1, 7, 1, 1], []]),  # end tokens inside the text, and an empty completion
    Tree([3, 4, 5, 6, 7], [[8, 1]]),
]


@pytest.fixture
def start(tmp_path, tokenizer):
    """Folder of a small language model."""
    save_model(small_model(dtype=torch.float32), tokenizer, tmp_path / "start")
    return tmp_path / "start"


@pytest.fixture
def reward_model(start, tokenizer):
    return new_reward_model(start, tokenizer, CPU, seed=1)


def train(model, folder, pairs=PAIRS, lora=None, recorder=None, **settings):
    config = RewardModelConfig(
        **({"num_steps": 5, "batch_size": 8, "checkpoint_every": 2, "margin": True} | settings)
    )
    policy = Policy(model, lora or LoraConfig(), 1)
    history = train_reward_model(
        policy, pairs, config, seed=1, pad_id=0, checkpoints=folder, recorder=recorder or NullRecorder()
    )
    return policy, history


def sequences(trees):
    return [tree.prefix + branch for tree in trees for branch in tree.branches]


def test_the_score_is_that_of_the_last_real_token_whatever_the_batch(reward_model):
    """Against the head on plain, unpadded forward passes."""
    plain = torch.cat(
        [
            reward_model.score(reward_model.model(torch.tensor([ids])).last_hidden_state[0, -1])
            for ids in sequences(TREES)
        ]
    )
    for budget in (1, 20, 1000):
        torch.testing.assert_close(score_branches(reward_model, TREES, 0, budget), plain, rtol=0, atol=1e-6)
    alone = torch.cat([score_branches(reward_model, [tree], 0, 100) for tree in TREES])
    torch.testing.assert_close(alone, plain, rtol=0, atol=1e-6)


def test_scores_read_at_given_places_are_those_of_the_texts_cut_there(reward_model):
    places = [[0, 2], [0], [1, 3], [0, 1, 2, 3], [], [1]]
    branches = [(tree.prefix, branch) for tree in TREES for branch in tree.branches]
    cut = [
        Tree(prefix, [branch[: place + 1]])
        for (prefix, branch), own in zip(branches, places, strict=True)
        for place in own
    ]
    expected = score_branches(reward_model, cut, 0, 1)
    for budget in (1, 20, 1000):
        found = score_branches(reward_model, TREES, 0, budget, places)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pad", [0, 1, 9])
def test_what_stands_in_the_padding_never_matters(reward_model, pad):
    """Not even the end token does."""
    layout = lay_out([[tree] for tree in TREES], pad, CPU)
    unpadded = score_branches(reward_model, TREES, 0, 1)
    torch.testing.assert_close(branch_scores(reward_model, layout), unpadded, rtol=0, atol=1e-6)


def test_plain_transformers_reads_the_same_score_on_either_side_of_the_padding(reward_model):
    expected = score_branches(reward_model, TREES[:1], 0, 100)
    texts = sequences(TREES[:1])
    width = max(map(len, texts)) + 2
    right = torch.tensor([ids + [0] * (width - len(ids)) for ids in texts])
    left = torch.tensor([[0] * (width - len(ids)) + ids for ids in texts])
    for ids in (right, left):
        mask = (ids != 0).long()
        logits = reward_model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        torch.testing.assert_close(logits[:, 0], expected, rtol=0, atol=1e-5)


def test_where_padding_is_the_end_token_plain_transformers_refuses_to_guess(start, tokenizer):
    tokenizer.pad_token = tokenizer.eos_token
    model = new_reward_model(start, tokenizer, CPU, seed=1)
    ids = torch.tensor([[5, 6, 7, 1]])
    torch.testing.assert_close(model(ids).logits[0], score_branches(model, [Tree([5, 6], [[7, 1]])], 1, 9))
    with pytest.raises(ValueError, match="batch sizes > 1"):
        model(ids.repeat(2, 1))


def test_the_head_is_drawn_from_the_seed(start, tokenizer, reward_model):
    assert torch.equal(
        new_reward_model(start, tokenizer, CPU, seed=1).score.weight, reward_model.score.weight
    )
    assert not torch.equal(
        new_reward_model(start, tokenizer, CPU, seed=2).score.weight, reward_model.score.weight
    )


def test_one_step_equals_plain_torch(start, tokenizer, tmp_path):
    """Trees, masks and the mean over pairs against unpadded passes, the loss written out, and torch's AdamW."""
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="constant")
    ours, history = train(
        new_reward_model(start, tokenizer, CPU, seed=1),
        tmp_path / "c",
        pairs=PAIRS[:8],
        num_steps=1,
        optimizer=optimizer,
        center_rewards_coefficient=0.1,
        micro_batch_tokens=25,
    )
    theirs = new_reward_model(start, tokenizer, CPU, seed=1)
    losses = []
    for pair in PAIRS[:8]:
        chosen, rejected = (theirs(torch.tensor([ids])).logits[0, 0] for ids in sequences([pair.tree]))
        probability = torch.sigmoid(chosen - rejected - 0.5)
        losses.append(-probability.log() + 0.1 * (chosen + rejected) ** 2)
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.0).step()
    assert history[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert history[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for a, b in zip(ours.model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_steps_are_compared_where_both_have_one(tokenizer):
    """Two steps against three: after the first, and at the end; equal beginnings add nothing to the gradient."""
    renderer = PromptRenderer(tokenizer, PromptConfig(chat_template="none"))
    pair = Pair("1=", "2 3", "2 4 5", 0.0)
    assert compared(pair, renderer, "outcome", " ").places == ((3, 5),)  # the end tokens
    by_steps = compared(pair, renderer, "process", " ")
    assert by_steps.places == ((1, 1), (3, 5))  # "2 ", then the whole


def test_a_loss_over_steps_equals_plain_torch(reward_model, tokenizer, tmp_path):
    """Loss and gradient of the mean over places, then over pairs, from unpadded passes."""
    renderer = PromptRenderer(tokenizer, PromptConfig(chat_template="none"))
    texts = [("1=", "2 3", "4 5 6"), ("7=", "8", "9 1"), ("3=", "2 2 2", "2 2 3")]
    pairs = [compared(Pair(*text, 0.0), renderer, "process", " ") for text in texts]
    expected = torch.zeros(())
    for pair in pairs:
        chosen, rejected = pair.tree.branches
        of_pair = [
            -torch.nn.functional.logsigmoid(
                plain_score(reward_model, pair.tree.prefix + chosen[: c + 1])
                - plain_score(reward_model, pair.tree.prefix + rejected[: r + 1])
            )
            for c, r in pair.places
        ]
        expected = expected + torch.stack(of_pair).mean() / len(pairs)
    gradients = torch.autograd.grad(expected, list(reward_model.parameters()))
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    _, history = train(reward_model, tmp_path / "steps", pairs, num_steps=1, batch_size=3, margin=False)
    assert history[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert history[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def plain_score(model, ids):
    """The head on a plain forward pass, at the last token."""
    return model.score(model.model(torch.tensor([ids])).last_hidden_state[0, -1]).squeeze()


def test_a_separable_preference_is_learnt(reward_model, tmp_path):
    generator = torch.Generator().manual_seed(0)

    def digits(number):
        return (3 + torch.randint(0, 10, (number,), generator=generator)).tolist()

    pairs = [
        ComparedPair(Tree(digits(3), [[*digits(1 + i % 3), PLUS, 1], [*digits(1 + i % 2), MINUS, 1]]), 1.0)
        for i in range(120)
    ]
    settings = {"num_steps": 60, "batch_size": 16, "optimizer": OptimizerConfig(learning_rate=3e-3)}
    policy, history = train(reward_model, tmp_path / "c", pairs=pairs[:90], **settings)
    rewards = score_branches(policy.model, [pair.tree for pair in pairs[90:]], 0, 500).view(-1, 2)
    assert held_out_metrics(rewards)["accuracy"] > 0.9
    assert history[-1]["loss"] < history[0]["loss"] / 2


def test_a_killed_run_resumes_to_the_same_bytes(start, tokenizer, tmp_path):
    def fresh():
        return new_reward_model(start, tokenizer, CPU, seed=1)

    whole, history = train(fresh(), tmp_path / "a")

    class Killed(NullRecorder):
        def progress(self, step, total, **shown):
            if step == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(fresh(), tmp_path / "b", recorder=Killed())
    resumed, again = train(fresh(), tmp_path / "b")
    assert again == history
    assert all(
        torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    )


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(enabled=True, r=4)])
def test_the_saved_model_is_plain_transformers_with_the_same_scores(
    start, tokenizer, reward_model, tmp_path, lora
):
    head = reward_model.score.weight.detach().clone()
    policy, _ = train(reward_model, tmp_path / "c", lora=lora, optimizer=OptimizerConfig(learning_rate=1e-2))
    expected = score_branches(policy.model, TREES, 0, 100)
    if lora.enabled:
        trained = {name for name in policy.parameters if "lora_" not in name}
        assert [name.split(".")[0] for name in trained] == ["score"]
    save_model(policy.merged(), tokenizer, tmp_path / "saved")
    loaded = load_reward_model(tmp_path / "saved", CPU)
    torch.testing.assert_close(score_branches(loaded, TREES, 0, 100), expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(loaded.score.weight, head)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert plain.config.num_labels == 1
    assert [name for name in plain.state_dict() if "lora" in name] == []


def test_too_few_pairs_are_refused_with_the_numbers(reward_model, tmp_path):
    with pytest.raises(BadInput, match=r"reward_model.batch_size = 8.*only 3"):
        train(reward_model, tmp_path / "c", pairs=PAIRS[:3])


def test_calibration_by_hand():
    """Three pairs at σ(1) = 0.731, two of them right; one at σ(3) = 0.953, right; one tie, half right."""
    rewards = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 1.0], [3.0, 0.0], [0.5, 0.5]])
    result = calibration(rewards)
    tie, low, high = result["bins"]
    assert (tie["pairs"], tie["confidence"], tie["accuracy"]) == (1, 0.5, 0.5)
    assert (low["low"], low["high"], low["pairs"]) == (0.7, 0.75, 3)
    assert low["confidence"] == pytest.approx(0.731059, abs=1e-6)
    assert low["accuracy"] == pytest.approx(2 / 3)
    assert (high["high"], high["pairs"], high["accuracy"]) == (1.0, 1, 1.0)
    error = (3 * abs(2 / 3 - 0.731059) + abs(1 - 0.952574)) / 5
    assert result["expected_calibration_error"] == pytest.approx(error, abs=1e-6)
    metrics = held_out_metrics(rewards)
    assert metrics["accuracy"] == pytest.approx(3.5 / 5)
    assert metrics["margin"] == pytest.approx((1 + 1 - 1 + 3 + 0) / 5)
    assert metrics["mean_reward"] == pytest.approx(9 / 10)


def test_calibration_of_a_very_sure_model_stays_in_the_last_bin():
    [only] = calibration(torch.tensor([[1000.0, -1000.0], [0.0, 1000.0]]))["bins"]
    assert (only["low"], only["high"], only["accuracy"]) == (0.95, 1.0, 0.5)


def test_the_model_reward_scores_what_the_policy_sampled(reward_model, tokenizer):
    renderer = PromptRenderer(tokenizer, PromptConfig(chat_template="none"))
    reward = ModelReward(reward_model, renderer, 30)
    prompts, texts = ["1+1=", "1+1=", "2=", "1+1="], ["2", "33", "4", "5"]
    reasons = ["stop", "length", "stop", "stop"]
    ids = [
        [*tokenizer(t)["input_ids"], *([1] if r == "stop" else [])]
        for t, r in zip(texts, reasons, strict=True)
    ]
    sampled = reward(
        prompts=prompts, completions=texts, completion_ids=ids, finish_reason=reasons, answer=texts
    )
    assert sampled == reward(prompts=prompts, completions=texts, finish_reason=reasons)
    expected = [
        score_branches(reward_model, [Tree(renderer.ids(p), [i])], 0, 100).item()
        for p, i in zip(prompts, ids, strict=True)
    ]
    assert sampled == pytest.approx(expected, abs=1e-6)
    assert all(a != b for a, b in pairwise(sampled))


def test_the_model_reward_scores_every_step_at_its_last_token(reward_model, tokenizer):
    """Each as the reward model scores the text up to there; the last step's is the whole completion's score."""
    renderer = PromptRenderer(tokenizer, PromptConfig(chat_template="none"))
    reward = ModelReward(reward_model, renderer, 30)
    prompts, ids = ["1+1=", "1+1=", "2="], [renderer.completion_ids(t) for t in ("2 3 4", "33", "4 5")]
    columns = {"prompts": prompts, "completions": [""] * 3, "completion_ids": ids}
    ends = [[1, 3, 5], [2], [1, 3]]
    scores = reward(**columns, step_ends=ends)
    assert [len(own) for own in scores] == [3, 1, 2]
    assert [own[-1] for own in scores] == pytest.approx(reward(**columns), abs=1e-6)
    for i, own in enumerate(ends):
        for end, score in zip(own, scores[i], strict=True):
            alone = score_branches(
                reward_model, [Tree(renderer.ids(prompts[i]), [ids[i][: end + 1]])], 0, 100
            )
            assert score == pytest.approx(alone.item(), abs=1e-6)


TEMPLATE = (
    "{% for m in messages %}{{ m['role'][:1] + ':' + m['content'] + END }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (TEMPLATE.replace("END", "'<eos>\\n'"), "<eos>\n"),
        (TEMPLATE.replace("END", "''"), "<eos>"),  # closes nothing
        ("{% for m in messages %}[{{ m['content'] | upper }}]{% endfor %}", "<eos>"),  # can't be told
        ("none", "<eos>"),
    ],
)
def test_a_chat_template_says_how_a_turn_ends(tokenizer, template, end):
    assert PromptRenderer(tokenizer, PromptConfig(chat_template=template)).turn_end() == end


def test_a_reward_model_made_like_the_policy_is_shown_what_the_policy_sees(tokenizer):
    policy = PromptRenderer(tokenizer, PromptConfig(chat_template="none", system="s"))
    assert renderer_of(character_tokenizer(ALPHABET), policy) == (policy, False)


@pytest.mark.parametrize("change", ["alphabet", "template"])
def test_another_reward_model_has_its_own_renderer(tokenizer, change):
    policy = PromptRenderer(tokenizer, PromptConfig(chat_template="none", system="s"))
    other = character_tokenizer(ALPHABET + ("abc" if change == "alphabet" else ""))
    if change == "template":
        other.chat_template = TEMPLATE.replace("END", "'\\n'")
    renderer, own = renderer_of(other, policy)
    assert own
    assert renderer.tokenizer is other
    assert renderer.text("1") == ("s1" if change == "alphabet" else "s:s\nu:1\na:")
