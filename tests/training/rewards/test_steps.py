import random
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.config import PromptConfig
from training.models import character_tokenizer
from training.prompts import PromptRenderer
from training.rewards.steps import Step, split_completion, split_text


def byte_level_bpe():
    """Trained as SmolLM2's is: bytes, each digit alone, merges that reach over line ends and punctuation."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["so we add\n\nthe sum.\n\n\n", "é 😀 。。", ".\n.\n.\n", "a.b.c.d. the\t\n the\n"] * 20
    backend.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>")


BYTES = PromptRenderer(byte_level_bpe(), PromptConfig(chat_template="none"))
CHARACTERS = PromptRenderer(character_tokenizer("0123456789+-= \nab。é."), PromptConfig(chat_template="none"))
RENDERERS = {"bytes": BYTES, "characters": CHARACTERS}
SEPARATORS = st.sampled_from(["\n", "\n\n", ".", " ", "。", "the", "\n."])
TEXTS = st.text(
    st.one_of(st.sampled_from("\n\n\n .。the0é😀"), st.characters(exclude_categories=["Cs"])), max_size=40
)


def check(steps, ids, decode, separator):
    ends = [step.end for step in steps]
    assert all(a < b for a, b in pairwise(ends))
    assert ends[-1] == len(ids) - 1
    text = decode(ids)
    assert "".join(step.text for step in steps) == text
    has_content = [bool(step.text.replace(separator, "").strip()) for step in steps]
    assert all(has_content) or len(steps) == 1
    done = ""
    for step in steps[:-1]:
        done += step.text
        assert decode(ids[: step.end + 1]).startswith(done)
        assert not decode(ids[: step.end]).startswith(done)


@given(TEXTS, SEPARATORS)
@example("a\n\n\n \n", "\n")
@example("", "\n")
@example("\n\n", "\n")
@example("😀\n。。é\n", "\n")
def test_the_texts_of_steps_are_the_text(text, separator):
    steps = split_text(text, separator)
    assert "".join(steps) == text
    assert all(part.replace(separator, "").strip() for part in steps) or len(steps) == 1
    assert all(part.endswith(separator) or part.rstrip().endswith(separator.rstrip()) for part in steps[:-1])


@pytest.mark.parametrize("name", RENDERERS)
@given(text=TEXTS, separator=SEPARATORS, ended=st.booleans())
@settings(deadline=None)
def test_ends_rise_to_the_last_token_and_texts_are_the_whole(name, text, separator, ended):
    renderer = RENDERERS[name]
    ids = renderer.completion_ids(text)
    ids = ids if ended or len(ids) == 1 else ids[:-1]
    check(split_completion(ids, renderer.decode, separator), ids, renderer.decode, separator)


@pytest.mark.parametrize("name", RENDERERS)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 60), separator=SEPARATORS)
@settings(deadline=None)
def test_whatever_ids_are_sampled(name, seed, size, separator):
    """Halves of characters, bytes that are no text, end tokens in the middle."""
    renderer = RENDERERS[name]
    draw, number = random.Random(seed), len(renderer.tokenizer)
    ids = [draw.randrange(number) for _ in range(size)]
    check(split_completion(ids, renderer.decode, separator), ids, renderer.decode, separator)


def test_steps_by_hand():
    ids = CHARACTERS.completion_ids("a+b\n \n3 = 3\n ")
    steps = split_completion(ids, CHARACTERS.decode, "\n")
    assert steps == [Step("a+b\n \n", 5), Step("3 = 3\n ", 13)]
    assert len(ids) == 14, "the end token belongs to the last step"
    assert split_text("\n\na\nb", "\n") == ["\n\na\n", "b"]
    assert split_text("a. .b..", ".") == ["a. .", "b.."]


def test_a_separator_of_several_bytes_ends_a_step_with_its_last_byte():
    ids = [*BYTES.tokenizer("a")["input_ids"]]
    bytes_ = [BYTES.tokenizer.convert_tokens_to_ids(token) for token in "ĠãĢĤb"]
    assert BYTES.decode(ids + bytes_) == "a 。b"
    assert split_completion(ids + bytes_, BYTES.decode, "。") == [Step("a 。", 4), Step("b", 5)]


def letters(ids):
    """Tokens of several characters each."""
    return "".join(("a\nb", "\nc\n", "d\n", "e\nf\n", "")[i] for i in ids)


@pytest.mark.parametrize(
    ("ids", "steps"),
    [
        ([0, 2], [Step("a\n", 0), Step("bd\n", 1)]),  # a token across a boundary ends the step it began in
        ([2, 3, 2], [Step("d\n", 0), Step("e\nf\n", 1), Step("d\n", 2)]),  # two steps end in one token
        (
            [2, 0],
            [Step("d\n", 0), Step("a\nb", 1)],
        ),  # the last token holds the end of the one before the last
        ([0, 4], [Step("a\n", 0), Step("b", 1)]),
        ([4], [Step("", 0)]),
    ],
)
def test_tokens_of_several_characters(ids, steps):
    assert split_completion(ids, letters, "\n") == steps
