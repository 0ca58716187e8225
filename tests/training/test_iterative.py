"""Outer iterations: the reference is reset exactly, the reward model learns what it should, and all of it resumes."""

import copy
from operator import attrgetter

import pytest
import torch
from safetensors import safe_open

import training.iterative
from tests.training.conftest import small_model
from training.config import (
    IterativeConfig,
    LoraConfig,
    OptimizerConfig,
    PromptConfig,
    RewardModelConfig,
    RewardsConfig,
    RLConfig,
)
from training.errors import BadInput
from training.experience import Problem, Rollout
from training.iterative import RewardLearner
from training.models import new_reward_model, save_model
from training.policy import Policy
from training.preferences import Pair
from training.prompts import PromptRenderer
from training.recorder import NullRecorder
from training.rewards import RewardSum, Scores
from training.rewards.model import ModelReward
from training.rl import RLTrainer
from training.rollout.native import NativeEngine
from training.rollout.protocol import Completion

CPU = torch.device("cpu")
LORA = LoraConfig(enabled=True, r=4)
GIVEN = [Pair(f"{i}+1=", str(i + 1), f"{i + 2}{i}", 1.0) for i in range(8)]
"""Pairs of stage `preferences`."""


def fewest_digits(prompts, completions, **columns):
    """The rule: the fewer digits the better."""
    return [-float(sum(c.isdigit() for c in text)) for text in completions]


@pytest.fixture
def start(tmp_path, tokenizer):
    """Folder of a small language model."""
    save_model(small_model(dtype=torch.float32), tokenizer, tmp_path / "start")
    return tmp_path / "start"


def make(
    tokenizer,
    folder,
    start=None,
    *,
    lora=None,
    recorder=None,
    grader=None,
    pairs=GIVEN,
    iterative,
    **settings,
):
    """A trainer; with `start`, the reward model made from it is a reward and goes on learning."""
    defaults = {
        "num_steps": 6,
        "prompts_per_step": 2,
        "num_generations": 4,
        "max_completion_length": 5,
        "checkpoint_every": 2,
        "optimizer": OptimizerConfig(learning_rate=1e-3, schedule="constant"),
        "reward_funcs": ["model"] if start else ["math"],
    }
    config = RLConfig(**(defaults | settings), iterative=IterativeConfig(**iterative))
    renderer = PromptRenderer(tokenizer, PromptConfig(chat_template="none"))
    learner, given = None, {"math": lambda completions, **_: [float(sum(map(ord, t))) for t in completions]}
    if start:
        model = new_reward_model(start, tokenizer, CPU, seed=1)
        given["model"] = ModelReward(model, renderer)
        rule = RewardSum(["rule"], None, RewardsConfig(), {"rule": grader or fewest_digits})
        learner = RewardLearner(model, renderer, rule, pairs, config, RewardModelConfig(), seed=1)
    policy_model = small_model(dtype=torch.float32)
    policy = Policy(policy_model, lora or LoraConfig(), 1)
    reference = small_model(dtype=torch.float32) if config.beta and not lora else None
    texts = [f"{i} + {i + 1} =" for i in range(8)]
    trainer = RLTrainer(
        policy, reference, NativeEngine(policy_model, {tokenizer.eos_token_id}),
        RewardSum(config.reward_funcs, None, RewardsConfig(), given), renderer,
        [Problem(t, tuple(renderer.ids(t)), {"answer": "1"}) for t in texts], config,
        seed=1, pad_id=0, checkpoints=folder, recorder=recorder or NullRecorder(), learner=learner,
    )  # fmt: skip
    trainer.learner = learner
    return trainer


def rollout_of(texts, num_generations=4, cut=()):
    """A rollout of one group a prompt with these texts; those at the places `cut` were cut off."""
    completions = [Completion([3], [0.0], "length" if i in cut else "stop") for i in range(len(texts))]
    problems = [
        Problem(f"{g}+0=", (3 + g, 13, 3, 15), {"answer": str(g)})
        for g in range(len(texts) // num_generations)
    ]
    return Rollout(problems, completions, list(texts), Scores([0.0] * len(texts), {}), {}, {})


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


def equal(these, those):
    return all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


@pytest.mark.parametrize("lora", [None, LORA])
def test_where_an_iteration_begins_the_reference_is_the_policy_to_the_bit(tokenizer, tmp_path, lora):
    trainer = make(tokenizer, tmp_path, lora=lora, iterative={"iterations": 3}, beta=0.1)
    history = trainer.train()
    kls = [row["kl"] for row in history]
    assert [kl == 0 for kl in kls] == [True, False, True, False, True, False]
    assert all(row["clip_ratio/region_mean"] == 0 for row in history[::2])
    assert [row.get("iterative/iteration") for row in history] == [None, None, 2, None, 3, None]


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_reference_stays_where_the_iteration_began(tokenizer, tmp_path, lora):
    """Against a copy of the policy, its adapters merged, made where the second iteration began."""
    settings = {"iterative": {"iterations": 2}, "beta": 0.1, "num_iterations": 2}
    trainer = make(tokenizer, tmp_path, lora=lora, **settings)
    for step in range(3):
        trainer.update(trainer.compare(trainer.roll_out(step))[0], step)
    rollout = trainer.roll_out(3)
    before = trainer.compare(rollout)[0]
    assert not torch.equal(before.old_logprobs, before.ref_logprobs)
    trainer.iterations.begin(3)
    batch = trainer.compare(rollout)[0]
    assert torch.equal(batch.old_logprobs, batch.ref_logprobs)
    assert torch.equal(batch.old_logprobs, before.old_logprobs)
    then = copy.deepcopy(trainer.policy).merged()
    trainer.update(batch, 3)
    trainer.iterations.begin(4)
    after = trainer.compare(rollout)[0]
    assert torch.equal(after.ref_logprobs, batch.ref_logprobs)
    assert not torch.equal(after.old_logprobs, batch.old_logprobs)
    torch.testing.assert_close(trainer._logprobs(then, batch), after.ref_logprobs, rtol=1e-4, atol=1e-4)


def test_one_iteration_is_the_run_without_the_section(tokenizer, tmp_path):
    """So are the steps of a run of two before the second begins."""
    runs = [
        make(tokenizer, tmp_path / str(i), iterative=iterative, beta=0.1)
        for i, iterative in enumerate(({}, {"iterations": 1, "replay": 0.5}, {"iterations": 2}))
    ]
    plain, one, two = ((run.train(), weights(run.policy.model)) for run in runs)
    assert one[0] == plain[0]
    assert equal(one[1], plain[1])
    assert two[0][:3] == plain[0][:3]
    assert not equal(two[1], plain[1])


def test_pairs_are_labelled_by_the_rule_and_never_by_the_reward_model(start, tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, start, iterative={"iterations": 2, "reward_model_steps": 1})
    learner = trainer.learner
    rollout = trainer.roll_out(0)
    learner.collect(rollout, 0)
    assert learner.fresh
    for pair in learner.fresh:
        better, worse = fewest_digits(None, [pair.chosen, pair.rejected])
        assert pair.margin == better - worse > 0
    [scores] = rollout.scores.parts.values()
    found = dict(zip(rollout.texts, scores, strict=True))
    assert any(found[pair.chosen] < found[pair.rejected] for pair in learner.fresh), "they would disagree"


def test_pairs_of_a_rollout_by_hand(start, tokenizer, tmp_path):
    """Two groups; equal texts count once, a cut off one not at all, and no pair crosses groups."""
    iterative = {"iterations": 2, "reward_model_steps": 1, "max_pairs_per_problem": 2}
    learner = make(tokenizer, tmp_path, start, iterative=iterative).learner
    learner.collect(rollout_of(["1", "22", "22", "", "4", "333", "5", "6"], cut=[3]), 0)
    assert learner.fresh[0] == Pair("0+0=", "1", "22", 1.0)
    assert len(learner.fresh) == 3
    rest = [Pair("1+0=", good, "333", 2.0) for good in ("4", "5", "6")]
    assert [pair in rest for pair in learner.fresh] == [False, True, True]


def test_a_rule_that_is_a_reward_of_rl_is_not_asked_again(start, tokenizer, tmp_path):
    def never(**_):
        raise AssertionError

    learner = make(
        tokenizer, tmp_path, start, grader=never, iterative={"iterations": 2, "reward_model_steps": 1}
    ).learner
    rollout = rollout_of(["1", "2", "3", "4"])
    rollout.scores.parts["rule"] = [1.0, 0.0, 0.0, None]
    learner.collect(rollout, 0)
    assert [(pair.chosen, pair.rejected) for pair in learner.fresh] == [("1", "2"), ("1", "3")]


@pytest.fixture
def batches(monkeypatch):
    """Every batch that the reward model takes a step on, as it is taken in training mode."""
    taken = []
    step = training.iterative.reward_model_step

    def watched(model, optimizer, parameters, batch, *rest):
        assert model.training
        taken.append(batch)
        return step(model, optimizer, parameters, batch, *rest)

    monkeypatch.setattr(training.iterative, "reward_model_step", watched)
    return taken


def test_a_batch_holds_exactly_the_share_of_earlier_pairs_and_the_history_grows(
    start, tokenizer, tmp_path, batches
):
    iterative = {"iterations": 3, "reward_model_steps": 5, "replay": 0.3, "batch_size": 5}
    learner = make(tokenizer, tmp_path, start, iterative=iterative).learner
    sizes = []
    for iteration in (1, 2):
        texts = [f"{iteration}{'1' * (i + 1)}" for i in range(8)]
        learner.collect(rollout_of(texts), iteration)
        history, fresh = dict(learner.history), {pair.id for pair in learner.fresh}
        assert len(fresh) == 8
        sizes.append(len(history))
        metrics = learner.learn(iteration)
        of_history = [any(pair is h for h in history.values()) for batch in batches for pair in batch]
        assert of_history == ([False] * 3 + [True] * 2) * 5
        assert metrics["iterative/replayed_share"] == 2 / 5
        assert (metrics["iterative/fresh_pairs"], metrics["iterative/missing_pairs"]) == (8, 0)
        seen = [id(pair) for batch in batches for pair in batch[:3]]
        assert len(set(seen[:8])) == 8, "every new pair comes before any comes again"
        assert set(learner.history) == set(history) | fresh
        assert (learner.fresh, learner.model.training) == ([], False)
        batches.clear()
    assert sizes == [8, 16]


def test_too_few_new_pairs_are_used_and_counted_and_none_is_no_step(start, tokenizer, tmp_path, batches):
    iterative = {"iterations": 3, "reward_model_steps": 2, "replay": 0.25, "batch_size": 8}
    learner = make(tokenizer, tmp_path, start, iterative=iterative).learner
    learner.collect(rollout_of(["1", "22", "333", "22"]), 0)
    metrics = learner.learn(1)
    assert [len(batch) for batch in batches] == [5, 5]
    assert metrics["iterative/missing_pairs"] == 3
    assert metrics["iterative/skipped"] == 0
    before = weights(learner.model)
    learner.collect(rollout_of(["1", "2", "3", "4"]), 1)
    metrics = learner.learn(2)
    assert (metrics["iterative/fresh_pairs"], metrics["iterative/skipped"]) == (0, 1)
    assert len(batches) == 2
    assert equal(weights(learner.model), before)


def test_pairs_too_long_for_the_reward_model_are_left_out(start, tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, start, iterative={"iterations": 2, "reward_model_steps": 1})
    short = RewardLearner(
        trainer.learner.model, trainer.renderer, trainer.learner.grader, GIVEN, trainer.config,
        RewardModelConfig(max_length=7), seed=1,
    )  # fmt: skip
    assert len(short.history) == len(GIVEN), "4 of the prompt, 2 digits, the end"
    short.collect(rollout_of(["1", "22", "333", "4444"]), 0)
    assert len(short.fresh) == 4
    metrics = short.learn(1)
    kept = [pair for pair in short.earlier if max(len(pair.chosen), len(pair.rejected)) <= 2]
    assert metrics["iterative/fresh_pairs"] == len(kept) < 4


def test_a_boundary_equals_a_plain_step(start, tokenizer, tmp_path):
    """One step on two new pairs and two old ones, against unpadded passes, the loss written out, and torch's AdamW."""
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="constant")
    learner = make(
        tokenizer, tmp_path, start, pairs=GIVEN[:2],
        iterative={
            "iterations": 2, "reward_model_steps": 1, "replay": 0.5, "batch_size": 4, "optimizer": optimizer
        },
    ).learner  # fmt: skip
    learner.collect(rollout_of(["1", "22", "22", "333"], cut=[3]), 0)
    learner.collect(rollout_of(["55", "55", "7", "55"]), 1)
    fresh = [Pair("0+0=", "1", "22", 1.0), Pair("0+0=", "7", "55", 1.0)]
    assert learner.fresh == fresh
    metrics = learner.learn(1)

    theirs = new_reward_model(start, tokenizer, CPU, seed=1)

    def losses(pairs):
        def score(pair, text):
            ids = [*tokenizer(pair.prompt)["input_ids"], *tokenizer(text)["input_ids"], 1]
            return theirs(torch.tensor([ids])).logits[0, 0]

        margins = [score(pair, pair.chosen) - score(pair, pair.rejected) for pair in pairs]
        return torch.stack([-torch.sigmoid(margin).log() for margin in margins])

    loss_before = losses(fresh).mean().item()
    losses([*fresh, *GIVEN[:2]]).mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    torch.optim.AdamW(theirs.parameters(), lr=1e-3, weight_decay=0.0).step()
    with torch.no_grad():
        after = losses(fresh)
    assert metrics["iterative/reward_model/loss_before"] == pytest.approx(loss_before, rel=1e-5)
    assert metrics["iterative/reward_model/loss_after"] == pytest.approx(after.mean().item(), rel=1e-4)
    right = (after < torch.log(torch.tensor(2.0))).float().mean().item()
    assert metrics["iterative/reward_model/accuracy_after"] == right
    assert metrics["iterative/reward_model/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for a, b in zip(learner.model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_the_reward_model_takes_up_the_rule(start, tokenizer, tmp_path):
    """It starts out knowing nothing of the rule, and grades the next iteration by it."""
    optimizer = OptimizerConfig(learning_rate=3e-3, schedule="constant")
    trainer = make(
        tokenizer, tmp_path, start, num_steps=4, prompts_per_step=8, num_generations=8,
        iterative={"iterations": 2, "reward_model_steps": 20, "optimizer": optimizer},
    )  # fmt: skip
    row = trainer.train()[2]
    assert row["iterative/reward_model/accuracy_before"] < 0.75
    assert row["iterative/reward_model/accuracy_after"] > 0.9
    assert row["iterative/reward_model/loss_after"] < row["iterative/reward_model/loss_before"]


def dies_after(optimizer, number):
    """Ends the run after that many steps of an optimizer."""
    step, taken = optimizer.step, []

    def counted():
        step()
        taken.append(1)
        if len(taken) == number:
            raise KeyboardInterrupt

    optimizer.step = counted


class Killed(NullRecorder):
    """Ends the run when step `step` is recorded."""

    def __init__(self, step):
        self.step = step

    def metrics(self, values, step):
        if step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_run_killed_anywhere_resumes_to_the_same_bytes(start, tokenizer, tmp_path, lora):
    """Iterations begin after steps 2 and 4; a run that dies while one begins goes back to the checkpoint before it."""

    def again(name, recorder=None):
        return make(
            tokenizer, tmp_path / name, start, lora=lora, recorder=recorder, checkpoint_every=1, beta=0.1,
            prompts_per_step=3, num_generations=8, max_completion_length=8,
            iterative={"iterations": 3, "reward_model_steps": 3, "replay": 0.25, "batch_size": 8},
        )  # fmt: skip

    def check(name):
        resumed = again(name)
        assert resumed.train() == history
        for model in ("policy.model", "policy.kept", "learner.model"):
            assert equal(weights(attrgetter(model)(resumed)), weights(attrgetter(model)(whole)))

    whole = again("whole")
    history = whole.train()
    assert [row["step"] for row in history if row.get("iterative/skipped") == 0] == [3, 5]
    for stop in range(2, 7):
        with pytest.raises(KeyboardInterrupt):
            again(f"step-{stop}", Killed(stop)).train()
        check(f"step-{stop}")
    for update in (1, 5):
        killed = again(f"update-{update}")
        dies_after(killed.learner.optimizer, update)
        with pytest.raises(KeyboardInterrupt):
            killed.train()
        check(f"update-{update}")


@pytest.mark.parametrize(
    ("iterative", "settings", "expected"),
    [
        ({}, {"beta": 0.1}, set()),
        ({"iterations": 2}, {"beta": 0.1}, {"reference"}),
        ({"iterations": 2}, {"beta": 0.1, "lora": LORA}, {"reference"}),
        ({"iterations": 2, "reward_model_steps": 1}, {}, {"reward_model"}),
    ],
)
def test_a_checkpoint_holds_the_models_that_change_and_no_other(
    start, tokenizer, tmp_path, iterative, settings, expected
):
    learns = start if "reward_model_steps" in iterative else None
    trainer = make(tokenizer, tmp_path / "c", learns, iterative=iterative, **settings)
    trainer.train()
    with safe_open(tmp_path / "c" / "step-000004" / "state.safetensors", "pt") as tensors:
        names = {name for name in tensors.keys() if name.startswith("parameter.re")}  # noqa: SIM118
    assert {name.split(".")[1] for name in names} == expected
    if "lora" in settings:
        assert all("lora_" in name for name in names)


def test_a_model_of_its_own_can_not_be_reset_to_a_policy_with_adapters(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, lora=LORA, iterative={"iterations": 2}, beta=0.1)
    with pytest.raises(BadInput, match=r"rl.iterative.iterations = 2: with adapters"):
        training.iterative.Iterations(trainer.config, trainer.policy, small_model(), None)


def test_a_learner_that_is_missing_or_idle_is_an_error(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path, iterative={"iterations": 2}, beta=0.1)
    with pytest.raises(ValueError, match="a reward learner goes with"):
        training.iterative.Iterations(trainer.config, trainer.policy, None, object())
