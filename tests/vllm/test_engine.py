"""The engine `vllm` beside the native one: same greedy outputs, same distribution, whatever weights it was given."""

import os
import signal
import threading

import pytest
import torch

from tests.training.conftest import ALPHABET
from tests.training.test_rl import make
from tests.vllm.models import ENDS, LENGTH, TEMPERED, check_agrees, requests, small_llama
from training.config import LoraConfig, OptimizerConfig, VLLMConfig
from training.models import character_tokenizer
from training.policy import Policy
from training.rollout.protocol import Request
from training.rollout.vllm import EngineFault, VLLMEngine


def start(model, lora=None, timeout=300.0) -> VLLMEngine:
    torch.set_num_threads(1)
    return VLLMEngine(
        model, ENDS, LENGTH, 16, VLLMConfig(kv_cache_gib=0.25, timeout=timeout), lora or LoraConfig()
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_engines_agree_before_and_after_new_weights(tied):
    """The prompts stay the same, so that keys and values cached under older weights would show."""
    engine = start(small_llama(0, tied))
    for seed in (0, 1, 2):
        model = small_llama(seed, tied)
        engine.load_weights(model.named_parameters())
        first = check_agrees(engine, model)
    assert len({tuple(c.ids) for c in first[:4]}) > 1, "samples of a group must differ"
    backwards = engine.generate(requests(4)[::-1], TEMPERED)[::-1]
    assert [c.ids for c in backwards] == [c.ids for c in first], (
        "a result depends on its prompt and seed only"
    )
    engine.close()


def test_an_adapter_runs_beside_its_frozen_weights():
    """What is sampled is the adapted model, and only the adapter is given anew."""
    lora = LoraConfig(enabled=True, r=4, alpha=12.0)
    policy = Policy(small_llama(0), lora, seed=1)
    policy.model.eval()
    engine = start(policy.model, lora)
    engine.load_weights(policy.model.named_parameters())
    before = check_agrees(engine, policy.model)
    frozen = engine._weights.weights.stat()
    for seed in (1, 2):
        torch.manual_seed(seed)
        for parameter in policy.parameters.values():
            torch.nn.init.normal_(parameter, std=0.15)
        engine.load_weights(policy.model.named_parameters())
        after = check_agrees(engine, policy.model)
        assert [c.ids for c in after] != [c.ids for c in before]
    assert engine._weights.weights.stat() == frozen
    engine.close()


def test_an_engine_that_dies_or_hangs_in_a_rollout_is_replaced_with_the_current_weights():
    engine = start(small_llama(0))
    for seed in (0, 1):
        engine.load_weights(small_llama(seed).named_parameters())
    undisturbed = engine.generate(requests(4), TEMPERED)
    for fault in ("dies", "hangs"):
        first = engine.pid
        os.kill(first, signal.SIGSTOP)  # so that the rollout is under way when it dies
        if fault == "dies":
            threading.Timer(1.0, os.kill, (first, signal.SIGKILL)).start()
        engine.timeout = 300.0 if fault == "dies" else 5.0
        again = engine.generate(requests(4), TEMPERED)
        assert engine.pid != first
        assert [c.ids for c in again] == [c.ids for c in undisturbed]
        assert [c.logprobs for c in again] == [pytest.approx(c.logprobs, abs=1e-5) for c in undisturbed]
    engine.close()


def test_an_engine_that_fails_again_at_once_ends_the_rollout():
    engine = start(small_llama(0))
    engine.load_weights(small_llama(0).named_parameters())
    too_long = [Request(tuple(range(3, 103)) * 5, 0)]
    with pytest.raises(EngineFault, match="maximum"):
        engine.generate(too_long, TEMPERED)
    engine.close()


def test_a_run_samples_from_the_weights_that_every_update_made(tmp_path):
    """Also after a resume: the trainer's log-probabilities of what was sampled are the sampler's."""
    tokenizer = character_tokenizer(ALPHABET)
    for num_steps in (2, 4):  # the second trainer goes on from the first one's checkpoint
        model = small_llama(0, tied=True, vocab_size=len(tokenizer))
        trainer = make(
            tokenizer,
            tmp_path,
            model=model,
            num_steps=num_steps,
            checkpoint_every=1,
            num_iterations=2,
            engine="vllm",
            optimizer=OptimizerConfig(learning_rate=1e-2, schedule="constant"),
        )
        trainer.engine = start(model)
        history = trainer.train()
        trainer.engine.close()
    assert len(history) == 4
    for row in history:
        assert row["sampling/logp_difference"] < 1e-5
        assert row["sampling/missing_logprobs"] == 0
    assert len({row["reward"] for row in history}) > 1
