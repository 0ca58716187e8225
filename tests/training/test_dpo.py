import json
import math

import pytest
import torch
from pydantic import ValidationError
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.training.conftest import small_model
from training.batches import Tree
from training.config import DPOConfig, LoraConfig, OptimizerConfig
from training.dpo import completion_logprobs, evaluate_dpo, train_dpo, usable_pairs
from training.errors import BadInput
from training.policy import Policy
from training.recorder import NullRecorder

PAIRS = [
    Tree([3 + i % 5, 4, 7 + i % 3][: 2 + i % 2], [[5 + i % 7, 6, 1], [8, 9 + i % 4, 10, 3, 1][i % 3 :]])
    for i in range(12)
]
LORA = LoraConfig(enabled=True, r=4)
SMOOTH_STEP = OptimizerConfig(learning_rate=1e-2, schedule="constant", weight_decay=0.1, eps=1.0)
"""With a large eps AdamW's first step depends on the gradient's size, not on its sign alone."""


def train(model, tmp_path, pairs=PAIRS, reference=None, lora=None, recorder=None, **settings):
    config = DPOConfig(**({"num_steps": 4, "batch_size": 6, "checkpoint_every": 100} | settings))
    policy = Policy(model, lora or LoraConfig(), 1)
    return train_dpo(
        policy,
        reference,
        pairs,
        config,
        seed=1,
        pad_id=0,
        checkpoints=tmp_path,
        recorder=recorder or NullRecorder(),
    )


def plain_logprob(model, prompt, completion):
    """Sum of a completion's log-probabilities, the sequence alone in its batch."""
    ids = torch.tensor([prompt + completion])
    logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()


@pytest.fixture
def float64_norms(monkeypatch):
    """transformers' RMSNorm computes in float32 whatever the model's dtype: half of a gradient's digits."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


@pytest.mark.usefixtures("float64_norms")
@pytest.mark.parametrize(
    ("loss_type", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0)], ids=str
)
def test_one_step_equals_plain_torch(tmp_path, loss_type, smoothing):
    """Trees, packing and the mean against unpacked sequences, the formulas spelled out, torch's AdamW."""
    ours, theirs, reference = small_model(), small_model(), small_model(seed=1)
    history = train(
        ours, tmp_path, reference=reference, num_steps=1, batch_size=12, beta=0.4, loss_type=loss_type,
        label_smoothing=smoothing, optimizer=SMOOTH_STEP, micro_batch_tokens=25,
    )  # fmt: skip
    losses, sums, rewards = [], [], []
    for pair in PAIRS:
        logprobs = [plain_logprob(theirs, pair.prefix, branch) for branch in pair.branches]
        with torch.no_grad():
            ref = [plain_logprob(reference, pair.prefix, branch) for branch in pair.branches]
        ratios = [a - b for a, b in zip(logprobs, ref, strict=True)]
        if loss_type == "ipo":
            per_token = [r / len(branch) for r, branch in zip(ratios, pair.branches, strict=True)]
            losses.append((per_token[0] - per_token[1] - 1 / 0.8) ** 2)
        else:
            p = 1 / (1 + torch.exp(-0.4 * (ratios[0] - ratios[1])))
            losses.append(-(1 - smoothing) * p.log() - smoothing * (1 - p).log())
        sums.append([x.item() for x in logprobs])
        rewards.append([0.4 * r.item() for r in ratios])
    loss = sum(losses) / len(PAIRS)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    torch.optim.AdamW(theirs.parameters(), lr=1e-2, eps=1.0, weight_decay=0.1).step()

    def mean(values):
        return pytest.approx(sum(values) / len(PAIRS), rel=1e-10)

    row = history[0]
    assert row["loss"] == pytest.approx(loss.item(), rel=1e-10)
    assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-10)
    assert row["logps/chosen"] == mean(a for a, _ in sums)
    assert row["logps/rejected"] == mean(b for _, b in sums)
    assert row["rewards/chosen"] == mean(a for a, _ in rewards)
    assert row["rewards/rejected"] == mean(b for _, b in rewards)
    assert row["rewards/margins"] == mean(a - b for a, b in rewards)
    assert 0 < row["rewards/accuracies"] < 1
    assert row["rewards/accuracies"] == mean(a > b for a, b in rewards)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for a, b in zip(reference.parameters(), small_model(seed=1).parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.grad is None


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_any_split_into_micro_batches_is_the_same_step(tmp_path, loss_type):
    models, rows = [], []
    for budget in (1, 20, 31, 10_000):
        models.append(small_model())
        rows += train(
            models[-1], tmp_path / str(budget), reference=small_model(seed=1), num_steps=1, batch_size=12,
            loss_type=loss_type, optimizer=SMOOTH_STEP, micro_batch_tokens=budget,
        )  # fmt: skip
    for model, row in zip(models[1:], rows[1:], strict=True):
        assert row == pytest.approx(rows[0], rel=1e-10)
        for a, b in zip(model.parameters(), models[0].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_run_killed_anywhere_resumes_to_the_same_bytes(tmp_path, lora):
    settings = {"num_steps": 4, "checkpoint_every": 1, "optimizer": OptimizerConfig(learning_rate=1e-2)}

    def start(folder, recorder=None):
        model = small_model(dtype=torch.float32)
        reference = None if lora else small_model(dtype=torch.float32)
        history = train(model, folder, reference=reference, lora=lora, recorder=recorder, **settings)
        return history, list(model.parameters())

    history, whole = start(tmp_path / "whole")
    for stop in range(1, 5):

        class Killed(NullRecorder):
            def progress(self, step, total, stop=stop, **shown):
                if step == stop:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            start(tmp_path / str(stop), Killed())
        resumed_history, resumed = start(tmp_path / str(stop))
        assert resumed_history == history
        assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_lora_starts_at_its_reference_and_learns(tmp_path):
    model = small_model(dtype=torch.float32)
    before = {n: p.clone() for n, p in model.named_parameters()}
    history = train(model, tmp_path, lora=LORA, optimizer=OptimizerConfig(learning_rate=1e-2), num_steps=8)
    first = history[0]
    assert [first[f"rewards/{n}"] for n in ("chosen", "rejected", "margins", "accuracies")] == [0, 0, 0, 0]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["grad_norm"] > 0
    assert history[-1]["rewards/margins"] > 0
    after = {n.replace(".base_layer", ""): p for n, p in model.named_parameters()}
    assert all(torch.equal(after[n], p) for n, p in before.items())


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_a_separable_preference_carries_over_to_held_out_pairs(tmp_path, loss_type):
    """Token 5 is preferred over token 6, after prompts that were never seen."""
    pairs = [Tree([3 + a, 7 + b], [[5, 1], [6, 6, 1]]) for a in range(8) for b in range(6)]
    train_pairs, held_out = pairs[::2], pairs[1::2]
    model, reference = small_model(dtype=torch.float32), small_model(dtype=torch.float32)
    config = DPOConfig(loss_type=loss_type)
    before = evaluate_dpo(Policy(model, LoraConfig(), 1), reference, held_out, config, pad_id=0)
    assert before["rewards/margins"] == 0
    train(
        model, tmp_path, train_pairs, reference, num_steps=15, loss_type=loss_type,
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )  # fmt: skip
    policy = Policy(model, LoraConfig(), 1)
    after = evaluate_dpo(policy, reference, held_out, config, pad_id=0)
    assert after["rewards/accuracies"] == 1
    assert after["loss"] < before["loss"]
    assert after["logps/chosen"] - after["logps/rejected"] > before["logps/chosen"] - before["logps/rejected"]
    turned = [Tree(pair.prefix, pair.branches[::-1]) for pair in held_out]
    assert evaluate_dpo(policy, reference, turned, config, pad_id=0)["rewards/accuracies"] == 0
    assert not model.training


def test_completions_are_summed_or_averaged_over_their_own_tokens():
    pairs = [Tree([3], [[4], [5, 6]]), Tree([3, 3], [[4, 5, 6], [7]])]
    tokens = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0])
    chosen, rejected = completion_logprobs(tokens, pairs)
    assert (chosen.tolist(), rejected.tolist()) == ([-1, -15], [-5, -7])
    chosen, rejected = completion_logprobs(tokens, pairs, average=True)
    assert (chosen.tolist(), rejected.tolist()) == ([-1, -5], [-2.5, -7])


def test_too_few_pairs_are_refused_with_the_numbers(tmp_path):
    with pytest.raises(BadInput, match=r"dpo.batch_size = 6.*only 3"):
        train(small_model(), tmp_path, pairs=PAIRS[:3], reference=small_model())


def test_full_weights_without_a_reference_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs a reference"):
        train(small_model(), tmp_path)


def test_without_held_out_pairs_there_are_no_metrics():
    assert evaluate_dpo(Policy(small_model(), LoraConfig(), 1), None, [], DPOConfig(), pad_id=0) == {}


def test_a_pair_with_a_long_side_is_left_out_whole():
    fits = Tree([3, 4], [[4, 5, 1], [4, 1]])
    assert usable_pairs([fits, Tree([3, 4], [[4, 1], [4, 5, 6, 1]]), Tree([3] * 4, fits.branches)], 5) == [
        fits
    ]


def test_smoothing_with_ipo_is_refused():
    with pytest.raises(ValidationError, match=r"label_smoothing 0\.1 goes with loss_type sigmoid"):
        DPOConfig(loss_type="ipo", label_smoothing=0.1)


def test_history_is_plain_json(tmp_path):
    reference = small_model(dtype=torch.float32)
    json.dumps(train(small_model(dtype=torch.float32), tmp_path, reference=reference), allow_nan=False)
