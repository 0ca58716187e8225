"""What is written for vLLM to read, and what is refused before it runs."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from tests.training.conftest import small_model
from training.algorithms.ratios import truncated_importance_weights
from training.config import LoraConfig, RLConfig, VLLMConfig
from training.errors import BadInput
from training.objective import policy_loss
from training.policy import Policy
from training.rollout.engines import build_engine
from training.rollout.installed import check_installed
from training.rollout.protocol import Sampling
from training.rollout.vllm import check_sampling, completion, room_for
from training.rollout.weights import WeightFolder, split


def test_a_whole_model_is_written_by_its_own_names(model, tmp_path):
    folder = WeightFolder(tmp_path, model.config, alpha=32.0)
    folder.put(model.named_parameters())
    written = load_file(folder.weights)
    assert {name: t.tolist() for name, t in written.items()} == {
        name: p.tolist() for name, p in model.named_parameters()
    }
    assert folder.adapter is None
    assert json.loads((folder.model / "config.json").read_text())["hidden_size"] == 32


def test_peft_reads_an_adapter_as_the_policy_has_it(tmp_path):
    """The frozen weights stay as they were first written; the adapter put on them gives the policy's logits."""
    from peft import PeftModel

    policy = Policy(small_model(), LoraConfig(enabled=True, r=4, alpha=12.0), seed=1)
    folder = WeightFolder(tmp_path, policy.model.config, alpha=12.0)
    folder.put(policy.model.named_parameters())
    first, frozen = folder.adapter, folder.weights.stat()
    torch.manual_seed(0)
    for parameter in policy.parameters.values():
        torch.nn.init.normal_(parameter, std=0.2)
    folder.put(policy.model.named_parameters())
    assert folder.adapter != first
    assert not first.exists()
    assert folder.weights.stat() == frozen
    plain = small_model(seed=5)
    plain.load_state_dict(load_file(folder.weights), strict=False)
    adapted = PeftModel.from_pretrained(plain, folder.adapter).eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, policy.model.eval()(ids).logits)


def test_what_vllm_would_not_adapt_is_refused():
    for name in ("model.embed_tokens.lora_embedding_A.default", "lm_head.modules_to_save.default.weight"):
        with pytest.raises(BadInput, match=f"rl.lora: {name}"):
            split([(name, torch.zeros(1))])


def test_an_adapters_rank_takes_the_next_room():
    assert [room_for(rank) for rank in (1, 2, 8, 9, 512)] == [1, 8, 8, 16, 512]
    with pytest.raises(BadInput, match=r"rl.lora.r = 513"):
        room_for(513)


@pytest.mark.parametrize(
    ("sampling", "named"),
    [(Sampling(1.0, 4, top_p=0.9), "top_p"), (Sampling(0.5, 4, greedy=True), "temperature")],
)
def test_sampling_whose_log_probabilities_vllm_lacks_is_refused(sampling, named):
    with pytest.raises(BadInput, match=named):
        check_sampling(sampling)


def test_a_completion_may_end_on_its_last_token_and_lack_a_log_probability():
    ended = completion([5, 1], [-0.5, None], {1, 2})
    assert (ended.finish_reason, ended.logprobs[0], math.isnan(ended.logprobs[1])) == ("stop", -0.5, True)
    assert completion([5, 5], [-0.5, -0.5], {1, 2}).finish_reason == "length"


def test_a_missing_log_probability_is_neutral_in_the_loss_and_its_metrics():
    old, sampled = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, math.nan]])
    weights = truncated_importance_weights(old, sampled, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([[math.exp(0.5), 1.0]]))
    ones = torch.ones(1, 2)
    loss, metrics = policy_loss(RLConfig(), old, ones, old, ones, ones.bool(), None, sampled, 0.0)
    assert metrics["sampling/logp_difference"].tolist() == [[0.5, 0.0]]
    assert loss.isfinite().all()


def test_an_engine_that_is_not_there_is_named(model, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"rl.engine = 'vllm': vLLM is not installed"):
        build_engine(model, {1}, 32, RLConfig(engine="vllm"))
    for engine in ("native", "vllm-server"):
        check_installed(engine)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"engine": "vllm-server"}, "needs addresses in vllm.servers"),
        ({"engine": "vllm", "vllm": VLLMConfig(servers=["http://a:1"])}, "are for engine vllm-server"),
        (
            {"engine": "vllm", "lora": LoraConfig(enabled=True, quantization="nf4")},
            "would sample from other weights",
        ),
    ],
)
def test_settings_that_contradict_the_engine_are_refused(settings, named):
    with pytest.raises(ValueError, match=named):
        RLConfig(**settings)


@pytest.mark.parametrize("servers", [["127.0.0.1:8001"], ["http://a:1/v1"], ["http://a:1", "http://a:1"]])
def test_addresses_are_checked(servers):
    with pytest.raises(ValueError, match="servers"):
        VLLMConfig(servers=servers)
