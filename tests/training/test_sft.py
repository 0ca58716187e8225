import json

import pytest
import torch

from tests.training.conftest import small_model
from training.batches import Tree
from training.config import LoraConfig, OptimizerConfig, SFTConfig
from training.errors import BadInput
from training.optimizer import learning_rate
from training.policy import Policy
from training.recorder import NullRecorder
from training.sft import train_sft, usable_examples

EXAMPLES = [Tree([3 + i % 5, 4], [[5 + i % 7, 6, 1]]) for i in range(12)]


def train(model, tmp_path, examples=EXAMPLES, **settings):
    config = SFTConfig(**({"num_steps": 4, "batch_size": 6, "checkpoint_every": 100} | settings))
    policy = Policy(model, LoraConfig(), 1)
    return train_sft(
        policy, examples, config, seed=1, pad_id=0, checkpoints=tmp_path, recorder=NullRecorder()
    )


def test_one_step_equals_plain_torch(tmp_path):
    """Packing, masks and the token mean against unpacked cross-entropy and torch's AdamW."""
    ours, theirs = small_model(dtype=torch.float32), small_model(dtype=torch.float32)
    optimizer_config = OptimizerConfig(learning_rate=1e-3, schedule="constant", weight_decay=0.1)
    history = train(
        ours, tmp_path, num_steps=1, batch_size=12, optimizer=optimizer_config, micro_batch_tokens=17
    )
    losses = []
    for tree in EXAMPLES:
        ids = torch.tensor([tree.prefix + tree.branches[0]])
        labels = ids.clone()
        labels[:, : len(tree.prefix)] = -100
        logits = theirs(input_ids=ids).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum"))
    loss = sum(losses) / 36
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.1).step()
    assert history[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert history[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_end_token_is_learnt(tmp_path):
    model = small_model(dtype=torch.float32)
    train(model, tmp_path, num_steps=60, optimizer=OptimizerConfig(learning_rate=5e-3))
    tree = EXAMPLES[0]
    logits = model(input_ids=torch.tensor([tree.prefix + tree.branches[0][:-1]])).logits[0, -1]
    assert logits.argmax() == 1


def test_a_killed_run_resumes_to_the_same_bytes(tmp_path):
    whole, resumed = small_model(dtype=torch.float32), small_model(dtype=torch.float32)
    history = train(whole, tmp_path / "a", num_steps=5, checkpoint_every=2)

    class Killed(NullRecorder):
        def progress(self, step, total, **shown):
            if step == 5:
                raise KeyboardInterrupt

    config = SFTConfig(num_steps=5, batch_size=6, checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        train_sft(
            Policy(resumed, LoraConfig(), 1),
            EXAMPLES,
            config,
            seed=1,
            pad_id=0,
            checkpoints=tmp_path / "b",
            recorder=Killed(),
        )
    fresh = small_model(dtype=torch.float32)
    assert train(fresh, tmp_path / "b", num_steps=5, checkpoint_every=2) == history
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), fresh.parameters(), strict=True))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, capsys):
    whole, fresh = small_model(dtype=torch.float32), small_model(dtype=torch.float32)
    history = train(whole, tmp_path, num_steps=5, checkpoint_every=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000004"]
    state = tmp_path / "step-000004" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-10])
    assert train(fresh, tmp_path, num_steps=5, checkpoint_every=2) == history
    assert "step-000004" in capsys.readouterr().out
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), fresh.parameters(), strict=True))


def test_too_few_examples_are_refused_with_the_numbers(tmp_path):
    with pytest.raises(BadInput, match=r"sft.batch_size = 6.*only 3"):
        train(small_model(), tmp_path, examples=EXAMPLES[:3])


def test_long_examples_are_left_out_whole():
    assert usable_examples([Tree([3], [[4, 1]]), Tree([3] * 9, [[4, 1]])], 5) == [Tree([3], [[4, 1]])]


@pytest.mark.parametrize(("schedule", "expected"), [("constant", 1.0), ("linear", 0.5), ("cosine", 0.5)])
def test_schedule_halfway(schedule, expected):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=2)
    assert learning_rate(config, 0, 12) == 0.5
    assert learning_rate(config, 2, 12) == 1.0
    assert learning_rate(config, 7, 12) == pytest.approx(expected)


def test_history_is_plain_json(tmp_path):
    json.dumps(train(small_model(dtype=torch.float32), tmp_path), allow_nan=False)
