"""Stage `evaluate`, run for real on small models: what it publishes, what it reuses, what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from tasks.evaluate import evaluate, prune
from tasks.stage import BAD_INPUT, _run
from training.evaluation.metrics import pass_at_k
from training.storage import read_json, verify

METRICS = ["pass_at_1", "pass_at_2", "pass_at_4", "maj_at_1", "maj_at_2", "maj_at_4"]
METRICS += ["accuracy_strict", "accuracy_lenient", "truncated", "no_answer", "mean_length"]


def chunks(tree) -> dict[Path, int]:
    """Every cached chunk of samples with the time it was written."""
    return {p: p.stat().st_mtime_ns for p in (tree.root / ".gradeline/cache/evaluations").glob("*/*.parquet")}


@pytest.fixture(scope="module")
def evaluated(small_tree):
    assert _run("evaluate", evaluate) == 0
    return small_tree


def test_it_publishes_samples_summary_and_metrics_that_agree(evaluated):
    output = evaluated.root / "data/evaluation"
    verify(output)
    summary, metrics = read_json(output / "summary.json"), read_json(output / "metrics.json")
    assert sorted(p.name for p in output.glob("*.parquet")) == ["samples-base.parquet", "samples-rl.parquet"]
    assert set(metrics) == {
        f"{model}/{name}" for model in ("base", "sft", "rl") for name in [*METRICS, "ungraded"]
    }
    for model in ("base", "rl"):
        samples = pd.read_parquet(output / f"samples-{model}.parquet")
        assert samples.groupby("id", sort=False).size().to_dict() == {f"test-{i}": 4 for i in range(6)}
        assert samples["sample"].tolist() == [0, 1, 2, 3] * 6
        assert metrics[f"{model}/accuracy_lenient"] == pytest.approx(samples["correct"].mean())
        assert metrics[f"{model}/accuracy_strict"] == pytest.approx(samples["strict"].mean())
        assert metrics[f"{model}/mean_length"] == pytest.approx(samples["num_tokens"].mean())
        assert metrics[f"{model}/truncated"] == pytest.approx((samples["finish_reason"] == "length").mean())
        right = samples.groupby("id")["correct"].sum()
        assert metrics[f"{model}/pass_at_2"] == pytest.approx(right.map(lambda c: pass_at_k(4, c, 2)).mean())
        for name in METRICS:
            estimate = summary["models"][model]["metrics"][name]
            assert metrics[f"{model}/{name}"] == estimate["value"]
            assert estimate["low"] <= estimate["value"] <= estimate["high"]
    assert 0 < metrics["base/accuracy_lenient"] < 1, (
        "random models hit some one-digit answers, so the figures above say something"
    )
    assert (summary["n"], summary["k"]) == (4, [1, 2, 4])
    assert summary["test_set"]["problems"] == 6
    assert summary["test_set"]["available"] == 8


def test_a_disabled_stages_model_is_sampled_once_and_said_to_be_the_same(evaluated):
    models = read_json(evaluated.root / "data/evaluation/summary.json")["models"]
    assert models["sft"]["same_as"] == "base"
    assert models["sft"]["disabled"]
    assert models["sft"]["metrics"] == models["base"]["metrics"]
    assert models["sft"]["folder"] == "data/models/base"
    assert models["rl"]["same_as"] is None


def test_only_a_changed_model_is_sampled_again_and_meets_the_same_random_streams(evaluated):
    output, before = evaluated.root / "data/evaluation", chunks(evaluated)
    base = (output / "samples-base.parquet").read_bytes()
    rl = (output / "samples-rl.parquet").read_bytes()
    evaluated.publish_model("rl", seed=1, note="the base's weights under another digest")
    assert _run("evaluate", evaluate) == 0
    after = chunks(evaluated)
    assert {path: after[path] for path in before} == before, "no chunk that was there is made again"
    assert len(after) == 3 * len(before) // 2, "the new model's chunks are added"
    assert (output / "samples-base.parquet").read_bytes() == base
    assert (output / "samples-rl.parquet").read_bytes() == base != rl


def test_estimators_change_without_sampling_and_sampling_changes_with_the_temperature(evaluated):
    before = chunks(evaluated)
    evaluated.set(evaluate__k=[1, 3], evaluate__bootstrap=20)
    assert _run("evaluate", evaluate) == 0
    assert chunks(evaluated) == before
    assert "rl/maj_at_3" in read_json(evaluated.root / "data/evaluation/metrics.json")
    evaluated.set(evaluate__temperature=0.5)
    assert _run("evaluate", evaluate) == 0
    assert len(chunks(evaluated)) > len(before)


def test_a_killed_evaluation_goes_on_where_it_was_and_ends_with_the_same_bytes(evaluated):
    evaluated.set(evaluate__temperature=1.3, evaluate__batch_size=4, evaluate__num_problems=8)
    known = chunks(evaluated)
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks", "evaluate"], start_new_session=True, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not set(chunks(evaluated)) - set(known) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kept = {path: written for path, written in chunks(evaluated).items() if path not in known}
    assert kept, "the first chunk was on disk before the kill"

    assert _run("evaluate", evaluate) == 0
    resumed = read_json(evaluated.root / "data/evaluation/manifest.json")
    after = chunks(evaluated)
    assert {path: after[path] for path in kept} == kept
    for path in set(after) - set(known):
        path.unlink()
    assert _run("evaluate", evaluate) == 0
    assert read_json(evaluated.root / "data/evaluation/manifest.json") == resumed


def test_a_damaged_chunk_is_made_again(evaluated):
    expected = read_json(evaluated.root / "data/evaluation/manifest.json")
    damaged = max(chunks(evaluated), key=lambda path: path.stat().st_mtime_ns)
    damaged.write_bytes(damaged.read_bytes()[:-40])
    assert _run("evaluate", evaluate) == 0
    assert read_json(evaluated.root / "data/evaluation/manifest.json") == expected


def test_more_problems_than_there_are_is_refused_with_both_numbers(evaluated, capsys):
    evaluated.set(evaluate__num_problems=9)
    assert _run("evaluate", evaluate) == BAD_INPUT
    message = capsys.readouterr().err
    assert "num_problems = 9" in message
    assert "8 problems" in message


def test_a_completion_longer_than_the_context_is_refused(evaluated, capsys):
    evaluated.set(evaluate__num_problems=8, evaluate__max_completion_length=126)
    assert _run("evaluate", evaluate) == BAD_INPUT
    assert "max_completion_length = 126" in (message := capsys.readouterr().err)
    assert "128 tokens; at most 124 fit" in message


def test_the_longest_unused_evaluations_go_first(tmp_path):
    for age, name in enumerate(["newest", "older", "oldest"]):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "older"]
