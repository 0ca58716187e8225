"""Every row of the table as a whole step: loss and gradient against a plain step, one completion at a time."""

import math
import re

import pytest
import torch

from tests.training.conftest import ALPHABET, small_model
from tests.training.test_rl import capture_gradient, digit_sum, flat_gradient, make, plain_logprobs
from training.config import OptimizerConfig
from training.critic import Critic
from training.errors import BadInput
from training.experience import batch_of, has_spread, rollout_metrics
from training.models import character_tokenizer
from training.recorder import NullRecorder

CHARACTERS = character_tokenizer(ALPHABET)
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


def digits_of(texts):
    """For each step the sum of its digits, None without one; 0 for all where no step has one."""
    found = [[int(c) for c in text if c.isdigit()] for text in texts]
    return [float(sum(digits)) if digits or not any(found) else None for digits in found]


def step_digit_sum(prompts, completions, steps, **columns):
    return [digits_of(own) for own in steps]


def plain_steps(row):
    """(text, last token) of each step between dashes, from the characters of one token after another."""
    tokens = row[2][0, row[1] :].tolist()
    characters = [
        (c, t) for t, i in enumerate(tokens) for c in CHARACTERS.decode([i], skip_special_tokens=True)
    ]
    text = "".join(c for c, _ in characters)
    pattern = r"(?:\s*-)*\s*[^\s-][^-]*(?:-(?:\s*-)*(?:\s*$)?|$)"
    steps = [(m[0], characters[m.end() - 1][1]) for m in re.finditer(pattern, text)] or [(text, None)]
    return [*steps[:-1], (steps[-1][0], len(tokens) - 1)]


def by_step(penalty=0.0):
    """Normalised over all the group's steps with a reward; a token's advantage is the sum of those from it on."""

    def rewarded(row):
        texts, ends = zip(*plain_steps(row), strict=True)
        found = {end: r for end, r in zip(ends, digits_of(texts), strict=True) if r is not None}
        last = row[2].shape[1] - row[1] - 1
        if penalty and not row[4]:
            found[last] = found.get(last, 0.0) - penalty
        return found

    def advantage_of(i, rows, model):
        every = [r for row in rows if row[0] == rows[i][0] for r in rewarded(row).values()]
        every = torch.tensor(every, dtype=torch.float64)
        normalised = {end: (r - every.mean()) / (every.std() + 1e-6) for end, r in rewarded(rows[i]).items()}
        length = rows[i][2].shape[1] - rows[i][1]
        return torch.tensor([sum(a for end, a in normalised.items() if end >= t) for t in range(length)])

    return advantage_of


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


PROCESS = {
    "supervision": "process",
    "reward": step_digit_sum,
    "separator": "-",
    "num_generations": 6,
    "max_completion_length": 12,
}


@pytest.mark.parametrize(
    ("settings", "advantage_of", "surrogate", "divisor"),
    [
        ({"advantage_estimator": "rloo"}, leave_one_out, reinforce, over_tokens),
        ({"advantage_estimator": "reinforce_plus_plus"}, whitened_over_tokens, reinforce, over_tokens),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, group_normalised, sequence_ratio, per_completion),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, group_normalised, cispo, over_tokens),
        ({"loss_type": "sapo"}, group_normalised, sapo, per_completion),
        ({"delta": 1.5, "epsilon_high": 0.28}, group_normalised, reinforce, over_tokens),
        (PROCESS, by_step(), reinforce, over_tokens),
        (PROCESS | {"loss_type": "grpo"}, by_step(), reinforce, per_completion),
        (PROCESS | {"missing_eos_penalty": 2.5}, by_step(2.5), reinforce, over_tokens),
    ],
)  # fmt: skip
def test_a_step_equals_a_plain_one(tokenizer, tmp_path, settings, advantage_of, surrogate, divisor):
    trainer = make(tokenizer, tmp_path, **(OPEN | settings))
    rollout = trainer.roll_out(0)
    gradient, metrics = capture_gradient(trainer, rollout)
    assert None not in rollout.scores.total
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


def test_steps_of_one_completion_have_advantages_of_their_own(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, **PROCESS)
    rollout = trainer.roll_out(0)
    batch, _ = trainer.compare(rollout)
    assert any(len(one.steps) > 1 for one in rollout.scores.steps)
    for row, one in enumerate(rollout.scores.steps):
        rewarded = [step.end for step, reward in zip(one.steps, one.total, strict=True) if reward is not None]
        assert batch.step_ends[row].nonzero().flatten().tolist() == rewarded
        changes = batch.advantages[row].diff().abs().gt(1e-6).nonzero().flatten().tolist()
        assert set(changes) <= set(rewarded)
        assert not batch.advantages[row, len(rollout.completions[row].ids) :].any()
    metrics = rollout_metrics(rollout, trainer.config)
    own = [[r for r in one.total if r is not None] for one in rollout.scores.steps]
    means = [sum(rewards) / len(rewards) for rewards in own if rewards]
    assert metrics["reward"] == pytest.approx(sum(means) / len(means))
    assert metrics["process/steps_mean"] == sum(len(one.steps) for one in rollout.scores.steps) / 12


def one_on_average(prompts, completions, steps, **columns):
    """Every completion earns 1 on average, with spread among its steps for prompts of odd first digit."""
    return [
        [1.0] * len(own) if int(p[0]) % 2 == 0 or len(own) == 1 else [0.0, 2.0, *[1.0] * (len(own) - 2)]
        for p, own in zip(prompts, steps, strict=True)
    ]


def test_spread_is_that_of_all_the_steps_of_a_group(tokenizer, tmp_path):
    settings = PROCESS | {"reward": one_on_average, "prompts_per_step": 5, "num_generations": 12}
    plain = make(tokenizer, tmp_path, **settings)
    rollout = plain.roll_out(0)
    odd = [int(problem.prompt[0]) % 2 == 1 for problem in rollout.problems]
    assert set(odd) == {True, False}
    assert has_spread(rollout, plain.config) == odd
    batch, _ = plain.compare(rollout)
    assert [batch.has_advantage(g) for g in batch.groups] == odd
    assert rollout_metrics(rollout, plain.config)["frac_reward_zero_std"] == 1 - sum(odd) / 5
    assert set(rollout.scores.total) == {1.0}
    settings["prompts_per_step"] = 3
    refilled = make(tokenizer, tmp_path, dynamic_sampling_rounds=6, **settings).roll_out(0)
    assert all(int(problem.prompt[0]) % 2 for problem in refilled.problems)
    assert len(refilled.scores.steps) == len(refilled.completions) == 36
    for one, completion in zip(refilled.scores.steps, refilled.completions, strict=True):
        assert one.steps[-1].end == len(completion.ids) - 1


def test_a_truncated_completion_without_a_rewarded_step_stays_ungraded(tokenizer, tmp_path):
    def none(prompts, completions, steps, **columns):
        return [[None] * len(own) if i else [1.0] * len(own) for i, own in enumerate(steps)]

    trainer = make(tokenizer, tmp_path, **(PROCESS | {"reward": none}), missing_eos_penalty=1.0)
    batch = batch_of(trainer.roll_out(0), trainer.config)
    assert batch.step_ends[0].any()
    assert not batch.step_ends[1:].any()
    assert not batch.loss_mask[1:].any()


def test_truncated_completions_are_masked_with_their_steps(tokenizer, tmp_path):
    trainer = make(
        tokenizer, tmp_path, **(PROCESS | {"num_generations": 12}), mask_truncated_completions=True
    )
    rollout = trainer.roll_out(0)
    batch, _ = trainer.compare(rollout)
    stopped = torch.tensor([c.finish_reason == "stop" for c in rollout.completions])
    assert set(stopped.tolist()) == {True, False}
    assert not batch.loss_mask[~stopped].any()
    assert torch.equal(batch.loss_mask[stopped & batch.valid], batch.mask[stopped & batch.valid])


def test_process_supervision_learns_and_is_resumed_to_the_same_bytes(tokenizer, tmp_path):
    """Steps between dashes that hold a nine are rewarded: they come to be more."""

    def nines(prompts, completions, steps, **columns):
        return [[float("9" in text) for text in own] for own in steps]

    tables = {}

    class Watch(NullRecorder):
        def table(self, name, rows):
            tables[name] = rows

    class Killed(NullRecorder):
        def metrics(self, values, step):
            if step == 9:
                raise KeyboardInterrupt

    def trainer(folder, recorder):
        settings = PROCESS | {"reward": nines, "num_steps": 30, "prompts_per_step": 4, "num_generations": 8}
        return make(
            tokenizer, tmp_path / folder, model=small_model(dtype=torch.float32), recorder=recorder,
            checkpoint_every=4, optimizer=OptimizerConfig(learning_rate=3e-3, schedule="constant"), **settings,
        )  # fmt: skip

    whole = trainer("whole", Watch())
    history = whole.train()
    first, last = (sum(row["reward"] for row in part) / 5 for part in (history[:5], history[-5:]))
    assert last > first + 0.2
    shown = tables["completions/step-000001"][0]
    assert "".join(shown["steps"]) == shown["completion"]
    assert len(shown["step_rewards"]) == len(shown["step_rewards/math"]) == len(shown["steps"])
    with pytest.raises(KeyboardInterrupt):
        trainer("cut", Killed()).train()
    resumed = trainer("cut", NullRecorder())
    assert resumed.train() == history
    for a, b in zip(whole.policy.model.parameters(), resumed.policy.model.parameters(), strict=True):
        assert torch.equal(a, b)
