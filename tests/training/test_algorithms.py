"""Every row of the table as a whole step: loss and gradient against a plain step, one completion at a time."""

import math

import pytest
import torch

from tests.training.conftest import small_model
from tests.training.test_rl import capture_gradient, digit_sum, flat_gradient, make, plain_logprobs
from training.config import OptimizerConfig
from training.critic import Critic
from training.errors import BadInput
from training.experience import batch_of
from training.recorder import NullRecorder

OPEN = {"optimizer": OptimizerConfig(learning_rate=1e-3, max_grad_norm=1e9), "temperature": 0.9}


def completions_of(rollout):
    """(group, prompt ids, ids [1, L], reward, stopped) of each completion."""
    size = len(rollout.completions) // len(rollout.problems)
    for i, completion in enumerate(rollout.completions):
        prompt = list(rollout.problems[i // size].prompt_ids)
        ids = torch.tensor([prompt + completion.ids])
        yield i // size, len(prompt), ids, rollout.scores.total[i], completion.finish_reason == "stop"


def plain_step(rollout, advantage_of, surrogate, divisor, extra=None):
    """Sum over completions of surrogate(logprobs, advantage) / divisor, and its gradient."""
    model = small_model()
    rows = list(completions_of(rollout))
    lengths = [ids.shape[1] - start for _, start, ids, *_ in rows]
    loss = 0.0
    for i, (_, start, ids, *_) in enumerate(rows):
        logprobs = plain_logprobs(model, ids, start)
        per_token = surrogate(logprobs, advantage_of(i, rows, model))
        if extra is not None:
            per_token = per_token + extra(model, ids, start)
        loss = loss + per_token.sum() / divisor(lengths, i)
    loss.backward()
    return loss.item(), flat_gradient(model)


def group_normalised(i, rows, model):
    mine = torch.tensor([r[3] for r in rows if r[0] == rows[i][0]], dtype=torch.float64)
    return (rows[i][3] - mine.mean()) / (mine.std() + 1e-6)


def leave_one_out(i, rows, model):
    others = [r[3] for j, r in enumerate(rows) if r[0] == rows[i][0] and j != i]
    return rows[i][3] - sum(others) / len(others)


def whitened_over_tokens(i, rows, model):
    centred, lengths = [], []
    for j, row in enumerate(rows):
        mine = [r[3] for r in rows if r[0] == row[0]]
        centred.append(rows[j][3] - sum(mine) / len(mine))
        lengths.append(row[2].shape[1] - row[1])
    tokens = torch.tensor(
        [c for c, n in zip(centred, lengths, strict=True) for _ in range(n)], dtype=torch.float64
    )
    return (centred[i] - tokens.mean()) / torch.sqrt(tokens.var() + 1e-8)


def reinforce(logprobs, advantage):
    """The gradient of every surrogate at ratio 1."""
    return -advantage * torch.exp(logprobs - logprobs.detach())


def over_tokens(lengths, i):
    return sum(lengths)


def per_completion(lengths, i):
    return len(lengths) * lengths[i]


def sequence_ratio(logprobs, advantage):
    mean = logprobs.mean()
    return -advantage * torch.exp(mean - mean.detach()) * torch.ones(len(logprobs))


def cispo(logprobs, advantage):
    return -advantage * logprobs


def sapo(logprobs, advantage):
    tau = 1.0 if advantage > 0 else 1.05
    return -advantage * 4 / tau * torch.sigmoid(tau * (torch.exp(logprobs - logprobs.detach()) - 1))


@pytest.mark.parametrize(
    ("settings", "advantage_of", "surrogate", "divisor"),
    [
        ({"advantage_estimator": "rloo"}, leave_one_out, reinforce, over_tokens),
        ({"advantage_estimator": "reinforce_plus_plus"}, whitened_over_tokens, reinforce, over_tokens),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, group_normalised, sequence_ratio, per_completion),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, group_normalised, cispo, over_tokens),
        ({"loss_type": "sapo"}, group_normalised, sapo, per_completion),
        ({"delta": 1.5, "epsilon_high": 0.28}, group_normalised, reinforce, over_tokens),
    ],
)  # fmt: skip
def test_a_step_equals_a_plain_one(tokenizer, tmp_path, settings, advantage_of, surrogate, divisor):
    trainer = make(tokenizer, tmp_path, **(OPEN | settings))
    rollout = trainer.roll_out(0)
    gradient, metrics = capture_gradient(trainer, rollout)
    loss, expected = plain_step(rollout, advantage_of, surrogate, divisor)
    assert metrics["loss"] == pytest.approx(loss, abs=2e-7)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=5e-6)


def test_the_entropy_bonus_is_the_exact_entropy(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, **OPEN, entropy_coef=0.3)
    rollout = trainer.roll_out(0)
    gradient, _ = capture_gradient(trainer, rollout)

    def bonus(model, ids, start):
        log_p = torch.log_softmax(model(input_ids=ids).logits[0, start - 1 : -1] / 0.9, -1)
        return 0.3 * (log_p.exp() * log_p).sum(-1)

    _, expected = plain_step(rollout, group_normalised, reinforce, over_tokens, bonus)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=5e-6)


def test_a_penalty_in_the_reward_is_taken_off_the_completion(tokenizer, tmp_path):
    reference = small_model(seed=3)
    settings = {"beta": 0.1, "kl_in": "reward", "advantage_estimator": "rloo"}
    trainer = make(tokenizer, tmp_path, reference=reference, **OPEN, **settings)
    rollout = trainer.roll_out(0)
    gradient, _ = capture_gradient(trainer, rollout)
    penalties = {}

    def advantage_of(i, rows, model):
        if not penalties:
            with torch.no_grad():
                for j, (_, start, ids, *_) in enumerate(rows):
                    d = plain_logprobs(small_model(), ids, start) - plain_logprobs(reference, ids, start)
                    penalties[j] = 0.1 * d.sum().item()
        penalised = [(*r[:3], r[3] - penalties[j], r[4]) for j, r in enumerate(rows)]
        return leave_one_out(i, penalised, model)

    _, expected = plain_step(rollout, advantage_of, reinforce, over_tokens)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=5e-6)


def ppo(tokenizer, tmp_path, shared=False, **settings):
    model = small_model()
    critic = Critic(model if shared else small_model(seed=9), shared)
    torch.manual_seed(4)
    torch.nn.init.normal_(critic.head.weight)
    defaults = {
        "critic_optimizer": OptimizerConfig(learning_rate=2e-5, max_grad_norm=1e9),
        "advantage_estimator": "gae",
        "beta": 0.05,
        "kl_in": "reward",
        "num_generations": 2,
        "gamma": 0.9,
        "lam": 0.8,
    }
    trainer = make(
        tokenizer, tmp_path, model=model, reference=small_model(seed=3), critic=critic, **(OPEN | defaults | settings)
    )  # fmt: skip
    return trainer, critic


@pytest.mark.parametrize("shared", [False, True])
def test_a_ppo_step_equals_a_plain_one(tokenizer, tmp_path, shared):
    """Token rewards, GAE, whitening, clipped losses of policy and critic, on one trunk or two."""
    trainer, critic = ppo(tokenizer, tmp_path, shared)
    rollout, head, critic_gradient = trainer.roll_out(0), critic.head.weight.detach().clone(), {}
    trainer.critic_optimizer.step = lambda: critic_gradient.update(
        {n: p.grad.clone() for n, p in critic.parameters.items()}
    )
    gradient, metrics = capture_gradient(trainer, rollout)

    policy, reference = small_model(), small_model(seed=3)
    values_model = policy if shared else small_model(seed=9)
    own_head = torch.nn.Parameter(head.clone())
    raw, returns, old_values, live = [], [], [], []
    for _, start, ids, reward, _ in completions_of(rollout):
        logprobs = plain_logprobs(policy, ids, start)
        with torch.no_grad():
            kl = logprobs - plain_logprobs(reference, ids, start)
        hidden = values_model.model(input_ids=ids).last_hidden_state[0, start - 1 : -1]
        values = (hidden @ own_head.T).squeeze(-1)
        old = values.detach()
        token_reward = -0.05 * kl
        token_reward[-1] += reward
        advantages = torch.zeros_like(old)
        following, following_value = 0.0, 0.0
        for t in reversed(range(len(old))):
            error = token_reward[t] + 0.9 * following_value - old[t]
            following = error + 0.9 * 0.8 * following
            following_value = old[t]
            advantages[t] = following
        raw.append(advantages)
        returns.append(advantages + old)
        old_values.append(old)
        live.append((logprobs, values))
    tokens = torch.cat(raw)
    mean, variance = tokens.mean(), tokens.var()
    loss, value_loss = 0.0, 0.0
    for (logprobs, values), advantages, target in zip(live, raw, returns, strict=True):
        whitened = (advantages - mean) / torch.sqrt(variance + 1e-8)
        loss = loss + (-whitened * torch.exp(logprobs - logprobs.detach())).sum() / len(tokens)
        value_loss = value_loss + 0.5 * (values - target).square().sum() / len(tokens)
    (loss + 0.5 * value_loss).backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["critic/loss"] == pytest.approx(value_loss.item(), rel=1e-6)
    torch.testing.assert_close(gradient, flat_gradient(policy), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(critic_gradient["critic.head.weight"], own_head.grad, rtol=1e-5, atol=1e-5)
    if not shared:
        theirs = dict(values_model.model.named_parameters())
        for name, grad in critic_gradient.items():
            if name.startswith("critic.trunk."):
                expected = theirs[name.removeprefix("critic.trunk.")].grad
                torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)
    all_returns, all_old = torch.cat(returns), torch.cat(old_values)
    explained = 1 - (all_returns - all_old).var(unbiased=False) / all_returns.var(unbiased=False)
    assert metrics["critic/explained_variance"] == pytest.approx(explained.item(), abs=1e-5)


def test_a_constant_critic_gives_reward_minus_constant(tokenizer, tmp_path):
    """γ = λ = 1 and V = c: every token's raw advantage is the completion's reward minus c, before whitening."""
    trainer, critic = ppo(tokenizer, tmp_path, beta=0.0, gamma=1.0, lam=1.0)
    torch.nn.init.zeros_(critic.head.weight)
    torch.nn.init.constant_(critic.head.bias, 2.0)
    batch, _ = trainer.compare(trainer.roll_out(0))
    raw = (batch.rewards[:, None] - 2.0) * batch.mask
    tokens = raw[batch.mask]
    expected = (raw - tokens.mean()) / torch.sqrt(tokens.var() + 1e-8) * batch.mask
    torch.testing.assert_close(batch.advantages.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_critic_learns_and_is_resumed_to_the_same_bytes(tokenizer, tmp_path):
    settings = {
        "num_steps": 6,
        "checkpoint_every": 1,
        "critic_optimizer": OptimizerConfig(learning_rate=1e-2),
    }
    whole, critic = ppo(tokenizer, tmp_path / "whole", **settings)
    history = whole.train()
    assert history[-1]["critic/loss"] < history[0]["critic/loss"]

    class Killed(NullRecorder):
        def metrics(self, values, step):
            if step == 4:
                raise KeyboardInterrupt

    first, _ = ppo(tokenizer, tmp_path / "cut", **settings)
    first.recorder = Killed()
    with pytest.raises(KeyboardInterrupt):
        first.train()
    again, resumed = ppo(tokenizer, tmp_path / "cut", **settings)
    assert again.train() == history
    for name, parameter in critic.parameters.items():
        assert torch.equal(parameter, resumed.parameters[name]), name


def test_a_truncated_completion_pays_for_its_missing_end(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, missing_eos_penalty=1.5, num_generations=8)
    rollout = trainer.roll_out(0)
    batch = batch_of(rollout, trainer.config)
    stopped = [c.finish_reason == "stop" for c in rollout.completions]
    assert {True, False} == set(stopped)
    expected = [r - (0 if s else 1.5) for r, s in zip(rollout.scores.total, stopped, strict=True)]
    assert batch.rewards.tolist() == expected


def solved_unless_lucky(prompts, completions, **columns):
    """No spread for prompts of even first digit, spread for the others."""
    return [
        1.0 if int(p[0]) % 2 == 0 else d
        for p, d in zip(prompts, digit_sum(prompts, completions), strict=True)
    ]


def test_dynamic_sampling_replaces_groups_without_spread(tokenizer, tmp_path):
    settings = {"reward": solved_unless_lucky, "prompts_per_step": 3, "num_generations": 6, "problems": 10}
    plain = make(tokenizer, tmp_path, **settings)
    refilled = make(tokenizer, tmp_path, dynamic_sampling_rounds=4, **settings)
    for step in range(4):
        rollout = refilled.roll_out(step)
        prompts = [p.prompt for p in rollout.problems]
        assert len(prompts) == 3
        assert all(int(p[0]) % 2 for p in prompts) or rollout.metrics["dynamic_sampling/rounds"] == 4
        assert len(rollout.completions) == len(rollout.texts) == len(rollout.scores.total) == 18
    assert any(int(p.prompt[0]) % 2 == 0 for step in range(4) for p in plain.roll_out(step).problems)


def test_dynamic_sampling_stops_at_its_bound(tokenizer, tmp_path):
    trainer = make(
        tokenizer, tmp_path, reward=lambda prompts, completions, **_: [1.0] * len(completions), dynamic_sampling_rounds=2
    )  # fmt: skip
    rollout = trainer.roll_out(0)
    assert rollout.metrics["dynamic_sampling/rounds"] == 2
    assert len(rollout.problems) == 2


def test_the_reference_moves_towards_the_policy(tokenizer, tmp_path):
    reference = small_model(dtype=torch.float32)
    start = [p.clone() for p in reference.parameters()]
    trainer = make(
        tokenizer, tmp_path, model=small_model(dtype=torch.float32), reference=reference, beta=0.1,
        sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.25, num_steps=3,
    )  # fmt: skip
    seen = {}

    class Watch(NullRecorder):
        def progress(self, step, total, **shown):
            seen[step] = [p.clone() for p in reference.parameters()]
            seen[f"policy {step}"] = [p.clone() for p in trainer.policy.model.parameters()]

    trainer.recorder = Watch()
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(start, seen[1], strict=True))
    for before, policy, after in zip(start, seen["policy 2"], seen[2], strict=True):
        torch.testing.assert_close(after, 0.75 * before + 0.25 * policy)
    assert all(torch.equal(a, b) for a, b in zip(seen[2], seen[3], strict=True))


def test_a_moving_reference_is_resumed(tokenizer, tmp_path):
    settings = {
        "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "num_steps": 4, "checkpoint_every": 1,
        "kl_target": 0.001,
    }  # fmt: skip

    def trainer(folder, recorder=None):
        return make(
            tokenizer, folder, model=small_model(dtype=torch.float32), reference=small_model(dtype=torch.float32),
            recorder=recorder, **settings,
        )  # fmt: skip

    history = trainer(tmp_path / "whole").train()

    class Killed(NullRecorder):
        def metrics(self, values, step):
            if step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "cut", Killed()).train()
    assert trainer(tmp_path / "cut").train() == history
    coefficients = [row["kl_coef"] for row in history]
    assert coefficients[0] == 0.1
    assert len(set(coefficients)) > 1


def test_adapters_have_no_reference_to_move(tokenizer, tmp_path):
    with pytest.raises(BadInput, match="sync_ref_model"):
        make(tokenizer, tmp_path, reference=None, beta=0.1, sync_ref_model=True)


def test_the_samplers_logprobs_are_corrected_up_to_the_cap(tokenizer, tmp_path):
    """A sampler that reports every token 0.5 nats likelier than it was: weights exp(-0.5); rarer: the cap."""
    for shift, weight in [(0.5, math.exp(-0.5)), (-2.0, 1.5)]:
        trainer = make(tokenizer, tmp_path, **OPEN, importance_sampling_cap=1.5)
        rollout = trainer.roll_out(0)
        exact, _ = capture_gradient(make(tokenizer, tmp_path, **OPEN), rollout)
        for completion in rollout.completions:
            completion.logprobs[:] = [x + shift for x in completion.logprobs]
        corrected, metrics = capture_gradient(trainer, rollout)
        torch.testing.assert_close(corrected, weight * exact, rtol=1e-4, atol=1e-6)
        assert metrics["sampling/importance_weight"] == pytest.approx(weight, rel=1e-5)
