"""`overlong`, `repetition` and `language`: values counted by hand."""

import pytest
import regex

from training.config import LanguageRewardConfig, RepetitionRewardConfig, RewardsConfig
from training.errors import BadInput
from training.languages import SCRIPTS
from training.rewards import load_reward


def grade(name, texts, **settings):
    return load_reward(name, RewardsConfig.model_validate(settings))(
        prompts=[""] * len(texts), completions=texts
    )


def test_repetition_counts_ngrams_that_came_before():
    # bigrams of "a b a b a": ab ba ab ba, two of four came before; the case of letters does not matter
    texts = ["a b A b a", "a b c", "a", "", "x x x x x"]
    got = grade("repetition", texts, repetition={"ngram_size": 2, "max_penalty": -0.5})
    assert got == [-0.25, 0.0, 0.0, 0.0, pytest.approx(-0.375)]


def test_repetition_is_open_r1s():
    """The formula as the paper's appendix C.2 and open-r1 write it: (1 - |distinct| / total) * max_penalty."""
    text = "so the sum is 7 and the sum is 7 and so the sum is 7"
    words = text.split()
    trigrams = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    assert grade("repetition", [text]) == [pytest.approx(-(1 - len(set(trigrams)) / len(trigrams)))]


@pytest.mark.parametrize(
    ("text", "target", "share"),
    [
        ("We add three and four", "en", 1.0),
        ("We add 三 and 四", "en", 3 / 5),
        ("我们 add", "zh", 2 / 3),
        ("これは本です", "ja", 1.0),
        ("это да yes", "ru", 2 / 3),
        ("naïve café", "fr", 1.0),
        (r"так как $\frac{ab}{cd}$ и \(foo\) x = 5", "ru", 1.0),
        ("```python\nprint(1)\n``` 好", "zh", 1.0),
        ("<think>好</think>", "zh", 1.0),
        ("हिन्दी word", "hi", 1 / 2),
        ("안녕 세계 hello", "ko", 2 / 3),
        ("12 + 3 = 15", "en", None),
        ("", "en", None),
    ],
)
def test_language_is_the_share_of_words_in_its_script(text, target, share):
    assert grade("language", [text], language={"target": target}) == [
        None if share is None else pytest.approx(share)
    ]


def test_every_script_is_one_that_unicode_knows():
    assert all(regex.compile(rf"\p{{{script}}}") for scripts in SCRIPTS.values() for script in scripts)
    assert len(SCRIPTS) > 60


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="target 'english': unknown; accepted: af, am, ar"):
        LanguageRewardConfig(target="english")
    with pytest.raises(ValueError, match="max_penalty"):
        RepetitionRewardConfig(max_penalty=1.0)


def test_a_reward_that_is_not_there_names_those_that_are():
    with pytest.raises(
        BadInput,
        match="accepted: math, code, countdown, reasoning_gym, format, overlong, repetition, language, equations, judge, model",
    ):
        load_reward("length", RewardsConfig())
