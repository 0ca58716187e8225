"""The scripts in which languages are written, and the words of a text that tell its language."""

from __future__ import annotations

import regex

_LANGUAGES_OF = {
    ("Latin",): "af ca cs cy da de en es et eu fi fr ga gl hr hu id is it lt lv ms mt nl no pl pt ro sk sl sq sv sw tl tr vi",
    ("Cyrillic",): "be bg kk ky mk mn ru tg uk",
    ("Han",): "zh",
    ("Han", "Hiragana", "Katakana"): "ja",
    ("Hangul",): "ko",
    ("Arabic",): "ar fa ps ur",
    ("Hebrew",): "he yi",
    ("Devanagari",): "hi mr ne",
    ("Bengali",): "as bn",
    ("Gurmukhi",): "pa", ("Gujarati",): "gu", ("Tamil",): "ta", ("Telugu",): "te", ("Kannada",): "kn",
    ("Malayalam",): "ml", ("Sinhala",): "si", ("Thai",): "th", ("Lao",): "lo", ("Khmer",): "km", ("Myanmar",): "my",
    ("Greek",): "el", ("Armenian",): "hy", ("Georgian",): "ka", ("Ethiopic",): "am",
}  # fmt: skip
SCRIPTS = {code: scripts for scripts, codes in sorted(_LANGUAGES_OF.items()) for code in codes.split()}
"""The Unicode scripts in which each language is written, by ISO 639-1 code."""
_NO_WORDS = regex.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\\(.*?\\\)|\\\[.*?\\\]|\\[a-zA-Z]+|</?\w+>",
    regex.DOTALL,
)
_WORD = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
    r"|\p{Latin}[\p{Latin}\p{M}]+|[\p{L}--\p{Latin}][\p{L}\p{M}--\p{Latin}]*",
    regex.VERSION1,
)


def words(text: str) -> list[str]:
    """The words of a text, not its numbers, formulas, code, tags and single Latin letters (variables).

    In scripts without spaces between words each character counts.
    """
    return _WORD.findall(_NO_WORDS.sub(" ", text))
