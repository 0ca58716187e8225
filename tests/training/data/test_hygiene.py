"""What is wrong with questions: values worked out by hand, laws, another implementation, and real data sets."""

from __future__ import annotations

import json
import random

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.shared import SHARED, needs_shared
from training.data.hygiene.checks import (
    deviations,
    leaked,
    script_share,
    unsafe_characters,
    usual_scripts,
)
from training.data.hygiene.overlap import find_overlaps
from training.data.hygiene.twins import find_twins
from training.data.hygiene.words import Words, normal_words

STORY = "Natalia sold clips to {} of her friends in April, and then she sold half as many clips in May. How many did she sell?"


def test_words_ignore_layout_and_keep_figures():
    same = ["Find $x$ if \\(x + 1 = 3\\).", "find  x, if\nx+1=3", "Find $\\left. x \\right.$ if x + 1 = 3"]
    assert {tuple(word.casefold() for word in normal_words(text)) for text in same} == {
        ("find", "x", "if", "x", "+", "1", "=", "3")
    }
    assert normal_words("\\dfrac12 of 1,000.5 × 10²") == ["\\frac", "12", "of", "1,000.5", "×", "10", "²"]
    assert normal_words("well-known x-1") == ["well", "known", "x", "-", "1"]
    assert normal_words("共有3个") == ["共", "有", "3", "个"]


@pytest.mark.parametrize(
    ("first", "second", "twins"),
    [
        ("3 + 4", "3 + 5", False),
        ("3 + 4", "3 - 4", False),
        ("What is 88 ÷ 4 ÷ 2?", "What is 88 ÷ (4 ÷ 2)?", False),
        ("Find 10²", "Find 102", False),
        (STORY.format(48), STORY.format(50), False),
        (STORY.format(48), STORY.format(48).replace("her friends", "her good friends"), False),  # 18 of 23
        (STORY.format(48), STORY.format(48).upper().lower().replace(",", " ;"), True),
        (f"Please: {STORY.format(48)}", STORY.format(48), True),  # one trigram of 23 differs
        ("yes", "Yes!", True),
        ("yes or", "yes", False),
    ],
)
def test_twins_by_hand(first, second, twins):
    found = find_twins(Words.of([first, second]), 0.9)
    assert bool(found) is twins


def test_twins_are_those_that_all_pairs_give():
    """Against a plain double loop over sets."""
    draw = random.Random(5)
    texts = [
        " ".join(draw.choice(["red", "green", "blue", "big", "7", "8"]) for _ in range(draw.randint(1, 9)))
        for _ in range(300)
    ]
    texts += [f"{text} {draw.choice(['red', 'big'])}" for text in texts[:60]]

    def grams(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[i : i + 3]) for i in range(len(words) - 2)} or {tuple(words)}

    for threshold in (0.5, 0.75, 1.0):
        expected, kept = {}, []
        for i, text in enumerate(texts):
            for j in kept:
                a, b = grams(text), grams(texts[j])
                figures = [[word for word in t.split() if word.isdigit()] for t in (text, texts[j])]
                if figures[0] == figures[1] and len(a & b) / len(a | b) >= threshold:
                    expected[i] = j, len(a & b) / len(a | b)
                    break
            else:
                kept.append(i)
        assert len(expected) > 20
        found = find_twins(Words.of(texts, [str(i) for i in range(len(texts))]), threshold)
        assert found == {i: (j, pytest.approx(similarity)) for i, (j, similarity) in expected.items()}


def test_held_out_questions_stay_and_train_ones_with_another_answer_too():
    texts = [STORY.format(1), f"Please: {STORY.format(1)}", f"So: {STORY.format(1)}"]
    assert set(find_twins(Words.of(texts), 0.9, fixed=2)) == {2}
    assert set(find_twins(Words.of(texts), 0.9, 1, ["1", "2", "3"])) == {1, 2}
    assert set(find_twins(Words.of(texts), 0.9, 0, ["1", "2", "1"])) == {2}


def test_a_frame_that_nearly_all_questions_share_is_no_part_of_them():
    numbers = [f"{a} + {b}" for a in range(5) for b in range(6)]
    framed = [f"What is {text}? Reason step by step, then answer." for text in numbers]
    assert np.array_equal(Words.of(framed).whole(), Words.of(numbers).whole())
    few = Words.of(framed[:10])
    assert few.lengths.tolist() == [11] * 10
    assert find_twins(Words.of(framed), 0.9) == {}


def test_the_same_figures_in_another_frame_are_another_question():
    pairs = [f"{a}, {b}" for a in range(5, 10) for b in range(2, 7)]
    gcd, lcm = ([f"Find the {what} of {text}." for text in pairs] for what in ("GCD", "LCM"))
    words = Words.of(gcd + lcm, ["gcd"] * 25 + ["lcm"] * 25)
    assert find_twins(words, 0.9) == {}
    assert find_overlaps(words[:25], words[25:], 13, 0.8) == []
    bare = Words.of(pairs)
    assert [one.train for one in find_overlaps(words[25:], bare, 13, 0.8)] == list(range(25))
    few = Words.of(gcd[:3])  # too few to see a frame
    assert [one.train for one in find_overlaps(words, few, 13, 0.8)] == [0, 1, 2]


def test_contamination_by_hand():
    test = [
        STORY.format(48),
        "3 + 4",
        "Name the largest planet of all that go around our own sun, please, and say why it is so",
    ]
    train = [
        f"Here is a riddle for you. {STORY.format(48)} Reason step by step.",  # all of it, with more around it
        STORY.format(50),  # other numbers
        "3 + 5",
        "3 + 4!",
        "3+4",
        " ".join(STORY.format(48).split()[:18]),  # 18 of 25 words
    ]
    found = find_overlaps(Words.of(train), Words.of(test), 13, 0.8)
    assert [(one.train, one.evaluation, one.covered) for one in found] == [(0, 0, 1.0), (4, 1, 1.0)]
    found = find_overlaps(Words.of(train), Words.of(test), 13, 0.7)
    assert [(one.train, one.evaluation) for one in found] == [(0, 0), (4, 1), (5, 0)]
    assert found[-1].covered == pytest.approx(18 / 25)


def test_a_template_that_many_train_questions_share_is_no_contamination():
    template = (
        "In the game of the seven lamps a player moves from lamp to lamp until {} is reached; who wins then?"
    )
    names = [
        f"lamp {name}"
        for name in [
            "red",
            "green",
            "blue",
            "gold",
            "pink",
            "grey",
            "black",
            "white",
            "cyan",
            "lime",
            "navy",
            "teal",
        ]
    ]
    few, many = names[:5], names
    for group, expected in ((few, 5), (many, 0)):
        train = Words.of([template.format(name) for name in group])
        assert len(find_overlaps(train, Words.of([template.format("the last lamp")]), 13, 0.5)) == expected


def math(split: str) -> list[str]:
    rows = pq.read_table(SHARED / "math" / f"{split}.parquet", columns=["reward_model"]).to_pylist()
    return [row["reward_model"]["ground_truth"]["question"] for row in rows]


def lines(path: str, column: str) -> list[str]:
    return [json.loads(line)[column] for line in (SHARED / path).open(encoding="utf-8")]


@needs_shared
def test_math_500_is_found_in_math_test_and_its_train_file_holds_the_other_4500():
    """The test file's questions end with an instruction that MATH-500's do not have."""
    test, chosen = math("test"), lines("math500/test.jsonl", "problem")
    found = find_overlaps(Words.of(test), Words.of(chosen), 13, 0.8)
    assert {one.evaluation for one in found} == set(range(500))
    inside = {one.train for one in found if one.covered == 1}
    assert len(inside) == 500
    others = [question for i, question in enumerate(test) if i not in inside]
    twelve_thousand = math("train") + others
    assert len(twelve_thousand) == 12_000
    train = Words.of(twelve_thousand)
    leaked = {one.train for one in find_overlaps(train, Words.of(test), 13, 1.0)}
    assert leaked >= set(range(7_500, 12_000))
    assert len(leaked) <= 4_510  # a few of MATH's own train questions are in its test file
    assert len({one.evaluation for one in find_overlaps(train, Words.of(chosen), 13, 1.0)}) <= 10


@needs_shared
def test_gsm8k_is_clean():
    train, test = (lines(f"gsm8k/{split}.jsonl", "question") for split in ("train", "test"))
    assert find_overlaps(Words.of(train), Words.of(test), 13, 0.8) == []
    [(pair, (twin, similarity))] = find_twins(Words.of(test + train), 0.9, fixed=len(test)).items()
    assert (pair > len(test), twin > len(test)) == (True, True)
    assert similarity == pytest.approx(0.93, abs=0.01)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("plain\ttext\r\n, déjà vu, 数, α", None),
        ("a\u202eb", "U+202E RIGHT-TO-LEFT OVERRIDE"),
        ("2\u200b3", "U+200B ZERO WIDTH SPACE"),
        ("\ufeffWhat", "U+FEFF ZERO WIDTH NO-BREAK SPACE"),
        ("a\x07", "U+0007 Cc"),
        ("a\ue000", "U+E000 Co"),
        ("a\u0378", "U+0378 Cn"),
        ("p\u0430ypal", "U+0070 LATIN SMALL LETTER P beside a letter of another script"),
        ("Δx, 5μm", None),
        ("क्\u200dष 👩\u200d🔬", None),
        ("a\u200db", "U+200D ZERO WIDTH JOINER"),
    ],
)
def test_unsafe_characters(text, found):
    assert unsafe_characters(text) == found


@pytest.mark.parametrize(
    ("question", "completion", "answer", "how"),
    [
        ("Ann has 18 pens. How many pens has Ann?", "Ann has 18 pens.", "18", None),
        ("2 + 3 = ? The answer is 5.", "5", "5", "marked"),
        ("2 + 3 = ? #### 5", "5", "5", "marked"),
        ("2 + 3 = ? \\boxed{5}", "5", "5", "marked"),
        ("2 + 30 = ? #### 57", "5", "5", None),
        ("Sort: b a c. Is it a, b, c?", "a b c", "a b c", None),
        ("Sort h g f e d c b a. Is it a, b, c, d, e, f, g, h?", "", "a b c d e f g h", "answer"),
        (
            "How much? Hint: so she pays 5 dollars for each of the pens.",
            "10 / 2 = 5.\nSo she pays 5 dollars for each of the pens.",
            "5",
            "solution",
        ),
    ],
)
def test_answers_given_away(question, completion, answer, how):
    assert leaked(question, completion, answer) == how


def test_lengths_unlike_the_others_by_hand():
    """Median 50, MAD of the logs below the least spread of 0.1: |log(x / 50)| / 0.1."""
    scores = deviations(np.array([50] * 9 + [5, 500, 55]), ["a"] * 12)
    assert scores[:9].tolist() == [0] * 9
    assert scores[9:] == pytest.approx([-23.026, 23.026, 0.953], abs=1e-3)
    spread = np.array([1, 2, 4, 8, 16])  # MAD is log 2
    assert deviations(spread, ["a"] * 5)[-1] == pytest.approx(2 * 0.6745)
    assert deviations(np.array([5, 500]), ["a", "b"]).tolist() == [0, 0]


def test_scripts():
    assert usual_scripts(["How many?", "Сколько?", "How?"]) == ("Latin",)
    assert usual_scripts(["小明有多少苹果？"]) == ("Han",)
    assert usual_scripts(["リンゴはいくつですか。"]) == ("Han", "Hiragana", "Katakana")
    assert usual_scripts(["3 + 4"]) == ("Latin",)
    assert script_share("3 + $x$", ("Latin",)) == 1
    assert script_share("Finde den Wert", ("Latin",)) == 1
    assert script_share("число two", ("Latin",)) == 3 / 8


def test_ten_thousand_questions_of_one_template_are_no_twins():
    texts = [
        f"Box {i} of the shop holds {i * 7} red and {i % 13} blue balls; how many balls are there in it?"
        for i in range(10_000)
    ]
    words = Words.of(texts)
    assert set(words.lengths) == {9}  # from the number to "blue": the rest is the template's
    assert find_twins(words, 0.9) == {}
    assert find_overlaps(words, Words.of(texts[:100]), 13, 0.8)[0].covered == 1


@pytest.mark.parametrize("size", [1, 7])
def test_what_is_held_at_once_changes_nothing(size, monkeypatch):
    """Twins and overlaps of made-up questions, a few texts at a time and all together."""
    draw = random.Random(4)
    words = [f"word{i}" for i in range(6)]
    texts = [
        " ".join([*draw.choices(words, k=draw.randint(2, 9)), str(draw.randint(1, 4))]) for _ in range(300)
    ]
    texts += [f"{text} please" for text in texts[:60]]
    own, others = Words.of(texts), Words.of([*texts[10:40], "word1 word2 9"])
    twins, overlaps = find_twins(own, 0.6, 20), find_overlaps(own, others, 3, 0.7)
    assert len(twins) > 20
    assert len(overlaps) > 20
    monkeypatch.setattr("training.data.hygiene.twins.PART", size)
    monkeypatch.setattr("training.data.hygiene.overlap.SLICE", size)
    assert find_twins(own, 0.6, 20) == twins
    assert find_overlaps(own, others, 3, 0.7) == overlaps
