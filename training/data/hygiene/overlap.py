"""Contamination: training questions that hold questions of an evaluation set.

A training question is contaminated by an evaluation question when both are the same in words (see `words`), or when it
holds all the evaluation question's numbers, as often as they stand there, and the n-grams that they share cover a given
part of the evaluation question's words. So a problem with other numbers is another problem, and questions of fewer than n
words are compared whole. What nearly all questions of a source begin or end with is left out (see Words.of).

n is at most 13 in GPT-3's search, which also leaves out n-grams that many training texts have, the wording of a template
(Brown et al. 2020, arXiv:2005.14165, appendix C); here more than COMMON. The part covered is how Llama 2 tells dirty
samples, from 0.8 on (Touvron et al. 2023, arXiv:2307.09288, appendix A.6).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from training.data.hygiene.words import Words, comparable

COMMON = 10
SLICE = 1 << 15
"""Training questions whose n-grams are held at once."""


@dataclass(frozen=True)
class Overlap:
    """Row `train` of the training questions holds row `evaluation` of the evaluation set; `covered` is the shared part."""

    train: int
    evaluation: int
    covered: float


def find_overlaps(train: Words, evaluation: Words, n: int, minimum: float) -> list[Overlap]:
    """All contaminating pairs, by training row, those that share most first.

    `minimum` is the part of an evaluation question's words that shared n-grams must cover. Time grows with the number of
    words, memory is that of the n-grams of SLICE training questions, and of those found.
    """
    covered = dict.fromkeys(_equal(train, evaluation), 1.0)
    for pair, share in _covered(train, evaluation, n).items():
        if share >= minimum and not _numbers(evaluation, pair[1]) - _numbers(train, pair[0]):
            covered.setdefault(pair, share)
    found = [Overlap(t, e, share) for (t, e), share in covered.items()]
    return sorted(found, key=lambda one: (one.train, -one.covered, one.evaluation))


def _numbers(words: Words, text: int) -> Counter[int]:
    own = slice(words.starts[text], words.ends[text])
    return Counter(words.hashes[own][words.numbers[own]].tolist())


def _equal(train: Words, evaluation: Words) -> set[tuple[int, int]]:
    """Pairs that are the same with their frames, or without them where the frames allow that."""
    t_frames, e_frames = train.frames.tolist(), evaluation.frames.tolist()
    whole = _same(train.with_frames(), evaluation.with_frames())
    inside = _same(train, evaluation)
    return {*whole, *(pair for pair in inside if comparable(t_frames[pair[0]], e_frames[pair[1]]))}


def _same(train: Words, evaluation: Words) -> Iterator[tuple[int, int]]:
    rows = defaultdict(list)
    for e, key in enumerate(evaluation.whole().tolist()):
        rows[key].append(e)
    return ((t, e) for t, key in enumerate(train.whole().tolist()) for e in rows.get(key, ()))


def _covered(train: Words, evaluation: Words, n: int) -> dict[tuple[int, int], float]:
    """Part of the evaluation question's words that lies in shared n-grams, by pair."""
    wanted, e_rows, e_firsts = evaluation.ngrams(n)
    sought, found = np.unique(wanted), [np.zeros((2, 0), np.uint64)]
    for start in range(0, len(train), SLICE):
        hashes, t_rows, _ = train[start : start + SLICE].ngrams(n)
        known = np.isin(hashes, sought)
        # each n-gram once a row
        found.append(np.unique(np.stack([hashes[known], (t_rows[known] + start).astype(np.uint64)]), axis=1))
    pairs = np.concatenate(found, axis=1)
    pairs = pairs[:, np.lexsort((pairs[1], pairs[0]))]
    grams, first, counts = np.unique(pairs[0], return_index=True, return_counts=True)
    holders = {
        int(gram): pairs[1][a : a + number]
        for gram, a, number in zip(grams, first, counts, strict=True)
        if number <= COMMON
    }
    shared: dict[tuple[int, int], set[int]] = defaultdict(set)
    for gram, e, position in zip(wanted.tolist(), e_rows.tolist(), e_firsts.tolist(), strict=True):
        for t in holders.get(gram, ()):
            shared[int(t), e].update(range(position, position + n))
    lengths = evaluation.lengths
    return {(t, e): len(places) / int(lengths[e]) for (t, e), places in shared.items()}
