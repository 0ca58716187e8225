import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.batches import Tree, lay_out, pack, split_by_tokens
from training.logprobs import token_logprobs

CPU = torch.device("cpu")
TREES = [
    Tree([3, 4, 5], [[6, 7, 1], [8], [9, 10, 11, 1]]),
    Tree([5], [[3, 3], [4, 1]]),
    Tree([12, 3, 4, 4, 9], [[7, 1]]),
]


def alone(model, tree: Tree) -> torch.Tensor:
    """Log-probs of each branch from a plain, unpadded forward pass over prefix + branch."""
    found = []
    for branch in tree.branches:
        ids = torch.tensor([tree.prefix + branch])
        logprobs = torch.log_softmax(model(input_ids=ids).logits, -1)[0]
        start = len(tree.prefix) - 1
        found += [logprobs[start + i, token] for i, token in enumerate(branch)]
    return torch.stack(found)


@pytest.mark.parametrize("rows", [[[0], [1], [2]], [[0, 1, 2]], [[2, 0], [1]]])
def test_packed_and_shared_equal_unpacked_and_alone(model, rows):
    layout = lay_out([[TREES[i] for i in row] for row in rows], 0, CPU)
    got, _ = token_logprobs(model, layout)
    expected = torch.cat([alone(model, TREES[i]) for row in rows for i in row])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_gradient_equals_the_unpacked_one(model):
    weights = torch.linspace(-1, 1, 15, dtype=torch.float64)
    grads = []
    for value in (
        token_logprobs(model, lay_out([[TREES[0], TREES[1]], [TREES[2]]], 0, CPU))[0],
        torch.cat([alone(model, tree) for tree in TREES]),
    ):
        model.zero_grad()
        (value * weights[: len(value)]).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    # LlamaRMSNorm computes in float32, so sums taken in another order differ by its rounding
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=2e-6)


def test_the_padding_id_never_matters(model):
    results = [token_logprobs(model, lay_out([[TREES[0]], [TREES[1]]], pad, CPU))[0] for pad in (0, 7)]
    assert torch.equal(*results)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_micro_batches_hold_every_item_once_within_budget(sizes, budget):
    batches = split_by_tokens(sizes, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    assert all(len(b) == 1 or len(b) * max(sizes[i] for i in b) <= budget for b in batches)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 200))
def test_packing_holds_every_item_once_within_capacity(sizes, capacity):
    rows = pack(sizes, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    assert all(len(r) == 1 or sum(sizes[i] for i in r) <= capacity for r in rows)


def test_a_branch_ends_at_its_last_token_whatever_follows_it():
    """Rows of 5: a tree with two branches; a tree with an empty branch, one behind it, and padding."""
    layout = lay_out([[Tree([9, 9], [[1, 1], [2]])], [Tree([9], [[]]), Tree([9, 9], [[3]])]], 0, CPU)
    assert layout.input_ids.shape == (2, 5)
    assert layout.ends.tolist() == [3, 4, 5, 8]
