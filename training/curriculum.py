"""Curriculum from evidence: which train problems RL sees, and in which order, by how often a model solved them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from training.config import CurriculumConfig
from training.data.files import read_records
from training.errors import BadInput

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("solved", pa.int32(), nullable=False),
        pa.field("samples", pa.int32(), nullable=False),
    ]
)
"""Columns of solve_rates.parquet, one row a problem of the train split."""
_BINS = 10


@dataclass(frozen=True)
class SolveRate:
    """How many of a problem's samples were right; one that got no verdict was not."""

    id: str
    solved: int
    samples: int

    @property
    def rate(self) -> float:
        """Share of the samples that were right."""
        return self.solved / self.samples


def write_rates(path: Path, rates: Iterable[SolveRate]) -> None:
    """Write the table; equal rates give equal bytes."""
    rows = [{"id": one.id, "solved": one.solved, "samples": one.samples} for one in rates]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, compression="zstd")


def read_rates(path: Path, name: str | None = None) -> dict[str, SolveRate]:
    """Rates by problem, from a table or any data file with its columns; `name` stands for the path in errors.

    A problem that comes several times has the sum of its samples, so rows of single samples (solved 0 or 1, samples 1)
    will do. Raises BadInput naming the row and the value.
    """
    solved: Counter[str] = Counter()
    samples: Counter[str] = Counter()
    for place, record in read_records(path, SCHEMA.names, name):
        right, number = (
            _count(record[column], f"{place}: column {column!r}") for column in ("solved", "samples")
        )
        if not right <= number or not number:
            raise BadInput(
                f"{place}: solved {right} of samples {number}; expected at least one sample, and no more solved"
            )
        solved[str(record["id"])] += right
        samples[str(record["id"])] += number
    return {id_: SolveRate(id_, solved[id_], number) for id_, number in samples.items()}


def choose(
    ids: Sequence[str], rates: Mapping[str, SolveRate], config: CurriculumConfig
) -> tuple[list[int], dict[str, int]]:
    """Which problems of `ids` stay, in the order they are to be seen, and how many were left out for which reason.

    Equal rates keep the order of `ids`. Counts: kept, too_hard, too_easy, unrated. Raises BadInput, with the histogram
    of the rates, where nothing is kept.
    """
    counts = {"kept": 0, "too_hard": 0, "too_easy": 0, "unrated": 0}
    kept: list[tuple[float, int]] = []
    for index, id_ in enumerate(ids):
        found = rates.get(id_)
        if found is None:
            counts["unrated"] += 1
            if config.unrated == "keep":
                kept.append((0.5, index))
        elif config.above is not None and found.rate <= config.above:
            counts["too_hard"] += 1
        elif config.below is not None and found.rate >= config.below:
            counts["too_easy"] += 1
        else:
            kept.append((found.rate, index))
    counts["kept"] = len(kept)
    if not kept:
        shown = ", ".join(f"{name} {number}" for name, number in counts.items())
        raise BadInput(
            f"rl.curriculum: no train problem is solved in more than {config.above} and less than {config.below} of its "
            f"samples ({shown}; {histogram([rates[id_].rate for id_ in ids if id_ in rates])}); set other bounds, "
            "rate more problems (preferences.num_problems), or start from another model"
        )
    if config.order != "none":
        kept.sort(key=lambda one: one[0], reverse=config.order == "easy_first")
    return [index for _, index in kept], counts


def in_order(step: int, batch_size: int, num_steps: int, num_rows: int) -> list[int]:
    """Rows of batch `step` (0-based) when rows are visited in their order over `num_steps` batches.

    Where there are more rows than places, evenly spread ones, so that the last batches still reach the last rows; where
    there are fewer, around again. No row comes twice in a batch as long as it has no more places than there are rows.
    """
    places = num_steps * batch_size
    visits = range(step * batch_size, (step + 1) * batch_size)
    return [place * num_rows // places if num_rows > places else place % num_rows for place in visits]


def histogram(rates: Sequence[float]) -> str:
    """How many problems have which solve rate, in tenths; 0 and 1 apart."""
    counts = Counter("0" if rate == 0 else "1" if rate == 1 else f"0.{int(rate * _BINS)}" for rate in rates)
    return "problems by solve rate: " + (
        ", ".join(f"{key}: {counts[key]}" for key in sorted(counts)) or "none"
    )


def _count(value: Any, place: str) -> int:
    try:
        number = int(value)
        if number == float(value) and number >= 0:
            return number
    except (TypeError, ValueError):
        pass
    raise BadInput(f"{place}: holds {value!r}, expected a whole number, at least 0")
