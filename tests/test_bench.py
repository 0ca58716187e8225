"""What the benchmark counts and shows: operations against torch's own count, the page from its rows."""

import json
import subprocess

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

from benchmarks.bench.__main__ import PAGE, RAW, SECTION, tables
from benchmarks.bench.work import WORKS, Shape, Work, half_solved, hashed, needed
from benchmarks.pages import shown
from tests.shared import ROOT
from tests.training.conftest import small_model

BY_HAND = Shape(layers=1, hidden=2, heads=1, head_size=2, vocabulary=3, body=10)


def test_operations_by_hand():
    # two tokens: 2 x 10 x 2 in the layers, 4 x 2 x (1 + 2) in attention, 2 x 2 x 3 for one token's logits
    assert BY_HAND.forward(0, 2, 1) == 40 + 24 + 12
    # one token behind two: it sees three
    assert BY_HAND.forward(2, 1, 0) == 20 + 24


@pytest.mark.parametrize("earlier", [1, 7])
def test_a_decoded_tokens_operations_are_those_that_torch_counts(earlier):
    model, cache = small_model(dtype=torch.float32), DynamicCache()
    model.set_attn_implementation("eager")  # whose products torch counts
    ids = torch.arange(3, 3 + earlier + 1)[None]
    with torch.no_grad():
        model(input_ids=ids[:, :-1], past_key_values=cache)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids[:, -1:], past_key_values=cache)
    assert counter.get_total_flops() == Shape.of(model).forward(earlier, 1, 1)


def test_a_groups_prompt_is_counted_once_and_a_gradient_three_times():
    work = Work("two", "grpo", "add", num_prompts=1, num_generations=2, completion_length=2)
    prompt, completion = BY_HAND.forward(0, 3, 0), BY_HAND.forward(3, 2, 2)
    found = needed(work, BY_HAND, [3], [2, 2])
    assert found["update"] == 3 * (prompt + 2 * completion)
    # the first token's logits come from the prompt, the last token is never read
    assert found["rollout"] == BY_HAND.forward(0, 3, 1) + 2 * BY_HAND.forward(3, 1, 1)
    assert "scoring" not in found


def test_rewards_differ_within_a_group_or_not():
    texts = ["a", "b", "c", "d"]
    assert len(set(hashed(texts))) == 4
    rewards = half_solved(texts, prompts=["p", "p", "q", "q"])
    assert rewards[0] != rewards[1]
    assert rewards[2:] == [1.0, 1.0]


@pytest.mark.skipif(not RAW.is_file(), reason="not measured yet")
def test_the_page_is_the_measured_one():
    record = json.loads(RAW.read_text())
    assert shown(PAGE, SECTION) == tables(record)
    assert {result["work"] for result in record["works"]} <= set(WORKS)


@pytest.mark.parametrize("target", ["run", "test", "bench", "test-vllm"])
def test_make_knows_how_to_set_up(target):
    """Each target's commands can be listed; none waits for itself."""
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
