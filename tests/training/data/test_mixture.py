import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.config import SourceConfig, SplitsConfig
from training.data.formats import Example
from training.data.mixture import shares, total_without_repeats, train_rows
from training.data.splits import divide
from training.errors import BadInput


def mixed(sizes, weights, size=None):
    """Rows of sources of these sizes, one letter a source, by id."""
    sources = [
        SourceConfig(kind="file", path=f"{name}.jsonl", split="train", weight=weight)
        for name, weight in zip("abc", weights, strict=False)
    ]
    readers = [
        (source, [Example(f"{source.path} {i}", "1", "1") for i in range(n)])
        for source, n in zip(sources, sizes, strict=True)
    ]
    return list(train_rows(divide(readers, SplitsConfig()), sources, size))


def test_without_weights_every_row_is_there_once():
    rows = mixed([5, 3], [None, None])
    assert len(rows) == 8
    assert [key for key, _ in rows] == sorted(key for key, _ in rows)


def test_the_largest_mixture_without_repeats():
    """100 and 10 rows, three to one: 10 rows are a quarter of 40."""
    rows = mixed([100, 10], [3.0, 1.0])
    assert [sum(row.source == s for _, row in rows) for s in (0, 1)] == [30, 10]
    everything = mixed([100, 10], [None, None])
    first = [key for key, row in everything if row.source == 0][:30]
    assert [key for key, row in rows if row.source == 0] == first


def test_a_size_may_repeat_rows_whole_passes_first():
    """Of 40 rows half are of a source of 8: twice each, and 4 of them a third time."""
    rows = mixed([100, 8], [0.5, 0.5], size=40)
    small = [key for key, row in rows if row.source == 1]
    assert len(small) == 20
    assert len({key.partition("-")[0] for key in small}) == 8
    assert [sum(key.endswith(end) for key in small) for end in ("-2", "-3", "-4")] == [8, 4, 0]
    assert len({key for key, _ in rows}) == 40


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=5), st.integers(0, 500))
def test_shares_sum_up_and_are_within_one(weights, total):
    counts = shares(weights, total)
    assert sum(counts) == total
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - weight / sum(weights) * total) < 1 + 1e-6


@given(st.lists(st.tuples(st.floats(0.01, 10), st.integers(1, 60)), min_size=1, max_size=4))
def test_nothing_repeats_and_one_source_is_used_up(pairs):
    weights, held = [w for w, _ in pairs], [n for _, n in pairs]
    total = total_without_repeats(weights, held)
    assert all(count <= n for count, n in zip(shares(weights, total), held, strict=True))
    parts = [weight / sum(weights) for weight in weights]
    assert any((total + 1) * part > n - 1e-6 for part, n in zip(parts, held, strict=True))


@pytest.mark.parametrize(
    ("sizes", "weights", "size", "expected"),
    [
        ([5, 5], [1.0, None], None, r"prepare.sources.1 \(file:b.jsonl\): gives 5 train rows and has no weight"),
        ([5, 5], [None, None], 9, "prepare.mixture_rows = 9: no source has a weight"),
        ([50, 1], [1.0, 0.001], 9, r"prepare.sources.1 .* gives it none of 9 rows"),
    ],
)  # fmt: skip
def test_weights_that_say_too_little_are_named(sizes, weights, size, expected):
    with pytest.raises(BadInput, match=expected):
        mixed(sizes, weights, size)


def test_a_weight_of_a_held_out_source_is_refused():
    sources = [
        SourceConfig(kind="file", path=f"{split}.jsonl", split=split, weight=1.0)
        for split in ("train", "test")
    ]
    division = divide([(s, [Example(f"{s.path}?", "1", "1")]) for s in sources], SplitsConfig())
    with pytest.raises(BadInput, match=r"weight = 1.0, but it gives no train rows"):
        train_rows(division, sources, None)
