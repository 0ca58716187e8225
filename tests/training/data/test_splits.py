import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.config import SourceConfig, SplitsConfig
from training.data.formats import Example
from training.data.splits import SPLITS, divide, question_key, split_of
from training.errors import BadInput

SHARES = SplitsConfig(validation=0.1, test=0.2)
QUESTIONS = [f"What is {a} + {b}?" for a in range(20) for b in range(20)]


def source(split: str = "auto", name: str = "a") -> SourceConfig:
    return SourceConfig(kind="file", path=f"{name}.jsonl", split=split)


def examples(*questions: str, answer: str = "1") -> list[Example]:
    return [Example(question, answer, answer) for question in questions]


def members(division) -> dict[str, str]:
    return {row.question: row.split for row in division.rows.values()}


def test_shares_are_met():
    # 20,000 questions: three standard deviations of a share p are 3 * sqrt(p (1 - p) / 20000) < 0.009.
    splits = [split_of(question_key(f"question {i}"), SHARES) for i in range(20_000)]
    assert splits.count("test") / 20_000 == pytest.approx(0.2, abs=0.009)
    assert splits.count("validation") / 20_000 == pytest.approx(0.1, abs=0.009)


@given(st.lists(st.sampled_from(QUESTIONS), unique=True), st.randoms())
def test_other_rows_and_their_order_move_nothing(extra, random):
    base = QUESTIONS[::2]
    mixed = base + [question for question in extra if question not in base]
    random.shuffle(mixed)
    before, after = (
        divide([(source(), examples(*base))], SHARES),
        divide([(source(), examples(*mixed))], SHARES),
    )
    assert members(before).items() <= members(after).items()
    for split in SPLITS:
        kept = [key for key, row in after.split(split) if row.question in base]
        assert kept == [key for key, _ in before.split(split)]


@given(st.text(min_size=1), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_another_test_share_never_moves_validation(question, validation, test, other):
    key = question_key(question)
    one = split_of(key, SplitsConfig(validation=validation / 100, test=test / 100))
    two = split_of(key, SplitsConfig(validation=validation / 100, test=other / 100))
    assert (one == "validation") == (two == "validation")


@given(st.lists(st.lists(st.sampled_from(QUESTIONS[:30])), min_size=1, max_size=4), st.integers(0, 4))
def test_no_question_is_in_two_splits_and_every_row_is_accounted_for(lists, explicit):
    """Any number of sources, one of them with a split of its own; three more keep every split from being empty."""
    lists = [*lists, ["t?"], ["v?"], ["s?"]]
    splits = ["test" if i == explicit else "auto" for i in range(len(lists) - 3)] + [
        "train",
        "validation",
        "test",
    ]
    division = divide(
        [(source(split), examples(*questions)) for split, questions in zip(splits, lists, strict=True)],
        SHARES,
    )
    rows = [row for split in SPLITS for _, row in division.split(split)]
    assert {row.question for row in rows} == {question for questions in lists for question in questions}
    assert len({row.question for row in rows}) == len(rows)
    assert len(rows) + division.duplicates.total() == sum(map(len, lists))


def test_rows_are_in_hash_order():
    division = divide([(source(), examples(*QUESTIONS))], SHARES)
    for split in SPLITS:
        keys = [key for key, _ in division.split(split)]
        assert keys == sorted(keys)
        assert all(key == question_key(row.question).hex() for key, row in division.split(split))


def test_duplicates_are_counted_and_the_first_is_kept():
    rows = [*examples(*QUESTIONS), *examples(QUESTIONS[0]), *examples(QUESTIONS[1], answer="2")]
    division = divide([(source(), rows)], SHARES)
    assert division.duplicates == {0: 2}
    assert division.contradictions == {0: 1}
    assert division.rows[question_key(QUESTIONS[1])].answer == "1"


def test_spacing_and_unicode_composition_make_no_new_question():
    assert question_key("Qu\u00e9  es\n1?") == question_key(" Que\u0301 es 1? ")
    assert question_key("x > 1?") != question_key("X > 1?")


def test_auto_source_leaves_a_held_out_question_where_it_is():
    division = divide(
        [(source(), examples(*QUESTIONS)), (source("test", "b"), examples(*QUESTIONS[:50]))], SHARES
    )
    assert all(division.rows[question_key(question)].split == "test" for question in QUESTIONS[:50])
    assert division.duplicates == {0: 50}


def test_question_in_train_and_test_names_it_and_both_sources():
    with pytest.raises(BadInput) as caught:
        divide(
            [(source("train", "one"), examples("a?", "b?")), (source("test", "two"), examples("b?", "c?"))],
            SHARES,
        )
    message = str(caught.value)
    assert "'b?'" in message
    assert "split train (prepare.sources.0, file:one.jsonl)" in message
    assert "split test (prepare.sources.1, file:two.jsonl)" in message


def test_a_source_may_leave_out_what_another_split_has():
    train = source("train", "one").model_copy(update={"overlap": "leave_out"})
    division = divide([(train, examples("a?", "b?")), (source("test", "two"), examples("b?", "c?"))], SHARES)
    assert members(division) == {"a?": "train", "b?": "test", "c?": "test"}
    assert division.duplicates == {0: 1}


def test_too_few_rows_for_a_split():
    tiny = [question for question in QUESTIONS if split_of(question_key(question), SHARES) == "train"][:3]
    with pytest.raises(BadInput, match=r"split validation is empty: 3 distinct questions .* share of 0\.1"):
        divide([(source(), examples(*tiny))], SHARES)
    held_out = [question for question in QUESTIONS if split_of(question_key(question), SHARES) != "train"][:3]
    with pytest.raises(BadInput, match="split train is empty"):
        divide([(source(), examples(*held_out))], SHARES)


def test_a_share_of_zero_may_stay_empty():
    division = divide([(source(), examples("a?", "b?"))], SplitsConfig(validation=0.0, test=0.0))
    assert set(members(division).values()) == {"train"}
