import pytest
import torch

from tests.training.conftest import small_model
from training import logprobs as module
from training.batches import Tree, lay_out
from training.logprobs import token_logprobs

LAYOUT = lay_out([[Tree([3, 4], [[5, 6, 7], [8, 1]])], [Tree([9], [[4, 4, 4, 1]])]], 0, torch.device("cpu"))


def plain(model, temperature):
    logits = model(
        input_ids=LAYOUT.input_ids, position_ids=LAYOUT.position_ids, attention_mask=LAYOUT.attention_mask
    ).logits
    rows = torch.log_softmax(logits.flatten(0, 1)[LAYOUT.sources] / temperature, -1)
    return rows.gather(-1, LAYOUT.targets[:, None]).squeeze(-1), -(rows.exp() * rows).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [2, 512])
def test_values_and_gradients_equal_plain_log_softmax(monkeypatch, temperature, tied, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    model = small_model(tied=tied)
    results = []
    for logprobs, entropy in (token_logprobs(model, LAYOUT, temperature), plain(model, temperature)):
        model.zero_grad()
        (logprobs * torch.arange(9)).sum().add(0.3 * entropy.square().sum()).backward()
        results.append((logprobs, entropy, torch.cat([p.grad.flatten() for p in model.parameters()])))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)


def test_log_softmax_is_float32_for_a_bfloat16_model():
    logprobs, entropy = token_logprobs(small_model(dtype=torch.bfloat16), LAYOUT)
    assert logprobs.dtype == entropy.dtype == torch.float32
