"""The loop as a whole against a plain, unoptimised step, and the laws every step keeps."""

import dataclasses

import pytest
import torch

from tests.training.conftest import small_model
from training.config import LoraConfig, OptimizerConfig, PromptConfig, RewardsConfig, RLConfig, StepsConfig
from training.errors import BadInput
from training.experience import Problem
from training.policy import Policy
from training.prompts import PromptRenderer
from training.recorder import NullRecorder
from training.rewards import RewardSum
from training.rl import RLTrainer
from training.rollout.native import NativeEngine


def digit_sum(prompts, completions, **columns):
    """Spread in every group: the sum of the digits written."""
    return [float(sum(int(c) for c in text if c.isdigit())) for text in completions]


def make(
    tokenizer,
    tmp_path,
    model=None,
    reference=None,
    recorder=None,
    reward=None,
    lora=None,
    problems=8,
    critic=None,
    separator="\n",
    **settings,
):
    model = model or small_model()
    defaults = {
        "num_steps": 3,
        "prompts_per_step": 2,
        "num_generations": 4,
        "max_completion_length": 5,
        "checkpoint_every": 100,
        "optimizer": OptimizerConfig(learning_rate=1e-3, schedule="constant"),
    }
    config = RLConfig(**(defaults | settings))
    renderer = PromptRenderer(tokenizer, PromptConfig(chat_template="none"))
    policy = Policy(model, lora or LoraConfig(), 1)
    rewards = RewardSum(["math"], None, RewardsConfig(steps=StepsConfig(separator=separator)))
    rewards.functions = [reward or digit_sum]
    texts = [f"{i} + {i + 1} =" for i in range(problems)]
    rows = [Problem(t, tuple(renderer.ids(t)), {"answer": "1"}) for t in texts]
    sampler = policy.sampler() if config.one_step_off else None
    engine = NativeEngine(sampler or model, {tokenizer.eos_token_id})
    return RLTrainer(
        policy, reference, engine, rewards, renderer, rows, config,
        seed=1, pad_id=0, checkpoints=tmp_path, recorder=recorder or NullRecorder(),
        critic=critic, sampler=sampler,
    )  # fmt: skip


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def take_step(trainer, step):
    """One whole step of the loop; its metrics and seconds."""
    return trainer.update(trainer.compare(trainer.roll_out(step))[0], step)


def capture_gradient(trainer, rollout):
    """The gradient that `update` would step with."""
    held = {}
    trainer.optimizer.step = lambda: held.setdefault("grad", flat_gradient(trainer.policy.model).clone())
    metrics, _ = trainer.update(trainer.compare(rollout)[0], 0)
    return held["grad"], metrics


def plain_logprobs(model, ids, start):
    """Log-probs at temperature 0.9 of ids [1, L] from position `start` on, from full logits."""
    logits = model(input_ids=ids).logits[0, start - 1 : -1] / 0.9
    return torch.log_softmax(logits, -1).gather(-1, ids[0, start:, None]).squeeze(-1)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_step_equals_a_plain_reimplementation(tokenizer, tmp_path, loss_type, beta):
    """One completion at a time, full logits, no sharing, no micro-batches: same loss, KL and gradient."""
    reference = small_model(seed=3) if beta else None
    optimizer = OptimizerConfig(learning_rate=1e-3, max_grad_norm=1e9)
    trainer = make(
        tokenizer,
        tmp_path,
        reference=reference,
        loss_type=loss_type,
        beta=beta,
        temperature=0.9,
        optimizer=optimizer,
    )
    rollout = trainer.roll_out(0)
    gradient, metrics = capture_gradient(trainer, rollout)

    model = small_model()
    lengths = [len(c.ids) for c in rollout.completions]
    loss, kl_sum = 0.0, 0.0
    for i, completion in enumerate(rollout.completions):
        group = torch.tensor(
            [rollout.scores.total[j] for j in range(len(lengths)) if j // 4 == i // 4], dtype=torch.float64
        )
        advantage = (rollout.scores.total[i] - group.mean()) / (group.std() + 1e-6)
        prompt = list(rollout.problems[i // 4].prompt_ids)
        ids = torch.tensor([prompt + completion.ids])

        logprobs = plain_logprobs(model, ids, len(prompt))
        ratio = torch.exp(logprobs - logprobs.detach())
        per_token = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if beta:
            d = plain_logprobs(reference, ids, len(prompt)).detach() - logprobs
            kl = torch.exp(d) - d - 1
            kl_sum += kl.sum().item()
            per_token = per_token + beta * kl
        divisor = {"grpo": 8 * lengths[i], "dapo": sum(lengths), "dr_grpo": 8 * 5}[loss_type]
        loss = loss + per_token.sum() / divisor
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-7)
    if beta:
        assert metrics["kl"] == pytest.approx(kl_sum / sum(lengths), rel=1e-6)
    torch.testing.assert_close(gradient, flat_gradient(model), rtol=0, atol=3e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_every_micro_batch_split_gives_the_same_gradient(tokenizer, tmp_path, loss_type):
    results = []
    for budget in (1, 60, 10_000):
        trainer = make(
            tokenizer, tmp_path, reference=small_model(seed=3), beta=0.1, loss_type=loss_type,
            prompts_per_step=4, micro_batch_tokens=budget, mask_truncated_completions=True,
        )  # fmt: skip
        results.append(capture_gradient(trainer, trainer.roll_out(0)))
    for gradient, metrics in results[1:]:
        torch.testing.assert_close(gradient, results[0][0], rtol=0, atol=2e-6)
        assert metrics == pytest.approx(results[0][1], rel=1e-6, abs=1e-9)


def test_at_the_first_step_the_kl_is_zero_and_nothing_is_clipped(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, reference=small_model(), beta=0.1)
    metrics, *_ = take_step(trainer, 0)
    assert metrics["kl"] == 0
    assert metrics["clip_ratio/region_mean"] == 0
    assert metrics["grad_norm"] > 0


def test_true_old_logprobs_when_a_rollout_is_used_twice(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, num_iterations=2, num_minibatches=2, epsilon=1e-4)
    metrics, *_ = take_step(trainer, 0)
    assert metrics["clip_ratio/region_mean"] > 0, "the second pass meets a policy that has moved"


def test_lora_starts_at_its_reference_and_learns(tokenizer, tmp_path):
    trainer = make(
        tokenizer,
        tmp_path,
        lora=LoraConfig(enabled=True, r=4),
        beta=0.1,
        model=small_model(dtype=torch.float32),
    )
    before = {n: p.clone() for n, p in trainer.policy.parameters.items()}
    first, *_ = take_step(trainer, 0)
    assert first["kl"] == 0
    assert any(not torch.equal(before[n], p) for n, p in trainer.policy.parameters.items())
    assert all("lora" in n for n in before)
    second, *_ = take_step(trainer, 1)
    assert second["kl"] > 0


def test_a_merged_adapter_samples_the_same(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, lora=LoraConfig(enabled=True, r=4))
    trainer.train()
    before = trainer.roll_out(7).texts
    merged = trainer.policy.merged()
    assert not any("lora" in n for n, _ in merged.named_parameters())
    trainer.engine = NativeEngine(merged, {tokenizer.eos_token_id})
    assert trainer.roll_out(7).texts == before


def test_reward_rises(tokenizer, tmp_path):
    optimizer = OptimizerConfig(learning_rate=3e-3, schedule="constant")
    trainer = make(
        tokenizer, tmp_path, num_steps=25, prompts_per_step=4, num_generations=8, optimizer=optimizer,
        model=small_model(dtype=torch.float32),
    )  # fmt: skip
    history = trainer.train()
    assert sum(r["reward"] for r in history[-5:]) > 1.5 * sum(r["reward"] for r in history[:5])


def test_one_step_off_samples_from_the_policy_as_it_was_a_step_before(tokenizer, tmp_path):
    """Its rollouts are those of a plain engine given that policy; the first update is the plain loop's own."""
    settings = {"num_steps": 4, "importance_sampling_cap": 2.0}
    trainer = make(tokenizer, tmp_path / "ahead", one_step_off=True, **settings)
    seen, starts = [], []
    compare = trainer.compare

    def compared(rollout):
        seen.append([c.ids for c in rollout.completions])
        starts.append({name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()})
        return compare(rollout)

    trainer.compare = compared
    history = trainer.train()
    for step, sampled in enumerate(seen):
        plain = make(tokenizer, tmp_path / str(step), **settings)
        plain.policy.model.load_state_dict(starts[max(0, step - 1)], strict=False)
        assert [c.ids for c in plain.roll_out(step).completions] == sampled
    assert [row["sampling/staleness"] for row in history] == [0, 1, 1, 1]
    assert history[0]["sampling/logp_difference"] == pytest.approx(0, abs=1e-6)
    assert history[1]["sampling/logp_difference"] > 1e-4
    on_policy = make(tokenizer, tmp_path / "on", **settings).train()
    assert history[0]["loss"] == on_policy[0]["loss"]


def test_one_step_off_weighs_tokens_by_how_the_policy_moved(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, one_step_off=True, importance_sampling_cap=1.1, loss_type="grpo")
    take_step(trainer, 0)  # the policy moves, its sampler stays
    rollout = trainer.roll_out(1)
    metrics, *_ = trainer.update(trainer.compare(rollout)[0], 1)
    assert metrics["sampling/importance_weight"] != pytest.approx(1, abs=1e-3)


def test_one_step_off_ends_with_the_error_of_its_rollout(tokenizer, tmp_path):
    calls = []

    def failing(prompts, completions, **columns):
        calls.append(1)
        if len(calls) == 2:
            raise BadInput("the grader is gone")
        return digit_sum(prompts, completions)

    trainer = make(tokenizer, tmp_path, reward=failing, one_step_off=True, importance_sampling_cap=2.0)
    with pytest.raises(BadInput, match="the grader is gone"):
        trainer.train()


@pytest.mark.parametrize(
    "switches",
    [{}, {"one_step_off": True, "importance_sampling_cap": 2.0}],
    ids=["plain", "one-step-off"],
)
def test_a_run_killed_anywhere_resumes_to_the_same_bytes(tokenizer, tmp_path, switches):
    settings = {"num_steps": 5, "checkpoint_every": 1, "beta": 0.1} | switches
    whole = make(
        tokenizer,
        tmp_path / "whole",
        model=small_model(dtype=torch.float32),
        reference=small_model(dtype=torch.float32),
        **settings,
    )
    history = whole.train()
    for stop in range(1, 5):

        class Killed(NullRecorder):
            def metrics(self, values, step, stop=stop):
                if step == stop + 1:
                    raise KeyboardInterrupt

        def again(recorder, stop=stop):
            return make(
                tokenizer, tmp_path / str(stop), model=small_model(dtype=torch.float32),
                reference=small_model(dtype=torch.float32), recorder=recorder, **settings,
            )  # fmt: skip

        with pytest.raises(KeyboardInterrupt):
            again(Killed()).train()
        resumed = again(NullRecorder())
        assert resumed.train() == history
        for a, b in zip(whole.policy.model.parameters(), resumed.policy.model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_ungraded_completions_are_counted_and_teach_nothing(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, reward=lambda prompts, completions, **_: [None] * len(completions))
    history = trainer.train()
    assert history[0]["rewards/math/failures"] == 8
    assert history[0]["frac_reward_zero_std"] == 1
    assert history[0]["grad_norm"] == 0


def solved_for_the_first_prompt(prompts, completions, **columns):
    return [
        1.0 if p == prompts[0] else r for p, r in zip(prompts, digit_sum(prompts, completions), strict=True)
    ]


def test_a_group_without_spread_is_not_computed_and_changes_nothing(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, reward=solved_for_the_first_prompt, prompts_per_step=3)
    rollout = trainer.roll_out(0)
    skipped, metrics = capture_gradient(trainer, rollout)
    everything = make(tokenizer, tmp_path, reward=solved_for_the_first_prompt, prompts_per_step=3)
    compare = everything.compare
    everything.compare = lambda rollout: (replace_advantage(compare(rollout)[0], 1e-30), 0.0)
    full, full_metrics = capture_gradient(everything, rollout)
    torch.testing.assert_close(skipped, full, rtol=0, atol=1e-7)
    assert metrics["loss"] == pytest.approx(full_metrics["loss"], abs=1e-9)
    assert metrics["entropy"] != full_metrics["entropy"], "the first group's tokens were left out"


def replace_advantage(batch, value):
    """The batch with its zero advantages made just not zero."""
    advantages = torch.where((batch.advantages == 0) & batch.mask, value, batch.advantages)
    return dataclasses.replace(batch, advantages=advantages)


def test_a_data_set_smaller_than_a_step_is_refused(tokenizer, tmp_path):
    with pytest.raises(BadInput, match=r"rl.prompts_per_step = 2.*only 1"):
        make(tokenizer, tmp_path, problems=1)


def test_masking_every_truncated_completion_leaves_no_gradient_and_no_nan(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, mask_truncated_completions=True)
    trainer.engine.end_ids = torch.tensor([10_000])
    metrics, *_ = take_step(trainer, 0)
    assert metrics["grad_norm"] == 0
    assert all(v == v for v in metrics.values())
