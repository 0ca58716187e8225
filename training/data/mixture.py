"""The train split as a mixture of its sources, by their weights.

Source i has n_i train rows and the share p_i = w_i / sum of w. Of a mixture of T rows it gives k_i: T p_i rounded down,
and the rows that are then missing to T go one each to the sources with the largest remainders, the earlier first.
Without `prepare.mixture_rows`, T is the smallest n_i / p_i, rounded down: all k_i <= n_i, so that no row is there
twice, and the source that runs out first is used up. A source gives its rows in the order of their keys, which is random; one that must give more than it has begins
again, so that its rows are there floor(k_i / n_i) times or once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from training.config import SourceConfig
from training.data.splits import Division, Row
from training.errors import BadInput


def train_rows(
    division: Division, sources: Sequence[SourceConfig], size: int | None
) -> Iterator[tuple[str, Row]]:
    """The train split's rows as (id, row): all of them once, or the mixture where sources have weights.

    The second time a row's id ends in `-2`; rows are ordered by how often they were there, then by id. Raises
    BadInput for a source that gives train rows and has no weight beside others that have one, for a weight of one that
    gives none, and for a size without weights.
    """
    weighted = [index for index, source in enumerate(sources) if source.weight is not None]
    rows: dict[int, list[tuple[str, Row]]] = {}
    for key, row in division.split("train"):
        rows.setdefault(row.source, []).append((key, row))
    if not weighted:
        if size is not None:
            raise BadInput(
                f"prepare.mixture_rows = {size}: no source has a weight; give each that gives train rows one"
            )
        return division.split("train")
    for index in sorted(set(weighted) ^ rows.keys()):
        label = f"prepare.sources.{index} ({sources[index].label})"
        raise BadInput(
            f"{label}: gives {len(rows[index])} train rows and has no weight; give it one, as other sources have"
            if index in rows
            else f"{label}: weight = {sources[index].weight}, but it gives no train rows; remove the weight"
        )
    weights = [float(sources[index].weight or 0) for index in weighted]
    held = [len(rows[index]) for index in weighted]
    total = total_without_repeats(weights, held) if size is None else size
    counts = shares(weights, total)
    for index, count in zip(weighted, counts, strict=True):
        if count == 0:
            raise BadInput(
                f"prepare.sources.{index} ({sources[index].label}): weight = {sources[index].weight} gives it none of "
                f"{total} rows; give it a larger weight, or the mixture more rows (prepare.mixture_rows)"
            )
    mixed = []
    for index, count in zip(weighted, counts, strict=True):
        own = rows[index]
        mixed += [(number // len(own), *own[number % len(own)]) for number in range(count)]
    mixed.sort(key=lambda entry: entry[:2])
    return ((f"{key}-{turn + 1}" if turn else key, row) for turn, key, row in mixed)


def shares(weights: Sequence[float], total: int) -> list[int]:
    """How many of `total` rows each weight gets: largest remainders, the earlier first; they sum to `total`."""
    exact = [part * total for part in _parts(weights)]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(counts)), key=lambda i: (counts[i] - exact[i], i))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def total_without_repeats(weights: Sequence[float], held: Sequence[int]) -> int:
    """Rows of the mixture in which no weight gets more than it holds."""
    return int(min(n / part for part, n in zip(_parts(weights), held, strict=True)))


def _parts(weights: Sequence[float]) -> list[Fraction]:
    """The weights' parts of one, exact for the decimals that they are written as."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]
