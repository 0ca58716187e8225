"""What is odd about single rows: unsafe characters, another script, an answer given away, a length unlike the others."""

from __future__ import annotations

import functools
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import regex

from training.languages import SCRIPTS, words

_UNSAFE = regex.compile(
    r"[\p{Cc}\p{Cf}\p{Co}\p{Cn}\p{Cs}--[\t\n\r]]|\p{Latin}(?=\p{Cyrillic})|\p{Cyrillic}(?=\p{Latin})",
    regex.VERSION1,
)
_ASCII_CONTROL = regex.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_JOINED = regex.compile(
    r"[\p{L}\p{M}--\p{Latin}--\p{Greek}--\p{Cyrillic}]|\p{Extended_Pictographic}|[\uFE0F\p{EMod}]",
    regex.VERSION1,
)
_JOINERS = "\u200c\u200d"
_MARK = regex.compile(
    r"(?:\\boxed\s*\{|####|(?:answer|result|solution)\s*(?:is:?|:|=))\s*\$?", regex.IGNORECASE
)
_BETWEEN_WORDS = regex.compile(r"[\W_]+")
_SENTENCE = regex.compile(r"(?<=[.!?。！？])\s+|\n+")
LEAKED_WORDS = 8
"""Words from which on an answer, or a solution's last sentence, says too much where the question holds it."""
LEAST_SPREAD = 0.1
"""Smallest spread of lengths, as a factor of about 1.1: without it, rows of 7 tokens among ones of 6 would be outliers."""


def unsafe_characters(text: str) -> str | None:
    """The first character that a reader doesn't see as what it is, by code point and name; None where there is none.

    Control characters but tab and line ends, characters that turn the writing direction or have no width, private use,
    unassigned ones, half surrogates, and a Latin letter beside a Cyrillic one. Joiners are at home between letters of
    scripts that need them and in emoji.
    """
    if text.isascii() and not _ASCII_CONTROL.search(text):
        return None
    for match in _UNSAFE.finditer(text):
        place, character = match.start(), match[0]
        if character in _JOINERS and place and _JOINED.match(text[place - 1]):
            continue
        name = unicodedata.name(character, unicodedata.category(character))
        mixed = " beside a letter of another script" if character.isalpha() else ""
        return f"U+{ord(character):04X} {name}{mixed}"
    return None


def usual_scripts(texts: Iterable[str]) -> tuple[str, ...]:
    """The scripts of a language (see training.languages.SCRIPTS) that hold most letters of the texts; Latin if there is none."""
    letters: Counter[str] = Counter()
    for text in texts:
        for word in words(text):
            letters[_script(word[0])] += len(word)
    groups = sorted(set(SCRIPTS.values()), key=len)  # the smaller one where more scripts hold no more letters
    return max(groups, key=lambda group: (sum(letters[script] for script in group), group == ("Latin",)))


def script_share(text: str, scripts: Sequence[str]) -> float:
    """Share of the letters of a text's words that are of these scripts; 1 for a text without words."""
    if text.isascii() and "Latin" in scripts:
        return 1.0
    found = words(text)
    own = sum(len(word) for word in found if _script(word[0]) in scripts)
    return own / sum(map(len, found)) if found else 1.0


def leaked(question: str, completion: str, answer: str) -> str | None:
    """How the question gives its answer away, or None.

    `marked`: the answer follows a mark (`#### 18`, `\\boxed{18}`, `the answer is 18`). `answer`: the answer has
    LEAKED_WORDS words or more, and the question holds them in a row. `solution`: the same of the reference completion's
    last sentence. The answer of many a problem is among its figures or choices, so a shorter one within the question says
    nothing.
    """
    if answer in question and any(
        question[mark.end() :].startswith(answer) and not question[mark.end() + len(answer) :][:1].isalnum()
        for mark in _MARK.finditer(question)
    ):
        return "marked"
    last = next((part for part in reversed(_SENTENCE.split(completion.strip())) if part.strip()), "")
    for what, text in (("answer", answer), ("solution", last)):
        said = _padded(text)
        if said.count(" ") > LEAKED_WORDS and said in _padded(question):
            return what
    return None


def deviations(lengths: np.ndarray, groups: Sequence[str]) -> np.ndarray:
    """How far each length is from its group's median, in robust standard deviations [rows].

    The modified z-score of Iglewicz and Hoaglin (1993), 0.6745 (x - median) / MAD, of log lengths: a text of 5 tokens among
    ones of 50 is as odd as one of 500. Spreads below LEAST_SPREAD count as that.
    """
    logs, names = np.log(np.maximum(lengths, 1)), np.array(groups)
    scores = np.zeros(len(logs))
    for name in np.unique(names):
        own = names == name
        distances = logs[own] - np.median(logs[own])
        scores[own] = distances / max(np.median(np.abs(distances)) / 0.6745, LEAST_SPREAD)
    return scores


def _padded(text: str) -> str:
    return f" {_BETWEEN_WORDS.sub(' ', text.casefold()).strip()} "


@functools.lru_cache(maxsize=65536)
def _script(character: str) -> str:
    return next((name for name, pattern in _SCRIPTS.items() if pattern.match(character)), "")


_SCRIPTS = {
    name: regex.compile(rf"\p{{{name}}}")
    for name in dict.fromkeys(s for group in SCRIPTS.values() for s in group)
}
