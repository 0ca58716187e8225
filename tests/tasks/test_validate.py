import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.config import Params, parse_params
from tasks.expectations import check
from tasks.hygiene import checks, hygiene_report, measure_hygiene
from tasks.stage import BAD_INPUT
from tasks.tracking import FURTHER_MODELS, output_digest
from tasks.validate import describe_failures, is_sound, measure, read_frame, validate
from training.config import ModelConfig, ScratchModelConfig
from training.data.table import COLUMNS
from training.errors import BadInput
from training.models import bring_model, character_tokenizer, load_tokenizer
from training.prompts import PromptRenderer
from training.rewards import load_reward
from training.storage import publishing, read_json, verify

CONTEXT = 32
LIMITS = {
    "prompt": {"chat_template": "none"},
    "rl": {"max_prompt_length": 16, "max_completion_length": 16},
    "validate": {"max_completion_tokens": 4},
}


def rows(first: int, number: int) -> list[dict[str, str]]:
    """Sums of distinct numbers: prompts of 5 to 7 characters, completions of 2 to 3."""
    return [
        {
            "id": f"{i:04d}",
            "prompt": f"{i} + 5",
            "completion": str(i + 5),
            "answer": str(i + 5),
            "source": "sums",
        }
        for i in range(first, first + number)
    ]


def splits() -> dict[str, list[dict[str, str]]]:
    return {"train": rows(10, 20), "validation": [], "test": rows(40, 5)}


def frame(records: list[dict[str, str]]) -> pd.DataFrame:
    return pa.Table.from_pylist(records, pa.schema([(name, pa.string()) for name in COLUMNS])).to_pandas()


def params(**changes: dict) -> Params:
    return parse_params(
        {key: {**LIMITS.get(key, {}), **changes.get(key, {})} for key in LIMITS | changes}, "test"
    )


def examine(frames: dict[str, pd.DataFrame], settings: Params, folder: Path) -> list[str]:
    """What the gate says of these tables, measured with a tokenizer of one token a character."""
    if all(map(is_sound, frames.values())):
        renderer = PromptRenderer(character_tokenizer("0123456789+ ?"), settings.prompt)
        measure(frames, renderer, load_reward("math", settings.rewards), settings)
        measure_hygiene(frames, {}, settings)
    report = check(frames, settings, CONTEXT, "data", folder)["splits"]
    return [failure for split in frames for failure in describe_failures(split, report[split])]


def test_measures_are_those_counted_by_hand():
    settings = params()
    frames = {split: frame(records) for split, records in splits().items()}
    frames["test"].loc[0, ["prompt", "answer"]] = ["10 + 5", "1"]
    measure(
        frames,
        PromptRenderer(character_tokenizer("0123456789+ "), settings.prompt),
        load_reward("math", settings.rewards),
        settings,
    )
    row = frames["test"].iloc[0]
    # "10 + 5" is 6 characters, "45" is 2 and its end token 1; RL may add 16.
    assert (
        row["prompt_tokens"],
        row["completion_tokens"],
        row["sequence_tokens"],
        row["rollout_tokens"],
    ) == (6, 3, 9, 22)
    assert (row["grade"], row["other_split"]) == ("wrong", "train")
    assert frames["train"]["other_split"].notna().sum() == 1
    assert set(frames["train"]["grade"]) == {"right"}


def test_rows_without_completion_or_answer_are_not_graded(tmp_path):
    """A chat row for SFT alone, and a problem that has no reference, pass; conversations are told apart."""
    frames = replaced("train", 0, completion=None)
    frames["train"].loc[1, ["answer", "prompt"]] = [None, "11 + 5" + " " * 11]  # longer than RL takes
    frames["test"].loc[0, "prompt"] = "12 + 5"
    frames["test"]["context"] = [[{"role": "user", "content": "ten"}]] + [None] * 4
    settings = params(prompt={"chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"})
    assert examine(frames, settings, tmp_path) == []
    assert frames["train"]["grade"].isna().tolist() == [True, True] + [False] * 18
    assert frames["train"]["completion_tokens"][0] == 1
    assert frames["test"]["prompt_tokens"][0] == 9
    assert frames["train"]["prompt_tokens"].isna().tolist() == [False, True] + [False] * 18
    assert frames["train"]["other_split"].isna().all()


def test_good_data_pass(tmp_path):
    assert examine({split: frame(records) for split, records in splits().items()}, params(), tmp_path) == []
    report = read_json(tmp_path / "report.json")
    assert set(report["splits"]) == {"train", "validation", "test"}
    assert all(outcome["success"] for outcomes in report["splits"].values() for outcome in outcomes)
    assert (tmp_path / "data_docs" / "index.html").is_file()


def replaced(split: str, index: int, **cells: object) -> dict[str, pd.DataFrame]:
    records = splits()
    records[split][index].update(cells)
    return {name: frame(table) for name, table in records.items()}


@pytest.mark.parametrize(
    ("frames", "changes", "expected"),
    [
        (
            replaced("train", 3, prompt="13 + 5" + " " * 11),
            {},
            [
                "split train: expect_column_values_to_be_between of column prompt_tokens",
                "max_value 16",
                "1 of 20 rows",
                "id '0013', prompt_tokens 17",
            ],
        ),
        (
            replaced("test", 0, completion="the sum is 45"),
            {},
            [
                "split test: expect_column_values_to_be_between of column completion_tokens",
                "max_value 4",
                "id '0040', completion_tokens 14",
            ],
        ),
        (
            replaced("test", 0),
            {"rl": {"max_completion_length": 27}},
            [
                "split test: expect_column_values_to_be_between of column rollout_tokens",
                "max_value 32",
                "5 of 5 rows",
                "rollout_tokens 33",
            ],
        ),
        (
            replaced("test", 0, completion=" " * 28 + "45"),
            {"validate": {"max_completion_tokens": 40}},
            [
                "split test: expect_column_values_to_be_between of column sequence_tokens",
                "max_value 32",
                "sequence_tokens 37",
            ],
        ),
        (
            replaced("train", 1, answer="17"),
            {},
            [
                "split train: expect_column_values_to_be_in_set of column grade",
                "1 of 20 rows",
                "id '0011', grade 'wrong'",
                "completion '16', answer '17'",
            ],
        ),
        (
            replaced("test", 1, prompt="12 + 5"),
            {},
            [
                "split train: expect_column_values_to_be_null of column other_split",
                "id '0012', other_split 'test', prompt '12 + 5'",
            ],
        ),
        (
            replaced("train", 1, id="0010"),
            {},
            ["split train: expect_column_values_to_be_unique of column id", "2 of 20 rows"],
        ),
        (
            replaced("test", 2, answer=None),
            {},
            [
                "split test: expect_column_values_to_not_be_null of column answer",
                "1 of 5 rows",
                "id '0042', answer None, prompt '42 + 5'",
            ],
        ),
        (
            replaced("train", 2, source=" "),
            {},
            ["split train: expect_column_values_to_match_regex of column source", "id '0012'"],
        ),
        (
            replaced("train", 0),
            {"validate": {"min_rows": {"train": 30, "validation": 0, "test": 1}}},
            ["split train: expect_table_row_count_to_be_between (min_value 30): found 20"],
        ),
    ],
)
def test_failing_expectation_names_split_column_and_rows(tmp_path, frames, changes, expected):
    failures = examine(frames, params(**changes), tmp_path)
    matching = [failure for failure in failures if expected[0] in failure]
    assert len(matching) == 1, failures
    for part in expected:
        assert part in matching[0]


STORY = "{} + 5 and so we ask you now as we did before how many it makes in all for us {}"
WIDE = {
    "rl": {"max_prompt_length": 100, "max_completion_length": 4},
    "validate": {"max_completion_tokens": 99},
}


def hygiene(frames: dict[str, pd.DataFrame], **limits: dict) -> tuple[Params, dict[str, pd.DataFrame]]:
    settings = params(**(WIDE | {"validate": WIDE["validate"] | limits}))
    renderer = PromptRenderer(character_tokenizer("0123456789+ ?"), settings.prompt)
    measure(frames, renderer, load_reward("math", settings.rewards), settings)
    return settings, frames


def failing(frames: dict[str, pd.DataFrame], settings: Params) -> dict[tuple[str, str], list[str]]:
    """Ids of the failing rows by column and split."""
    return {
        (check.column, split): rows["id"].tolist()
        for split, table in frames.items()
        for check in checks(settings)
        if check.column in table and len(rows := check.failing(table))
    }


def test_every_hygiene_check_names_its_rows():
    frames = replaced("train", 0, prompt=STORY.format(40, "today"))
    frames["test"].loc[0, "prompt"] = STORY.format(40, "friend")
    frames["train"].loc[1, "prompt"] = "11 + 5? The answer is 16"
    frames["train"].loc[2, "prompt"] = "сколько будет 12 + 5"
    frames["train"].loc[3, "completion"] = "1\u200b8"
    frames["train"].loc[4, "prompt"] = STORY.format(40, "friend").replace("asked", "ask")
    settings, frames = hygiene(frames)
    pairs = measure_hygiene(frames, {}, settings)
    found = failing(frames, settings)
    outliers = {key: found.pop(key) for key in list(found) if "deviation" in key[0]}
    assert found == {
        ("twin_of", "train"): ["0010", "0014"],
        ("contaminated_by", "train"): ["0010", "0014"],
        ("leak", "train"): ["0011"],
        ("script_share", "train"): ["0012"],
        ("unsafe_characters", "train"): ["0013"],
        ("found_in_train", "test"): ["0040"],
    }
    assert {"0010", "0014"} <= set(outliers["prompt_deviation", "train"])
    train = frames["train"].set_index("id")
    assert train.loc["0014", "twin_of"] == "test 0040 (1.00)"
    assert train.loc["0010", "contaminated_by"] == "test 0040 (0.95)"
    assert frames["test"].loc[0, "found_in_train"] == "0010, 0014"
    assert train.loc["0013", "unsafe_characters"] == "U+200B ZERO WIDTH SPACE in the completion"
    assert [(pair["train"], pair["evaluation"]) for pair in pairs] == [("0010", "0040"), ("0014", "0040")]
    report = hygiene_report(frames, {}, pairs, settings)
    assert [entry["found"] for entry in report["contamination"]] == [0, 1]
    assert sum(report["lengths"]["prompt_tokens"]["counts"]["train"]) == 20


def test_the_gate_holds_hygiene_to_its_limits(tmp_path):
    frames = replaced("train", 1, prompt="11 + 5? The answer is 16")
    allowed = {
        "validate": {"max_completion_tokens": 4, "leaks": {"max_share": 0.05}},
        "rl": {"max_prompt_length": 30, "max_completion_length": 4},
    }
    assert examine(frames, params(**allowed), tmp_path / "a") == []
    allowed["validate"]["leaks"]["max_share"] = 0.04
    [failure] = examine(
        replaced("train", 1, prompt="11 + 5? The answer is 16"), params(**allowed), tmp_path / "b"
    )
    assert failure.startswith(
        "split train: expect_column_values_to_be_null of column leak (mostly 0.96): 1 of 20 rows fail"
    )
    assert "id '0011', leak 'marked'" in failure


def test_share_of_accepted_answers(tmp_path):
    accepted = {"validate": {"min_accepted_answers": 0.95}}
    assert examine(replaced("train", 1, answer="17"), params(**accepted), tmp_path / "a") == []
    two = replaced("train", 1, answer="17")
    two["train"].loc[2, "answer"] = "18"
    assert len(examine(two, params(**accepted), tmp_path / "b")) == 1


def test_lacking_column_and_wrong_type(tmp_path):
    frames = replaced("train", 0)
    frames["train"] = frames["train"].drop(columns="source").assign(answer=range(20))
    failures = examine(frames, params(), tmp_path)
    assert [
        "expect_table_columns_to_match_set" in failures[0],
        "of column answer (type_ str): found int64" in failures[1],
    ] == [True, True]
    assert len(failures) == 2


def test_unusable_files(tmp_path):
    with pytest.raises(BadInput, match="no such file; stage prepare makes it"):
        read_frame(tmp_path / "train.parquet")
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadInput, match="not a whole parquet file"):
        read_frame(tmp_path / "train.parquet")


@pytest.fixture
def ready(tree):
    """A tree with a small model and prepared data."""
    shape = ScratchModelConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=CONTEXT,
    )
    with publishing(tree.root / "data/models/base") as folder:
        bring_model(ModelConfig(source="scratch", scratch=shape), 1, folder)
    with publishing(tree.root / FURTHER_MODELS):
        pass
    publish(tree, {split: frame(records) for split, records in splits().items()})
    tree.params(**LIMITS)
    return tree


def publish(tree, frames: dict[str, pd.DataFrame]) -> None:
    with publishing(tree.root / "data/prepared") as folder:
        for split, table in frames.items():
            pq.write_table(pa.Table.from_pandas(table, preserve_index=False), folder / f"{split}.parquet")


def test_stage_publishes_equal_bytes_in_any_process(ready):
    assert ready.run("validate", validate) == 0
    output = ready.root / "data/reports/validation"
    assert {"report.json", "metrics.json", "data_docs/index.html"} <= set(verify(output)["files"])
    assert read_json(output / "metrics.json") == {
        "accepted_answers": 1.0,
        "max_completion_tokens": 3.0,
        "max_prompt_tokens": 6.0,
    }
    first = output_digest(output)
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run(
        [sys.executable, "-m", "tasks", "validate"], cwd=ready.root, env=environment, check=True, timeout=120
    )
    assert output_digest(output) == first


def test_further_evaluation_sets_are_searched_and_their_rows_named(ready):
    questions = ["12 + 5", "90 + 5", "13 + 5"]
    (ready.root / "exam.jsonl").write_text(
        "".join(json.dumps({"question": q, "answer": "1"}) + "\n" for q in questions)
    )
    exam = {"kind": "file", "name": "exam", "path": "exam.jsonl"}
    limits = {"max_completion_tokens": 4, "contamination": {"against": [exam], "max_share": 0.7}}
    ready.params(**(LIMITS | {"validate": limits}))
    assert ready.run("validate", validate) == 0, ready.outcome("validate")
    output = ready.root / "data/reports/validation"
    [*_, found] = read_json(output / "hygiene.json")["contamination"]
    assert (found["set"], found["rows"], found["found"], found["train_rows"]) == ("exam", 3, 2, 2)
    pairs = [json.loads(line) for line in (output / "contamination.jsonl").open()]
    assert [(pair["train"], pair["evaluation"]) for pair in pairs] == [("0012", "row 1"), ("0013", "row 3")]
    limits["contamination"]["max_share"] = 0.5
    ready.params(**(LIMITS | {"validate": limits}))
    assert ready.run("validate", validate) == BAD_INPUT
    message = ready.outcome("validate")["message"]
    assert (
        "split exam: expect_column_values_to_be_null of column found_in_train (mostly 0.5): 2 of 3" in message
    )
    assert "id 'row 1', found_in_train '0012', prompt '12 + 5'" in message
    limits["contamination"]["against"] = [exam | {"path": "gone.jsonl"}]
    ready.params(**(LIMITS | {"validate": limits}))
    assert ready.run("validate", validate) == BAD_INPUT
    assert "gone.jsonl: no such file" in ready.outcome("validate")["message"]


def test_failing_stage_publishes_nothing_and_keeps_the_report(ready):
    publish(ready, replaced("train", 1, answer="17"))
    assert ready.run("validate", validate) == BAD_INPUT
    assert not (ready.root / "data/reports/validation").exists()
    message = ready.outcome("validate")["message"]
    assert "split train: expect_column_values_to_be_in_set of column grade" in message
    report = Path(message.rpartition("the whole report: ")[2].partition(", as pages: ")[0])
    assert any(not outcome["success"] for outcome in read_json(report)["splits"]["train"])
    assert Path(message.rpartition("as pages: ")[2]).is_file()
    client, run = ready.record("validate")
    assert run.info.status == "FAILED"
    assert {"report.json", "data_docs"} <= {item.path for item in client.list_artifacts(run.info.run_id)}


def test_model_without_tokenizer(ready):
    (ready.root / "data/models/base/tokenizer.json").unlink()
    with pytest.raises(BadInput, match="tokenizer"):
        load_tokenizer(ready.root / "data/models/base")
    assert ready.run("validate", validate) == BAD_INPUT
