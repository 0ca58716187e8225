"""Stage `prepare`: from sources to data/prepared/{train,validation,test}.parquet, with counts.json beside them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.stage import Stage, run_stage
from tasks.tree import home
from training.config import SourceConfig
from training.data.files import download, is_url
from training.data.hygiene.twins import leave_out_twins
from training.data.sources import Example, read_examples
from training.data.splits import SPLITS, Division, divide
from training.data.table import write_table
from training.errors import BadInput
from training.storage import sha256_file, write_json

SHOWN_PAIRS = 20
"""Near-duplicates that counts.json shows; near_duplicates.jsonl has all."""


def prepare(stage: Stage) -> None:
    """Publish the three splits; counts.json says what each source gave and what was left out, near_duplicates.jsonl names it."""
    params = stage.params
    sources = params.prepare.sources
    files = [local_file(stage, str(s.path)) if s.kind == "file" else None for s in sources]
    digests = [
        checked_digest(str(source.path), file, source.sha256)
        for source, file in zip(sources, files, strict=True)
    ]
    readers = [
        (source, _Counted(read_examples(source, params.seed, file)))
        for source, file in zip(sources, files, strict=True)
    ]
    division = divide(readers, params.prepare.splits)
    threshold = params.prepare.near_duplicates
    twins = leave_out_twins(division, threshold) if threshold else []
    rows_read = [reader.count for _, reader in readers]
    counts = _counts(sources, division, rows_read, digests) | {
        "near_duplicates": len(twins),
        "near_duplicates_of_held_out": sum(twin["of_split"] != "train" for twin in twins),
        "near_duplicate_pairs": twins[:SHOWN_PAIRS],
    }
    names = [source.label for source in sources]
    metrics = {f"rows_{split}": float(counts["rows"][split]) for split in SPLITS}
    metrics |= {name: float(counts[name]) for name in ("duplicates", "near_duplicates")}
    with stage.publish(metrics) as folder:
        for split in SPLITS:
            write_table(folder / f"{split}.parquet", division.split(split), names, params.prompt)
        write_json(folder / "counts.json", counts)
        (folder / "near_duplicates.jsonl").write_text("".join(json.dumps(twin) + "\n" for twin in twins))
    for split in SPLITS:
        stage.run.input(stage.output / f"{split}.parquet", split, split)
    stage.run.artifact(stage.output / "counts.json")
    shown = ", ".join(f"{split} {counts['rows'][split]}" for split in SPLITS)
    print(
        f"prepare: {shown}; {counts['duplicates']} duplicates and {len(twins)} near-duplicates left out",
        flush=True,
    )


class _Counted:
    """An iterator that knows how many examples it gave."""

    def __init__(self, examples: Iterator[Example]) -> None:
        self.examples = examples
        self.count = 0

    def __iter__(self) -> Iterator[Example]:
        for example in self.examples:
            self.count += 1
            yield example


def local_file(stage: Stage, path: str) -> Path:
    """Where a data file's bytes are: fetched from its URL, in the tree, or in the tree's home.

    Paths count from the tree's root; in a workspace, files that git does not carry along are found from the
    main checkout's.
    """
    if is_url(path):
        return download(path, stage.scratch)
    for root in (stage.root, home(stage.root)):
        if (root / path).exists():
            return root / path
    raise BadInput(f"{path}: no such file (seen from {stage.root}); give the path or URL of a data file")


def checked_digest(path: str, file: Path | None, expected: str | None) -> str | None:
    """A file's sha256, None where there is no file; BadInput when another is expected."""
    if file is None or not file.is_file():
        return None
    digest = sha256_file(file)
    if expected not in (None, digest):
        raise BadInput(
            f"{path}: its sha256 is {digest}, the source's sha256 says {expected}; the file has changed"
        )
    return digest


def _counts(
    sources: list[SourceConfig], division: Division, rows_read: list[int], digests: list[str | None]
) -> dict[str, Any]:
    counts = division.counts()
    return {
        "rows": {split: sum(counts[split, index] for index in range(len(sources))) for split in SPLITS},
        "duplicates": division.duplicates.total(),
        "contradictions": division.contradictions.total(),
        "sources": [
            {
                "name": source.label,
                "license": source.license,
                "sha256": digests[index],
                "revision": source.revision,
                "rows_read": rows_read[index],
                "rows": {split: counts[split, index] for split in SPLITS},
                "duplicates": division.duplicates[index],
                "contradictions": division.contradictions[index],
            }
            for index, source in enumerate(sources)
        ],
    }


if __name__ == "__main__":
    run_stage("prepare", prepare)
