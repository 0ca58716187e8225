"""Stage `prepare`: from sources to data/prepared/{train,validation,test}.parquet, with counts.json beside them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from tasks.stage import Stage
from tasks.tree import home
from training.data.files import download, is_url
from training.data.formats import license_of
from training.data.hygiene.twins import leave_out_twins
from training.data.mixture import train_rows
from training.data.shots import Shots
from training.data.sources import Account, read_examples
from training.data.splits import SPLITS, divide
from training.data.table import write_table
from training.errors import BadInput
from training.storage import sha256_file, write_json

SHOWN_PAIRS = 20
"""Near-duplicates that counts.json shows; near_duplicates.jsonl has all."""


def prepare(stage: Stage) -> None:
    """Publish the three splits; counts.json says what each source gave and what was left out, near_duplicates.jsonl names it."""
    params = stage.params
    sources = params.prepare.sources
    files = [local_files(stage, str(s.path)) if s.kind == "file" else {} for s in sources]
    digests = [
        checked_digest(str(source.path), own, source.sha256)
        for source, own in zip(sources, files, strict=True)
    ]
    accounts = [Account() for _ in sources]
    readers = [
        (source, read_examples(source, params.seed, own, account))
        for source, own, account in zip(sources, files, accounts, strict=True)
    ]
    division = divide(readers, params.prepare.splits)
    threshold = params.prepare.near_duplicates
    twins = leave_out_twins(division, threshold) if threshold else []
    tables = {split: list(division.split(split)) for split in SPLITS}
    shots = Shots.of(tables["train"], params.prompt)
    tables["train"] = list(train_rows(division, sources, params.prepare.mixture_rows))
    counts: dict[str, Any] = {
        "rows": {split: len(rows) for split, rows in tables.items()},
        "near_duplicates": len(twins),
        "near_duplicates_of_held_out": sum(twin["of_split"] != "train" for twin in twins),
        "near_duplicate_pairs": twins[:SHOWN_PAIRS],
        "duplicates": division.duplicates.total(),
        "contradictions": division.contradictions.total(),
        "sources": [
            {
                "name": source.label,
                "format": source.format,
                "license": license_of(source),
                "sha256": digests[index],
                "files": len(files[index]) or None,
                "revision": source.revision,
                **asdict(accounts[index]),
                "rows": {s: sum(row.source == index for _, row in tables[s]) for s in SPLITS},
                "train_rows_held": division.counts()["train", index],
                "duplicates": division.duplicates[index],
                "contradictions": division.contradictions[index],
            }
            for index, source in enumerate(sources)
        ],
    }
    names = [source.label for source in sources]
    metrics = {f"rows_{split}": float(len(rows)) for split, rows in tables.items()}
    metrics |= {name: float(counts[name]) for name in ("duplicates", "near_duplicates")}
    with stage.publish(metrics) as folder:
        for split, rows in tables.items():
            write_table(folder / f"{split}.parquet", rows, names, shots)
        write_json(folder / "counts.json", counts)
        (folder / "near_duplicates.jsonl").write_text("".join(json.dumps(twin) + "\n" for twin in twins))
    for split in SPLITS:
        stage.run.input(stage.output / f"{split}.parquet", split, split)
    stage.run.artifact(stage.output / "counts.json")
    shown = ", ".join(f"{split} {len(rows)}" for split, rows in tables.items())
    left_out = f"{counts['duplicates']} duplicates and {len(twins)} near-duplicates"
    if bad := sum(account.bad_rows for account in accounts):
        left_out += f" and {bad} bad rows"
    print(f"prepare: {shown}; {left_out} left out", flush=True)


def local_files(stage: Stage, path: str) -> dict[str, Path]:
    """Where a path's, glob's or URL's bytes are, by name: fetched, in the tree, or in the tree's home.

    Paths count from the tree's root; in a workspace, files that git does not carry along are found from the
    main checkout's. A glob's files are in the order of their names. Raises BadInput where there is nothing.
    """
    if is_url(path):
        return {path: download(path, stage.scratch)}
    for root in (stage.root, home(stage.root)):
        if (root / path).exists():
            return {path: root / path}
        names = sorted(glob(path, root_dir=root, recursive=True))
        if found := {name: root / name for name in names if (root / name).is_file()}:
            return found
    what = "no file matches this pattern" if has_magic(path) else "no such file"
    raise BadInput(f"{path}: {what} (seen from {stage.root}); give the path, glob or URL of data files")


def checked_digest(path: str, files: dict[str, Path], expected: str | None) -> str | None:
    """A file's sha256, None where there is no file; of several, that of the list that `sha256sum` prints.

    Raises BadInput when another is expected.
    """
    digests = {name: sha256_file(file) for name, file in files.items() if file.is_file()}
    if not digests:
        return None
    listed = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    digest = digests[path] if list(digests) == [path] else hashlib.sha256(listed.encode()).hexdigest()
    if expected not in (None, digest):
        raise BadInput(
            f"{path}: its sha256 is {digest}, the source's sha256 says {expected}; the data have changed"
        )
    return digest
