"""Texts as sequences of words in a normal form, all of them in one array, and their n-grams."""

from __future__ import annotations

import hashlib
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import regex

_LAYOUT = regex.compile(r"\\(?:left|right|bigg?[lr]?|displaystyle)(?!\p{L})|\\[,;:! ()\[\]]|[${}~]")
_FRACTION = regex.compile(r"\\[dt]frac")
_WORD = regex.compile(
    r"\d+(?:[.,]\d+)*|\p{No}"
    r"|\\\p{L}+"
    r"|[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
    r"|[\p{L}\p{M}]+"
    r"|(?<!\p{L})-|-(?!\p{L})|(?<=[\d)])!"
    r"|[\p{S}*/%&#@_()]"
)
_FORMAL = regex.compile(r"[^\p{L}\p{M}]|\p{Lu}{2,}$|[b-hj-zB-HJ-Z]$")
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
FRAME_ROWS = 20
"""Fewest questions of a source of which a frame is sought."""
FRAME_SHARE = 0.9
"""Share of a source's questions that begin (or end) with its frame."""


def normal_words(text: str) -> list[str]:
    """The words by which texts are compared: punctuation, white space and TeX's layout commands are ignored.

    A word is a number, a run of letters (in scripts without spaces, one character), a TeX command, an operator or a
    parenthesis.
    """
    text = _LAYOUT.sub(" ", unicodedata.normalize("NFC", text))
    return _WORD.findall(_FRACTION.sub(r"\\frac", text))


@dataclass(frozen=True)
class Words:
    """Texts one after another: three arrays [W] hold every word, text i is those from starts[i] to ends[i].

    `hashes` ignore case; `numbers` says which are numbers, `formal` which are formal. A formal word carries a problem's
    figures: a number, an operator, a TeX command, a name in capitals (ABC) or a single letter (not a or i). `outside`
    [2, texts] are starts and ends with the frame, `frames` [texts] its hash, 0 where there is none.
    """

    hashes: np.ndarray
    numbers: np.ndarray
    formal: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    outside: np.ndarray
    frames: np.ndarray

    @classmethod
    def of(cls, texts: Iterable[str], sources: Sequence[str] | None = None) -> Words:
        """The words of questions, less their source's frame: words with which nearly all of its questions begin or end.

        A frame is an instruction ("Reason step by step"), a prompt's template or few examples; a data set and its copy
        elsewhere may differ in it. Two different frames (`gcd of`, `lcm of`) make different questions of the same rest:
        see `comparable`. `sources` names each text's, default one for all. Memory: 14 bytes a word, and once each distinct
        word.
        """
        known: dict[str, int] = {}
        numbered, lengths = array("i"), array("q")
        for text in texts:
            found = normal_words(text)
            numbered.extend([known.setdefault(word, len(known)) for word in found])
            lengths.append(len(found))
        flat = np.array(numbered, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        starts = ends - np.array(lengths, np.int64)
        outside = np.stack([starts, ends])
        names = np.array(sources if sources is not None else [""] * len(lengths))
        for name in np.unique(names):
            members = np.flatnonzero(names == name)
            if len(members) >= FRAME_ROWS:
                number, framed = _frame(members, ends - starts, lambda i, k: flat[starts[i] + k])
                starts[framed] += number
                number, framed = _frame(members, ends - starts, lambda i, k: flat[ends[i] - 1 - k])
                ends[framed] -= number
        table = np.array([_hash(word.casefold().encode()) for word in known], np.uint64)
        numbers = np.array([word[0].isnumeric() for word in known], bool)
        formal = np.array([_FORMAL.match(word) is not None for word in known], bool)
        hashes = table[flat]
        frames = np.zeros(len(starts), np.uint64)
        for i in np.flatnonzero((outside[0] < starts) | (ends < outside[1])):
            before, after = hashes[outside[0, i] : starts[i]], hashes[ends[i] : outside[1, i]]
            frames[i] = _hash(before.tobytes() + b"|" + after.tobytes())
        return cls(hashes, numbers[flat], formal[flat], starts, ends, outside, frames)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, part: slice | np.ndarray) -> Words:
        """Some of the texts, without copying their words."""
        return replace(
            self,
            starts=self.starts[part],
            ends=self.ends[part],
            outside=self.outside[:, part],
            frames=self.frames[part],
        )

    def with_frames(self) -> Words:
        """The same texts with their frames."""
        return replace(self, starts=self.outside[0], ends=self.outside[1])

    @property
    def lengths(self) -> np.ndarray:
        """Words of each text [texts]."""
        return self.ends - self.starts

    def ngrams(self, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Hashes, texts and places in their text of all n-grams, text by text: three arrays [number of n-grams]."""
        numbers = np.maximum(self.lengths - n + 1, 0)
        owners = np.repeat(np.arange(len(self)), numbers)
        places = np.arange(len(owners)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
        firsts = self.starts[owners] + places
        hashes = np.zeros(len(owners), np.uint64)
        for offset in range(n):
            hashes = hashes * _MULTIPLIER + self.hashes[firsts + offset]
        return mixed(hashes), owners, places

    def whole(self, formal_only: bool = False) -> np.ndarray:
        """A hash of each text's words, or of its formal ones alone, in their order [texts]."""
        return np.array(
            [
                _hash((self.hashes[a:b][self.formal[a:b]] if formal_only else self.hashes[a:b]).tobytes())
                for a, b in zip(self.starts, self.ends, strict=True)
            ],
            np.uint64,
        )


def comparable(frame: int, other: int) -> bool:
    """Whether texts can be compared without these frames: both the same, or one of them none."""
    return frame == other or not frame or not other


def mixed(values: np.ndarray) -> np.ndarray:
    """A bijection that spreads values over all 64 bits (splitmix64's)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _frame(
    members: np.ndarray, lengths: np.ndarray, word: Callable[[np.ndarray, int], np.ndarray]
) -> tuple[int, np.ndarray]:
    """How many words the frame has at one end, and which texts have it; no text is all frame."""
    framed, number = members, 0
    while True:
        longer = framed[lengths[framed] > number + 1]
        if len(longer) < FRAME_SHARE * len(members):
            return number, framed
        words = word(longer, number)
        usual = np.partition(words, len(words) // 2)[len(words) // 2]  # what most have is the median
        same = longer[words == usual]
        if len(same) < FRAME_SHARE * len(members):
            return number, framed
        framed, number = same, number + 1


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
