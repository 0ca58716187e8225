"""Adapters published alone: put on their model again they are the merged model, and the model is the one they know."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import is_bitsandbytes_available

from tests.training.conftest import small_model
from training.adapters import base_of, is_adapter, save_adapter, whole_model
from training.batches import Tree
from training.config import CheckpointConfig, LoraConfig
from training.errors import BadInput
from training.models import (
    bring_checkpoint,
    context_length,
    kind_of,
    load_checkpoint,
    load_model,
    load_reward_model,
    load_tokenizer,
    new_reward_model,
    save_model,
)
from training.policy import Policy
from training.quantization import check_quantization, four_bit
from training.reward_model import score_branches
from training.storage import publishing, sha256_file, write_manifest

CPU = torch.device("cpu")
IDS = torch.tensor([[3, 4, 5, 6, 7], [9, 8, 7, 6, 5]])
TREES = [Tree([5, 6], [[7, 8, 1], [1], [9, 10, 11, 12]]), Tree([4], [[1, 7]])]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def base(request, tmp_path, tokenizer):
    """Folder of a published small language model."""
    with publishing(tmp_path / "base") as folder:
        save_model(small_model(tied=request.param, dtype=torch.float32), tokenizer, folder)
    return tmp_path / "base"


def trained(model, seed=0, **settings):
    """A policy whose adapters (and head) are not where they started."""
    policy = Policy(model, LoraConfig(enabled=True, r=4, **settings), 1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    policy.model.eval()
    return policy


def save(policy, folder, start):
    with publishing(folder) as new:
        policy.save(new, start, load_tokenizer(whole_model(start)))
    return folder


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def size(folder):
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_a_policys_adapter_is_its_merged_model(tmp_path, base):
    policy = trained(load_model(base, CPU), output="adapter")
    live = logits(policy.model)
    alone = save(policy, tmp_path / "alone", base)
    merged = save(trained(load_model(base, CPU)), tmp_path / "merged", base)
    assert is_adapter(alone)
    assert not is_adapter(merged)
    loaded = load_model(alone, CPU)
    torch.testing.assert_close(logits(loaded), logits(load_model(merged, CPU)), rtol=0, atol=1e-6)
    torch.testing.assert_close(logits(loaded), live, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(live, logits(load_model(base, CPU)), atol=1e-2)
    assert all(p.requires_grad for p in loaded.parameters()), "it can be trained whole"
    assert not loaded.training
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    assert (context_length(alone), kind_of(alone)) == (128, "causal")
    assert load_tokenizer(alone).get_vocab() == load_tokenizer(base).get_vocab()
    assert {path.name for path in alone.iterdir()} >= {"base.json", "tokenizer.json", "manifest.json"}
    assert not (alone / "model.safetensors").exists()
    assert size(alone) < size(merged) / 2


def test_a_reward_models_adapter_carries_its_head(tmp_path, base, tokenizer):
    def fresh():
        return new_reward_model(base, tokenizer, CPU, seed=1)

    alone = save(trained(fresh(), output="adapter"), tmp_path / "alone", base)
    merged = save(trained(fresh()), tmp_path / "merged", base)
    assert kind_of(alone) == kind_of(merged) == "reward"
    loaded = load_reward_model(alone, CPU)
    assert not torch.equal(loaded.score.weight, fresh().score.weight)
    expected = score_branches(load_reward_model(merged, CPU), TREES, 0, 100)
    torch.testing.assert_close(score_branches(loaded, TREES, 0, 100), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(score_branches(load_checkpoint(alone, CPU), TREES, 0, 100), expected)


def test_plain_peft_loads_it(tmp_path, base):
    from peft import PeftModel

    alone = save(trained(load_model(base, CPU), output="adapter"), tmp_path / "alone", base)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(alone))
    torch.testing.assert_close(logits(theirs), logits(load_model(alone, CPU)), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("error::UserWarning")
def test_an_adapter_to_an_adapter(tmp_path, base, tokenizer):
    """A policy that goes on from an adapter, and a reward model that starts from one."""
    first = save(trained(load_model(base, CPU), output="adapter"), tmp_path / "first", base)
    second = save(trained(load_model(first, CPU), seed=1, output="adapter"), tmp_path / "second", first)
    plain_first = save(trained(load_model(base, CPU)), tmp_path / "plain-first", base)
    plain = save(trained(load_model(plain_first, CPU), seed=1), tmp_path / "plain", plain_first)
    assert (base_of(second), whole_model(second)) == (first, base)
    torch.testing.assert_close(
        logits(load_model(second, CPU)), logits(load_model(plain, CPU)), rtol=0, atol=1e-5
    )
    from_adapter, from_plain = (
        score_branches(new_reward_model(start, tokenizer, CPU, seed=1), TREES, 0, 100)
        for start in (first, plain_first)
    )
    torch.testing.assert_close(from_adapter, from_plain, rtol=0, atol=1e-5)


def test_equal_adapters_are_equal_bytes_that_name_no_place(tmp_path, base):
    names = ("q_proj", "v_proj", "up_proj", "down_proj", "o_proj")
    for name, order in (("a", names), ("b", names[::-1])):
        policy = trained(load_model(base, CPU), output="adapter", target_modules=list(order))
        save(policy, tmp_path / name, base)
    a, b = ((tmp_path / n / "manifest.json").read_bytes() for n in "ab")
    assert a == b
    assert str(tmp_path) not in (tmp_path / "a" / "adapter_config.json").read_text()
    assert json.loads((tmp_path / "a" / "base.json").read_text())["model"] == "../base"
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("a", "base"):
        (tmp_path / name).rename(moved / name)
    assert base_of(moved / "a") == moved / "base"


def test_a_changed_model_is_noticed(tmp_path, base):
    alone = save(trained(load_model(base, CPU), output="adapter"), tmp_path / "alone", base)
    (base / "note.txt").write_text("another one")
    write_manifest(base)
    for use in (whole_model, context_length, lambda folder: load_model(folder, CPU)):
        with pytest.raises(
            BadInput, match=r"alone/base.json: .*base has changed since; run the pipeline again"
        ):
            use(alone)
    (base / "manifest.json").unlink()
    with pytest.raises(BadInput, match="has changed since"):
        base_of(alone)
    (alone / "base.json").unlink()
    with pytest.raises(BadInput, match=r"holds an adapter but no base.json"):
        base_of(alone)


def test_an_adapter_that_does_not_fit_is_refused(tmp_path, base, tokenizer):
    alone = save(trained(load_model(base, CPU), output="adapter"), tmp_path / "alone", base)
    narrow = small_model(dtype=torch.float32).config
    narrow.intermediate_size = 40
    save_model(type(small_model())(narrow), tokenizer, base)
    named = json.loads((alone / "base.json").read_text())
    write_manifest(base)
    (alone / "base.json").write_text(json.dumps(named | {"digest": sha256_file(base / "manifest.json")}))
    with pytest.raises(BadInput, match="the adapter does not fit its model"):
        load_model(alone, CPU)


def test_an_adapter_is_no_base_model(tmp_path, base):
    alone = save(trained(load_model(base, CPU), output="adapter"), tmp_path / "alone", base)
    with pytest.raises(BadInput, match="holds an adapter, no whole model"):
        bring_checkpoint(CheckpointConfig(source=str(alone)), tmp_path / "x", "model")


@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_adapters_on_four_bit_weights_are_merged_into_the_unquantised_ones(tmp_path, base, tokenizer, kind):
    """Coarse weights stand in for 4-bit ones: what is published is the starting model's plus the adapter's."""

    def fresh():
        if kind == "policy":
            return load_model(base, CPU)
        return new_reward_model(base, tokenizer, CPU, seed=1)

    coarse = trained(fresh(), quantization="nf4")
    with torch.no_grad():
        for name, parameter in coarse.model.named_parameters():
            if name not in coarse.parameters:
                parameter.copy_((parameter * 4).round() / 4)
    ours = save(coarse, tmp_path / "ours", base)
    plain = save(trained(fresh()), tmp_path / "plain", base)
    assert (ours / "config.json").read_bytes() == (plain / "config.json").read_bytes()
    ours, plain = load_checkpoint(ours, CPU), load_checkpoint(plain, CPU)
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)


def test_loading_leaves_the_random_state_alone(tmp_path, base):
    alone = save(trained(load_model(base, CPU), output="adapter"), tmp_path / "alone", base)
    before = torch.random.get_rng_state()
    load_model(alone, CPU)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_whole_model_is_its_own_bottom(tmp_path, base):
    assert whole_model(base) == base
    policy = trained(load_model(base, CPU))
    save_adapter(policy._peft, tmp_path)
    assert {path.name for path in tmp_path.glob("adapter*")} == {
        "adapter_config.json", "adapter_model.safetensors"
    }  # fmt: skip


def test_four_bits_are_refused_where_they_can_not_be_had():
    quantized = LoraConfig(enabled=True, quantization="nf4")
    check_quantization(LoraConfig(), "sft.lora", CPU)
    message = r"sft.lora.quantization = 'nf4': device is cpu; it needs a CUDA GPU and `pip install bitsandbytes`; use null"
    with pytest.raises(BadInput, match=message):
        check_quantization(quantized, "sft.lora", CPU)
    if not is_bitsandbytes_available():
        with pytest.raises(BadInput, match="bitsandbytes is missing or too old"):
            check_quantization(quantized, "sft.lora", torch.device("cuda"))


def test_four_bits_are_those_of_the_paper():
    config = four_bit()
    assert config.load_in_4bit
    assert config.bnb_4bit_quant_type == "nf4"
    assert config.bnb_4bit_use_double_quant
    assert config.bnb_4bit_compute_dtype is torch.bfloat16


def test_four_bit_weights_of_an_adapter_are_those_of_the_merged_model(tmp_path, base, monkeypatch):
    """They are read from a folder that holds the model with the adapter merged in."""
    alone = save(trained(load_model(base, CPU), output="adapter"), tmp_path / "alone", base)
    monkeypatch.setattr("training.models.four_bit", lambda: None)
    quantized = load_model(alone, CPU, "nf4")
    torch.testing.assert_close(logits(quantized), logits(load_model(alone, CPU)))
