"""Where PPO's value model starts, what of it learns, and that it is saved and resumed."""

import pytest
import torch

from tests.training.conftest import small_model
from tests.training.test_rl import make
from training.batches import Tree, lay_out
from training.config import LoraConfig, OptimizerConfig
from training.critic import Critic, load_critic
from training.models import load_model, new_reward_model, save_model
from training.recorder import NullRecorder
from training.reward_model import branch_scores
from training.storage import write_manifest

CPU = torch.device("cpu")
LAYOUT = lay_out([[Tree([5, 6], [[7, 8, 1], [9, 10, 11]])], [Tree([4], [[1, 7]])]], 0, CPU)
LORA = LoraConfig(enabled=True, r=4)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def start(request, tmp_path, tokenizer):
    folder = tmp_path / "start"
    save_model(small_model(tied=request.param, dtype=torch.float32), tokenizer, folder)
    write_manifest(folder)
    return folder


@pytest.fixture
def reward_start(start, tmp_path, tokenizer):
    folder = tmp_path / "reward"
    save_model(new_reward_model(start, tokenizer, CPU, seed=1), tokenizer, folder)
    write_manifest(folder)
    return folder


def moved(critic):
    """The critic, every trained tensor away from its start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in critic.parameters.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return critic


def test_from_a_language_model_every_value_is_0_and_its_output_layer_is_let_go(start):
    model = load_model(start, CPU)
    critic = Critic(model, shared=False)
    assert not critic(LAYOUT).any()
    trunk = {f"critic.trunk.{name}" for name, _ in model.model.named_parameters()}
    assert critic.parameters.keys() == trunk | {"critic.head.weight", "critic.head.bias"}
    assert not any(module is model.lm_head for module in critic.trunk.modules())


def test_peft_is_told_of_a_trunk_in_four_bits(start):
    model = load_model(start, CPU)
    assert not hasattr(Critic(model, shared=False).trunk, "is_loaded_in_4bit")
    model.is_loaded_in_4bit = True
    assert Critic(model, shared=False).trunk.is_loaded_in_4bit


def test_from_a_reward_model_the_values_are_its_rewards(start, tokenizer):
    """At a token's place the value is what the reward model would score the text up to there."""
    reward_model = new_reward_model(start, tokenizer, CPU, seed=1)
    critic = Critic(new_reward_model(start, tokenizer, CPU, seed=1), shared=False)
    values = critic(LAYOUT)
    prefixes = lay_out([[Tree([5, 6], [[], [7], [7, 8], [], [9], [9, 10]])], [Tree([4], [[], [1]])]], 0, CPU)
    torch.testing.assert_close(values, branch_scores(reward_model, prefixes), rtol=0, atol=1e-6)
    assert values.any()


def test_with_adapters_they_and_the_head_are_all_that_learns(start):
    critic = Critic(load_model(start, CPU), shared=False, lora=LORA, seed=1)
    names = {"lora_A" in n or "lora_B" in n or n.startswith("critic.head.") for n in critic.parameters}
    assert names == {True}
    assert {n for n, p in critic.trunk.named_parameters() if p.requires_grad} == {
        n.removeprefix("critic.trunk.") for n in critic.parameters if "trunk" in n
    }
    assert not critic(LAYOUT).any()
    again = Critic(load_model(start, CPU), shared=False, lora=LORA, seed=1)
    assert all(torch.equal(p, again.parameters[n]) for n, p in critic.parameters.items())
    other = Critic(load_model(start, CPU), shared=False, lora=LORA, seed=2)
    assert any(not torch.equal(p, other.parameters[n]) for n, p in critic.parameters.items())


@pytest.mark.parametrize("lora", [None, LORA, LORA.model_copy(update={"output": "adapter"})])
@pytest.mark.parametrize("kind", ["start", "reward"])
def test_a_saved_critic_gives_the_same_values(start, reward_start, tmp_path, tokenizer, kind, lora):
    folder = tmp_path / kind
    model = load_model(start, CPU) if kind == "start" else new_reward_model(start, tokenizer, CPU, seed=1)
    critic = moved(Critic(model, shared=False, lora=lora, seed=1))
    expected = critic(LAYOUT)
    critic.save(tmp_path / "critic", folder)
    torch.testing.assert_close(load_critic(tmp_path / "critic", CPU)(LAYOUT), expected, rtol=1e-4, atol=1e-5)
    whole = (tmp_path / "critic" / "model.safetensors").exists()
    assert whole == (lora is None or lora.output == "merged")


def test_adapters_on_four_bit_weights_are_saved_on_the_unquantised_ones(start, tmp_path):
    values = []
    for name, lora in (("plain", LORA), ("coarse", LORA.model_copy(update={"quantization": "nf4"}))):
        critic = moved(Critic(load_model(start, CPU), shared=False, lora=lora, seed=1))
        if name == "coarse":
            with torch.no_grad():
                for parameter in critic.trunk.parameters():
                    if not parameter.requires_grad:
                        parameter.copy_((parameter * 4).round() / 4)
        critic.save(tmp_path / name, start)
        values.append(load_critic(tmp_path / name, CPU)(LAYOUT))
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_it_learns_and_is_resumed_to_the_same_bytes(start, tokenizer, tmp_path, lora):
    def trainer(folder, recorder=None):
        critic = Critic(load_model(start, CPU), shared=False, lora=lora, seed=1)
        return make(
            tokenizer, folder, model=load_model(start, CPU), critic=critic, recorder=recorder,
            advantage_estimator="gae", num_generations=2, num_steps=6, checkpoint_every=2,
            critic_optimizer=OptimizerConfig(learning_rate=1e-2),
        )  # fmt: skip

    whole = trainer(tmp_path / "whole")
    history = whole.train()
    assert history[-1]["critic/loss"] < history[0]["critic/loss"]
    assert all("critic/explained_variance" in row for row in history)

    class Killed(NullRecorder):
        def metrics(self, values, step):
            if step == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "cut", Killed()).train()
    resumed = trainer(tmp_path / "cut")
    assert resumed.train() == history
    for name, parameter in whole.critic.parameters.items():
        assert torch.equal(parameter, resumed.critic.parameters[name]), name
