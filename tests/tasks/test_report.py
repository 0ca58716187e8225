"""Stage `report`: a page that needs nothing but itself, escapes what models wrote, and says what was switched off."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.config import ReportConfig
from tasks.evaluate import SCHEMA, evaluate
from tasks.report import Inputs, examples, gains, headline, report, table_markdown, write_report
from tasks.stage import _run
from training.storage import read_json, verify

HOSTILE = "<script>alert(1)</script> & <img src=x onerror=alert(2)>"


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.05, "high": value + 0.05}


def model(value: float, name: str, same_as: str | None = None) -> dict:
    metrics = {f"{kind}_at_{k}": estimate(value + 0.01 * k) for kind in ("pass", "maj") for k in (1, 4, 8)}
    metrics |= {
        key: estimate(0.2) for key in ("accuracy_strict", "accuracy_lenient", "no_answer", "truncated")
    }
    metrics["mean_length"] = {"value": 12.34, "low": 11.0, "high": 13.0}
    return {
        "digest": name * 8,
        "metrics": metrics,
        "samples": f"samples-{name}.parquet",
        "ungraded": 0,
        "same_as": same_as,
        "disabled": same_as is not None,
    }


def row(problem: int, sample: int, correct: bool, text: str) -> dict:
    return {
        "id": f"p{problem}", "prompt": f"{problem} + 1 = ?", "answer": str(problem + 1), "sample": sample, "completion": text, "extracted": None,
        "vote": None, "graded": True, "correct": correct, "strict": False, "finish_reason": "length", "num_tokens": 3, "logprob": -1.0,
    }  # fmt: skip


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    rows = [
        row(p, s, correct=(p + s) % 2 == 0, text=f"{HOSTILE} {p}/{s}") for p in range(6) for s in range(3)
    ]
    for name in ("base", "rl"):
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), tmp_path / f"samples-{name}.parquet")
    return Inputs(
        summary={
            "n": 8, "k": [1, 4, 8], "seed": 3, "strict": ["math", "stop"],
            "sampling": {"temperature": 0.7, "top_p": 1.0, "max_tokens": 32},
            "test_set": {"digest": "d" * 64, "problems": 6, "available": 9},
            "models": {"base": model(0.1, "base"), "sft": model(0.1, "base", same_as="base"), "rl": model(0.6, "rl")},
        },
        evaluation=tmp_path,
        counts={
            "rows": {"train": 10, "validation": 2, "test": 9}, "duplicates": 4, "contradictions": 2,
            "sources": [{"name": "sums & more", "license": "MIT", "rows_read": 25, "rows": {"train": 10, "validation": 2, "test": 9}, "duplicates": 4}],
        },
        validation={"splits": {"train": [{"expectation": "expect_x", "column": "id", "success": True}], "test": [{"expectation": "expect_y", "column": "answer", "success": False}]}},
        source={"source": "scratch", "revision": "seed 1"},
        histories={"rl": [{"step": s, "loss": 0.0, "reward": s / 10, "kl": None, "entropy": 1.0} for s in range(1, 6)]},
        disabled=["sft"],
    )  # fmt: skip


class Page(HTMLParser):
    """Tags with their attributes, and the text that a reader sees."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data + " "


def test_the_page_needs_nothing_but_itself(inputs, tmp_path):
    write_report(inputs, ReportConfig(), tmp_path / "out")
    html = (tmp_path / "out/index.html").read_text()
    page = Page(html)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    sources = [
        value
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("src", "href", "srcset")
    ]
    assert sources
    assert all(value.startswith("data:image/png;base64,") for value in sources)
    assert not re.findall(r"url\(|@import|https?://", html)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    assert all(attributes.get("alt") for tag, attributes in page.tags if tag == "img")


def test_what_models_wrote_is_text_and_never_markup(inputs, tmp_path):
    write_report(inputs, ReportConfig(title="A <b>run</b>"), tmp_path / "out")
    page = Page((tmp_path / "out/index.html").read_text())
    assert HOSTILE in page.text
    assert "A <b>run</b>" in page.text
    assert not any(attributes.get("onerror") for _, attributes in page.tags)


def test_equal_inputs_give_equal_bytes(inputs, tmp_path):
    for name in ("first", "second"):
        write_report(inputs, ReportConfig(), tmp_path / name)
    files = {
        p.relative_to(tmp_path / "first"): p.read_bytes()
        for p in (tmp_path / "first").rglob("*")
        if p.is_file()
    }
    assert {
        Path("index.html"),
        Path("table.md"),
        Path("plots/pass_at_k.png"),
        Path("plots/maj_at_k.png"),
        Path("plots/rl_reward.png"),
    } <= set(files)
    assert files == {path: (tmp_path / "second" / path).read_bytes() for path in files}


def test_curves_that_were_not_recorded_are_left_out(inputs, tmp_path):
    write_report(inputs, ReportConfig(), tmp_path)
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    assert drawn == {"pass_at_k.png", "maj_at_k.png", "rl_reward.png", "rl_entropy.png", "rl_loss.png"}


def test_the_page_says_what_was_switched_off_counted_and_refused(inputs, tmp_path):
    write_report(inputs, ReportConfig(), tmp_path)
    text = " ".join(Page((tmp_path / "index.html").read_text()).text.split())
    assert "SFT is disabled in this run: its figures are those of Base, the same model." in text
    assert "sums & more MIT 25 10 2 9 4" in text
    assert "2 of them came with another answer" in text
    assert "train: 1 of 1 expectations hold." in text
    assert "test: 0 of 1 expectations hold; failing: expect_y (answer)." in text


def test_the_table_holds_the_headline_metrics(inputs):
    lines = table_markdown(inputs.summary).splitlines()
    assert lines[0] == "| Model | Pass@1 | Pass@8 | Maj@8 |"
    assert lines[2] == "| Base | 0.110 [0.060, 0.160] | 0.180 [0.130, 0.230] | 0.180 [0.130, 0.230] |"
    assert lines[3].startswith("| SFT (off: same as Base) | 0.110")
    assert lines[4].startswith("| RL | 0.610")
    assert gains(inputs.summary) == pytest.approx(
        {f"gain/{name}": 0.5 for name in ("pass_at_1", "pass_at_8", "maj_at_8")}
    )


@pytest.mark.parametrize(
    ("ks", "expected"),
    [
        ([1, 2, 16], ["pass_at_1", "pass_at_16", "maj_at_16"]),
        ([4], ["pass_at_4", "maj_at_4"]),
        ([1], ["pass_at_1", "maj_at_1"]),
    ],
)
def test_the_headline_takes_the_largest_k_where_8_was_not_evaluated(ks, expected):
    metrics = {f"{kind}_at_{k}": estimate(0.5) for kind in ("pass", "maj") for k in ks}
    assert [name for name, _ in headline({"k": ks, "models": {"base": {"metrics": metrics}}})] == expected


def test_examples_show_right_and_wrong_ones_of_many_problems(inputs):
    chosen = examples(inputs.evaluation, inputs.summary["models"]["rl"], 6)
    assert [entry["correct"] for entry in chosen] == [False] * 3 + [True] * 3
    assert len({(entry["id"], entry["correct"]) for entry in chosen}) == 6
    assert examples(inputs.evaluation, inputs.summary["models"]["sft"], 6) == []


def test_a_run_with_every_trained_stage_off_has_a_page(inputs, tmp_path):
    summary = json.loads(json.dumps(inputs.summary))
    summary["models"]["rl"] = model(0.1, "base", same_as="base")
    nothing_trained = replace(inputs, summary=summary, histories={}, disabled=["sft", "rl"])
    write_report(nothing_trained, ReportConfig(), tmp_path)
    assert "RL is disabled in this run" in Page((tmp_path / "index.html").read_text()).text


def test_the_stage_reports_what_the_other_stages_published(small_tree):
    assert _run("evaluate", evaluate) == 0
    assert _run("report", report) == 0
    output = small_tree.root / "data/reports/run"
    verify(output)
    evaluated = read_json(small_tree.root / "data/evaluation/metrics.json")
    gain = read_json(output / "metrics.json")["gain/pass_at_1"]
    assert gain == pytest.approx(evaluated["rl/pass_at_1"] - evaluated["base/pass_at_1"])
    assert "SFT is disabled" in (output / "index.html").read_text()
    assert (output / "table.md").read_text() == table_markdown(
        read_json(small_tree.root / "data/evaluation/summary.json")
    )


def test_a_reward_model_is_shown_with_its_curves_and_calibration(inputs, tmp_path):
    steps = [
        {"step": s, "loss": 1 / s, "accuracy": 0.9, "margin": 1.0, "grad_norm": 1.0} for s in range(1, 4)
    ]
    bins = [{"low": 0.9, "high": 0.95, "pairs": 7, "confidence": 0.93, "accuracy": 0.86}]
    trained = replace(inputs, histories=inputs.histories | {"reward_model": steps}, calibration=bins)
    write_report(trained, ReportConfig(), tmp_path)
    plots = {path.name for path in (tmp_path / "plots").glob("reward_model_*.png")}
    shown = ("accuracy", "loss", "margin", "grad_norm", "calibration")
    assert plots == {f"reward_model_{name}.png" for name in shown}
    text = " ".join(Page((tmp_path / "index.html").read_text()).text.split())
    assert "Reward model 3 steps." in text
    assert "DPO" not in text


def test_the_datas_checks_are_drawn_and_rows_named(inputs, tmp_path):
    pair = {
        "train": "t7",
        "evaluation": "row 3",
        "covered": 0.9,
        "train_prompt": HOSTILE,
        "evaluation_prompt": "q",
    }
    twin = {
        "id": "t1",
        "question": "a?",
        "answer": "1",
        "of_id": "e1",
        "of_split": "test",
        "of_question": "a ?",
        "of_answer": "2",
        "similarity": 1.0,
    }
    hygiene = {
        "checks": [
            {"check": "leaks", "column": "leak", "split": "train", "rows": 10, "failing": 1, "max_share": 0.01, "examples": [{"id": "t2", "value": "marked", "prompt": HOSTILE}]},
            {"check": "unicode", "column": "unsafe_characters", "split": "test", "rows": 9, "failing": 0, "max_share": 0.01, "examples": []},
        ],
        "lengths": {
            "prompt_tokens": {"edges": [1.0, 2.0, 3.0], "counts": {"train": [4, 6], "validation": [0, 0], "test": [9, 0]}},
            "completion_tokens": {"edges": [], "counts": {}},
        },
        "contamination": [{"set": "math500", "rows": 500, "found": 1, "train_rows": 1, "pairs": [pair]}],
    }  # fmt: skip
    counts = inputs.counts | {"near_duplicates": 1, "near_duplicates_of_held_out": 1, "near_duplicate_pairs": [twin]}  # fmt: skip
    write_report(replace(inputs, hygiene=hygiene, counts=counts), ReportConfig(), tmp_path)
    drawn = {path.name for path in (tmp_path / "plots").glob("data_*")}
    assert drawn == {"data_checks.png", "data_prompt_tokens.png"}
    page = Page((tmp_path / "index.html").read_text())
    text = " ".join(page.text.split())
    assert "math500 500 1 1" in text
    assert "train t7 holds 90 % of math500 row 3" in text
    assert "answer in the question: 1 of 10 train rows t2 · marked" in text
    assert "1 near-duplicates left out of train, 1 of them of held-out questions" in text
    assert "similarity 1.00, another answer · left out t1 , kept test e1" in text
    assert not any(attributes.get("onerror") for _, attributes in page.tags)


def test_programs_run_without_a_sandbox_are_said_plainly(inputs, tmp_path):
    write_report(replace(inputs, contained={"rl": False, "evaluate": True}), ReportConfig(), tmp_path)
    text = " ".join(Page((tmp_path / "index.html").read_text()).text.split())
    assert (
        "Stage rl ran programs that a model or the data wrote without a sandbox, with the rights of whoever"
        in text
    )
    assert (
        "Stage evaluate was allowed to run programs without a sandbox ( rewards.code.unsafe ), but ran them in one."
        in text
    )
