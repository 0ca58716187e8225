"""Near-duplicates: questions that say the same in almost the same words.

Two questions are twins when their formal words (numbers, operators, variables: see `words`) are the same in the same
order and the Jaccard similarity of their sets of word trigrams reaches the threshold. So `3 + 4` and `3 + 5` never are,
nor a problem and its copy with other numbers. Texts of fewer than three words are twins only where all words are equal.

The search is exact: prefix filtering over an inverted index (Chaudhuri et al. 2006; Bayardo et al. 2007, "Scaling up all
pairs similarity search"). Two sets of similarity t share an element among the |x| - ceil(t |x|) + 1 rarest of each, so
only those are looked up.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from training.data.hygiene.words import Words, comparable, mixed
from training.data.splits import Division

N = 3
"""Words in an n-gram."""
PART = 1 << 15
"""Texts whose n-grams are held at once, but for those with the same formal words."""
Twin = tuple[int, float]
"""Which text is the earlier one, and the Jaccard similarity."""


def find_twins(
    words: Words, threshold: float, fixed: int = 0, answers: Sequence[str | None] | None = None
) -> dict[int, Twin]:
    """For each text that is a twin of one before it: the first such one that stays, and their similarity.

    The first `fixed` texts (held-out questions) stay whatever they are like; each further one stays unless it is a twin
    of one of them, or of another one that stays and has the same answer. Time grows with the number of texts and of true
    twins. Only texts that share their formal words with another are compared, in parts of about PART texts (a part
    holds all texts with the same formal words), and a part's memory is about 100 bytes a word.
    """
    twins: dict[int, Twin] = {}
    for members in _parts(words.whole(formal_only=True), fixed):
        own = None if answers is None else [answers[i] for i in members.tolist()]
        number = int((members < fixed).sum())
        found = _twins_of_part(words[members], threshold, number, own)
        twins |= {int(members[i]): (int(members[j]), similarity) for i, (j, similarity) in found.items()}
    return dict(sorted(twins.items()))


def _parts(formal: np.ndarray, fixed: int) -> Iterator[np.ndarray]:
    """Texts to compare with each other, ascending: those whose formal words another has, and not only fixed ones do."""
    order = np.argsort(formal, kind="stable")
    bounds = np.flatnonzero(formal[order][1:] != formal[order][:-1]) + 1
    held: list[np.ndarray] = []
    for group in np.split(order, bounds):
        if len(group) > 1 and group[-1] >= fixed:
            held.append(group)
            if sum(map(len, held)) >= PART:
                yield np.sort(np.concatenate(held))
                held = []
    if held:
        yield np.sort(np.concatenate(held))


def _twins_of_part(
    words: Words, threshold: float, fixed: int, answers: Sequence[str | None] | None
) -> dict[int, Twin]:
    sets, starts, commonness = _sets(words)
    frames = words.frames.tolist()
    index: dict[int, list[int]] = defaultdict(list)
    twins: dict[int, Twin] = {}
    for i in range(len(words)):
        own = sets[starts[i] : starts[i + 1]]
        size = len(own)
        prefix = size - math.ceil(threshold * size - 1e-9) + 1
        shared = commonness[starts[i] : starts[i] + prefix] > 1
        rare = own[:prefix][shared].tolist()
        if i >= fixed and rare:
            for j in sorted({j for gram in rare for j in index.get(gram, ())}):
                if answers is not None and j >= fixed and answers[j] != answers[i]:
                    continue
                if not comparable(frames[i], frames[j]):
                    continue
                other = sets[starts[j] : starts[j + 1]]
                if min(size, len(other)) < threshold * max(size, len(other)) - 1e-9:
                    continue
                common = len(np.intersect1d(own, other, assume_unique=True))
                similarity = common / (size + len(other) - common)
                if similarity >= threshold - 1e-9:
                    twins[i] = j, similarity
                    break
        if i not in twins:
            for gram in rare:
                index[gram].append(i)
    return twins


def leave_out_twins(division: Division, threshold: float) -> list[dict[str, Any]]:
    """Remove train questions that are twins of a held-out one, or of an earlier train one with the same answer.

    Conversations are compared whole. Held-out questions are never removed, so no benchmark changes. Returns, for each removed row: id, source (its number),
    question and answer, those of the row it repeats (with `of_`), that one's split, and the similarity.
    """
    keys = sorted(
        division.rows, key=lambda key: division.rows[key].split == "train"
    )  # stable: sources' order
    rows = [division.rows[key] for key in keys]
    asked = ("\n".join([*(message["content"] for message in row.context), row.question]) for row in rows)
    words = Words.of(asked, [str(row.source) for row in rows])
    fixed = sum(row.split != "train" for row in rows)
    twins = find_twins(words, threshold, fixed, [row.answer for row in rows])
    for i in twins:
        del division.rows[keys[i]]
    return [
        {
            "id": keys[i].hex(),
            "source": rows[i].source,
            "question": rows[i].question,
            "answer": rows[i].answer,
            "of_id": keys[j].hex(),
            "of_split": rows[j].split,
            "of_question": rows[j].question,
            "of_answer": rows[j].answer,
            "similarity": round(similarity, 4),
        }
        for i, (j, similarity) in twins.items()
    ]


def _sets(words: Words) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each text's set of n-grams, rarest first: the elements [S], where each text's begin, how many texts have each [S].

    An element is mixed with the text's formal words, so that sets of texts whose formal words differ are disjoint. A text
    without n-grams has one element, all its words.
    """
    hashes, owners, _ = words.ngrams(N)
    short = np.flatnonzero(words.lengths < N)
    whole = words.whole()[short]
    owners = np.concatenate([owners, short])
    elements = np.concatenate([hashes, whole])
    elements = mixed(mixed(elements) ^ words.whole(formal_only=True)[owners])
    order = np.lexsort((elements, owners))
    elements, owners = elements[order], owners[order]
    new = np.ones(len(elements), bool)
    new[1:] = (elements[1:] != elements[:-1]) | (owners[1:] != owners[:-1])
    elements, owners = elements[new], owners[new]
    _, inverse, counts = np.unique(elements, return_inverse=True, return_counts=True)
    commonness = counts[inverse].astype(np.int32)
    order = np.lexsort((elements, commonness, owners))
    starts = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=len(words)))])
    return elements[order], starts, commonness[order]
