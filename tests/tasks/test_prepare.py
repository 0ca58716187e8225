import hashlib
import json
import os
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from tasks.prepare import prepare
from tasks.stage import BAD_INPUT
from training.storage import digest_of, read_json, verify

SHARED = Path(os.environ.get("GRADELINE_SHARED", Path(__file__).parents[3] / "shared"))
GSM8K = SHARED / "data" / "gsm8k"
ADDITION = {
    "kind": "reasoning_gym",
    "task": "chain_sum",
    "size": 300,
    "license": "Apache-2.0",
    "settings": {"max_terms": 2, "max_digits": 2},
}


def jsonl(path: Path, questions: list[str]) -> Path:
    path.write_text("".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in questions))
    return path


def tables(root: Path) -> dict[str, pd.DataFrame]:
    return {
        split: pd.read_parquet(root / "data/prepared" / f"{split}.parquet")
        for split in ("train", "validation", "test")
    }


def test_publishes_splits_counts_and_records_them(tree):
    tree.params(
        prepare={"sources": [ADDITION, {**ADDITION, "name": "again"}]}, prompt={"template": "Sum: {question}"}
    )
    assert tree.run("prepare", prepare) == 0
    splits = tables(tree.root)
    counts = read_json(tree.root / "data/prepared/counts.json")
    assert {split: len(frame) for split, frame in splits.items()} == counts["rows"]
    first, second = counts["sources"]
    assert first["rows_read"] == second["rows_read"] == second["duplicates"] == 300
    assert sum(first["rows"].values()) + first["duplicates"] == 300
    assert (first["name"], first["license"]) == ("reasoning_gym:chain_sum", "Apache-2.0")
    everything = pd.concat(splits.values())
    assert everything["id"].is_unique
    assert everything["prompt"].is_unique
    assert everything["prompt"].str.startswith("Sum: State the final").all()
    assert all(frame["id"].is_monotonic_increasing for frame in splits.values())
    assert set(verify(tree.root / "data/prepared")["files"]) >= {
        "train.parquet",
        "validation.parquet",
        "test.parquet",
        "counts.json",
    }
    _, run = tree.record("prepare")
    assert run.data.metrics["duplicates"] == counts["duplicates"]
    assert {d.dataset.name for d in run.inputs.dataset_inputs} == {"train", "validation", "test"}


def test_equal_params_give_equal_bytes(tree):
    tree.params(prepare={"sources": [ADDITION]})
    assert tree.run("prepare", prepare) == 0
    first = digest_of(tree.root / "data/prepared")
    assert tree.run("prepare", prepare) == 0
    assert digest_of(tree.root / "data/prepared") == first


def test_globs_weights_and_shots(tree):
    """12 rows in two files beside 40 of another kind, one to three, each after one solved question."""
    (tree.root / "parts").mkdir()
    one = jsonl(tree.root / "parts" / "1.jsonl", [f"a {i}?" for i in range(5)])
    two = jsonl(tree.root / "parts" / "2.jsonl", [f"b {i}?" for i in range(7)])
    jsonl(tree.root / "other.jsonl", [f"c {i}?" for i in range(40)])
    jsonl(tree.root / "test.jsonl", [f"d {i}?" for i in range(3)])
    kept = {"kind": "file", "split": "train"}
    sources = [
        {**kept, "name": "parts", "path": "parts/*.jsonl", "weight": 1},
        {**kept, "name": "other", "path": "other.jsonl", "weight": 3.0},
        {"kind": "file", "path": "test.jsonl", "split": "test"},
    ]
    tree.params(prepare={"sources": sources}, prompt={"few_shot": 1})
    assert tree.run("prepare", prepare) == 0
    splits, counts = tables(tree.root), read_json(tree.root / "data/prepared/counts.json")
    assert splits["train"]["source"].value_counts().to_dict() == {"other": 36, "parts": 12}
    listed = "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}  parts/{p.name}\n" for p in (one, two))
    parts = counts["sources"][0]
    assert (parts["files"], parts["sha256"]) == (2, hashlib.sha256(listed.encode()).hexdigest())
    assert (counts["sources"][1]["rows"]["train"], counts["sources"][1]["train_rows_held"]) == (36, 40)
    for frame in splits.values():
        for prompt, context in zip(frame["prompt"], frame["context"], strict=True):
            assert [m["role"] for m in context] == ["user", "assistant"]
            assert context[0]["content"] != prompt


def test_braces_are_kept(tree):
    jsonl(tree.root / "a.jsonl", [f"What is {{{i}}} of {{question}}?" for i in range(40)])
    source = {"kind": "file", "path": "a.jsonl", "split": "train"}
    tree.params(prepare={"sources": [source]}, prompt={"template": "{question} {0}"})
    assert tree.run("prepare", prepare) == 0
    assert "What is {7} of {question}? {0}" in set(tables(tree.root)["train"]["prompt"])


@pytest.mark.skipif(
    not GSM8K.is_dir(), reason=f"{GSM8K} is not there (GRADELINE_SHARED names the folder around data/)"
)
def test_gsm8k_in_full(tree):
    common = {
        "kind": "file",
        "answer_pattern": r"####\s*(.+)",
        "solution_remove": "<<[^>]*>>",
        "license": "MIT",
    }
    sources = [
        {**common, "path": str(GSM8K / f"{split}.jsonl"), "split": split} for split in ("train", "test")
    ]
    tree.params(prepare={"sources": sources})
    assert tree.run("prepare", prepare) == 0
    splits = tables(tree.root)
    assert {split: len(frame) for split, frame in splits.items()} == {
        "train": 7472,
        "validation": 0,
        "test": 1319,
    }
    question = json.loads((GSM8K / "train.jsonl").open().readline())["question"]
    row = splits["train"].set_index("prompt").loc[question]
    assert row["answer"] == "72"
    assert row["completion"].startswith("Natalia sold 48/2 = 24 clips in May.\n")
    assert row["completion"].endswith("\n#### 72")
    counts = read_json(tree.root / "data/prepared/counts.json")
    digest = hashlib.sha256((GSM8K / "train.jsonl").read_bytes()).hexdigest()
    assert (counts["sources"][0]["sha256"], counts["duplicates"]) == (digest, 0)
    assert (counts["near_duplicates"], counts["near_duplicates_of_held_out"]) == (1, 0)
    [pair] = counts["near_duplicate_pairs"]
    assert pair["question"].startswith("Amanda received $50 as a gift.")
    assert pair["of_question"].startswith("Josie received $50 as a gift.")
    assert (pair["of_split"], pair["answer"], pair["of_answer"]) == ("train", "7", "7")


STORY = "Ann packs {} boxes of pears and then twice as many boxes of plums for the market; how many does she pack?"


def test_near_duplicates_leave_train_and_are_named(tree):
    """A twin of a test question goes whatever its answer is, one of a train question only with the same answer."""
    train = [("Please: " + STORY.format(3), "9"), (STORY.format(4), "12"), (STORY.format(5), "15")]
    train += [("Please: " + STORY.format(5), "15"), ("So: " + STORY.format(5), "16")]
    files = {"train": train, "test": [(STORY.format(3), "nine"), ("Please, " + STORY.format(3) + "!", "9")]}
    for split, rows in files.items():
        text = "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows)
        (tree.root / f"{split}.jsonl").write_text(text)
    sources = [{"kind": "file", "path": f"{split}.jsonl", "split": split} for split in files]
    tree.params(prepare={"sources": sources})
    assert tree.run("prepare", prepare) == 0
    splits = tables(tree.root)
    assert set(splits["train"]["answer"]) == {"12", "15", "16"}
    assert set(splits["train"]["prompt"]) == {STORY.format(4), STORY.format(5), "So: " + STORY.format(5)}
    assert len(splits["test"]) == 2  # twins of each other: a held-out split is as its source has it
    counts = read_json(tree.root / "data/prepared/counts.json")
    assert (counts["near_duplicates"], counts["near_duplicates_of_held_out"]) == (2, 1)
    named = [json.loads(line) for line in (tree.root / "data/prepared/near_duplicates.jsonl").open()]
    assert named == counts["near_duplicate_pairs"]
    assert [(pair["answer"], pair["of_split"], pair["of_answer"]) for pair in named][-1] == (
        "15", "train", "15"
    )  # fmt: skip
    tree.params(prepare={"sources": sources, "near_duplicates": None})
    assert tree.run("prepare", prepare) == 0
    assert len(tables(tree.root)["train"]) == 5


def test_workspace_finds_the_files_of_its_home(tree, monkeypatch):
    jsonl(tree.root / "a.jsonl", ["a?", "b?"])
    workspace = tree.root / ".gradeline" / "workspaces" / "w"
    subprocess.run(["git", "worktree", "add", "-q", "--detach", str(workspace)], check=True)
    for package in ("tasks", "training"):
        (workspace / package).symlink_to(tree.root / package)
    tree.params(prepare={"sources": [{"kind": "file", "path": "a.jsonl", "split": "test"}]})
    (tree.root / "params.yaml").rename(workspace / "params.yaml")
    monkeypatch.chdir(workspace)
    assert tree.run("prepare", prepare) == 0
    assert len(tables(workspace)["test"]) == 2


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([{"kind": "file", "path": "none.jsonl"}], ["none.jsonl: no such file"]),
        ([{"kind": "file", "path": "none-*.jsonl"}], ["none-*.jsonl: no file matches this pattern"]),
        (
            [{"kind": "file", "path": "[ab].jsonl", "sha256": "00"}],
            ["[ab].jsonl: its sha256 is", "says 00"],
        ),
        (
            [{"kind": "file", "path": "chat.jsonl", "format": "openai"}],
            [
                "prepare.sources.0 (file:chat.jsonl): the question 'Hi' has no answer",
                "give the source `split: train`",
            ],
        ),
        ([{"kind": "file", "path": "empty.csv"}], ["empty.csv: the file is empty"]),
        ([{"kind": "file", "path": "bad.jsonl"}], ["bad.jsonl, line 2: not valid JSON"]),
        (
            [{"kind": "file", "path": "a.jsonl", "columns": {"answer": "key"}}],
            ["a.jsonl, line 1: no column 'key'; it has 'question', 'answer'"],
        ),
        ([{"kind": "file", "path": "a.jsonl", "sha256": "00"}], ["a.jsonl: its sha256 is", "says 00"]),
        (
            [{"kind": "reasoning_gym", "task": "chain_smu", "size": 9}],
            ["'chain_smu': unknown; did you mean 'chain_sum'"],
        ),
        ([{**ADDITION, "size": 1}], ["is empty: 1 distinct questions"]),
        (
            [
                {"kind": "file", "path": "a.jsonl", "split": "train"},
                {"kind": "file", "path": "b.jsonl", "split": "test"},
            ],
            ["the question 'b?' is in split train", "a.jsonl", "and in split test", "b.jsonl"],
        ),
    ],
)
def test_bad_input_stops_before_publication(tree, sources, expected):
    jsonl(tree.root / "a.jsonl", ["a?", "b?"])
    jsonl(tree.root / "b.jsonl", ["b?", "c?"])
    (tree.root / "bad.jsonl").write_text('{"question": "q", "answer": "1"}\n{"question"\n')
    (tree.root / "empty.csv").touch()
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tree.root / "chat.jsonl").write_text(json.dumps({"messages": said}) + "\n")
    tree.params(prepare={"sources": sources})
    assert tree.run("prepare", prepare) == BAD_INPUT
    for part in expected:
        assert part in tree.outcome("prepare")["message"]
    assert not (tree.root / "data/prepared").exists()
