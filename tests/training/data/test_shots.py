import pytest

from training.config import PromptConfig
from training.data.shots import Shots
from training.data.splits import Row
from training.errors import BadInput

TRAIN = [(f"{i:02}", Row("train", 0, f"{i}+1?", f"it is {i + 1}", str(i + 1))) for i in range(5)]


def prompt(few_shot, **settings):
    return PromptConfig(template="Q: {question}\n", completion="{solution}.", few_shot=few_shot, **settings)


def test_solved_questions_are_earlier_turns():
    context, user = Shots.of(TRAIN, prompt(2)).shown(TRAIN[4][1], "Q: 4+1?\n")
    assert [message["role"] for message in context] == ["user", "assistant"] * 2
    assert [m["content"] for m in context] == ["Q: 0+1?\n", "it is 1.", "Q: 1+1?\n", "it is 2."]
    assert user == "Q: 4+1?\n"


def test_no_row_is_shown_itself():
    shots = Shots.of(TRAIN, prompt(2))
    for number in range(5):
        context, _ = shots.shown(TRAIN[number][1], "")
        assert len(context) == 4
        assert f"Q: {number}+1?\n" not in [message["content"] for message in context]


def test_without_a_chat_template_they_stand_in_the_message():
    shots = Shots.of(TRAIN, prompt(1, chat_template="none"))
    assert shots.shown(TRAIN[3][1], "Q: 3+1?\n") == ([], "Q: 0+1?\nit is 1.\n\nQ: 3+1?\n")


def test_conversations_and_rows_without_a_completion_are_neither_shown_nor_given_any():
    talk = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"})
    first = [
        ("00", Row("train", 0, "chat", "x", None, context=talk)),
        ("01", Row("train", 0, "open", None, "{}")),
    ]
    shots = Shots.of([*first, *TRAIN], prompt(1))
    assert [question for question, _, _ in shots.rows] == ["0+1?", "1+1?"]
    assert shots.shown(first[0][1], "chat") == (list(talk), "chat")


def test_none_are_shown_by_default():
    assert Shots.of([], prompt(0)).shown(TRAIN[0][1], "q") == ([], "q")


def test_too_few_rows_are_named():
    with pytest.raises(
        BadInput, match=r"prompt.few_shot = 5: the train split has only 5 rows with a completion"
    ):
        Shots.of(TRAIN, prompt(5))
