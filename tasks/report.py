"""Stage `report`: one page that shows what the run bought, readable without a network and on a phone.

It holds everything in itself: styles, plots (PNG as data URIs) and sampled completions. Beside it lie the
plots as files and the results table as Markdown.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tasks.config import ReportConfig
from tasks.plots import (
    REWARD_COLOR,
    STYLES,
    plot_at_k,
    plot_calibration,
    plot_checks,
    plot_lengths,
    plot_steps,
)
from tasks.stage import Stage, is_disabled
from tasks.tracking import OUTPUTS
from training.storage import read_json, write_text

LABELS = {"base": "Base", "sft": "SFT", "dpo": "DPO", "rl": "RL", "reward_model": "Reward model"}
COLORS = {name: str(style["color"]) for name, style in STYLES.items()} | {"reward_model": REWARD_COLOR}
HEADLINE_K = 8
"""The K of the headline figures, where it was evaluated; else the largest that was."""
MEASURES = [
    ("accuracy_strict", "Strict accuracy"),
    ("accuracy_lenient", "Lenient accuracy"),
    ("no_answer", "No answer found"),
    ("truncated", "Cut off"),
    ("mean_length", "Mean length, tokens"),
]
"""What the results table holds below the headline figures."""
CHECKS = {
    "twin_of": "near-duplicates",
    "contaminated_by": "holds an evaluation question",
    "found_in_train": "found in train",
    "leak": "answer in the question",
    "prompt_deviation": "prompt length",
    "completion_deviation": "reference length",
    "script_share": "other script",
    "unsafe_characters": "unsafe characters",
}
"""What the columns of the data's checks (tasks/hygiene.py) are called on the page."""
CURVES: dict[str, list[tuple[str, str, dict[str, str]]]] = {
    "rl": [
        ("reward", "Reward", {"reward": "mean reward"}),
        (
            "spread",
            "Rewards within a group",
            {"frac_reward_zero_std": "share of groups all equal", "reward_std": "std"},
        ),
        (
            "length",
            "Completion length, tokens",
            {"completions/mean_length": "mean", "completions/max_length": "longest"},
        ),
        ("truncated", "Share cut off", {"completions/clipped_ratio": "share of completions cut off"}),
        ("entropy", "Entropy, nats a token", {"entropy": "entropy"}),
        ("kl", "KL to the reference, nats a token", {"kl": "KL"}),
        ("clip", "Share of tokens clipped", {"clip_ratio/region_mean": "clipped"}),
        ("grad_norm", "Gradient norm", {"grad_norm": "gradient norm"}),
        ("loss", "Loss", {"loss": "loss"}),
    ],
    "reward_model": [
        ("accuracy", "Share of pairs ranked right", {"accuracy": "accuracy"}),
        ("loss", "Loss, nats a pair", {"loss": "loss"}),
        ("margin", "Reward, chosen minus rejected", {"margin": "margin"}),
        ("grad_norm", "Gradient norm", {"grad_norm": "gradient norm"}),
    ],
    "dpo": [
        ("loss", "Loss, nats a pair", {"loss": "loss"}),
        ("accuracy", "Pairs ranked right", {"rewards/accuracies": "accuracy"}),
        (
            "margin",
            "Implicit reward",
            {"rewards/chosen": "chosen", "rewards/rejected": "rejected", "rewards/margins": "margin"},
        ),
        ("grad_norm", "Gradient norm", {"grad_norm": "gradient norm"}),
    ],
    "sft": [
        ("loss", "Loss, nats a token", {"loss": "loss"}),
        ("grad_norm", "Gradient norm", {"grad_norm": "gradient norm"}),
    ],
}
"""Learning curves by stage: file name, title, and the metrics drawn with their labels; those not recorded are left out."""


def report(stage: Stage) -> None:
    """Write index.html, table.md and plots/ from the outputs of the other stages."""
    inputs = read_inputs(stage.root)
    with stage.publish(gains(inputs.summary)) as folder:
        write_report(inputs, stage.params.report, folder)
    stage.run.artifact(stage.output / "index.html")
    print(table_markdown(inputs.summary), flush=True)


@dataclass(frozen=True)
class Inputs:
    """What the page tells: contents of the other stages' outputs, `evaluation` the folder with the samples.

    `disabled` names the stages that every pipeline has; those that are off unless asked for are just left out.
    """

    summary: dict[str, Any]
    evaluation: Path
    counts: dict[str, Any]
    validation: dict[str, Any]
    source: dict[str, Any] | None
    histories: dict[str, list[dict[str, Any]]]
    disabled: list[str]
    calibration: list[dict[str, float]] | None = None
    hygiene: dict[str, Any] | None = None
    contained: dict[str, bool] = field(default_factory=dict)
    """Whether programs ran in a sandbox, by stage that was allowed to do without one."""


def read_inputs(root: Path) -> Inputs:
    """Read the outputs under `root`/data; a disabled stage has no history."""
    folders = {name: root / path for name, path in OUTPUTS.items()}
    source = folders["model"] / "source.json"
    calibration = folders["reward_model"] / "calibration.json"
    hygiene = folders["validate"] / "hygiene.json"
    graded = {name: _metrics(folders[name]) for name in ("validate", "preferences", "rl", "evaluate")}
    return Inputs(
        summary=read_json(folders["evaluate"] / "summary.json"),
        evaluation=folders["evaluate"],
        counts=read_json(folders["prepare"] / "counts.json"),
        validation=read_json(folders["validate"] / "report.json"),
        source=read_json(source) if source.is_file() else None,
        histories={
            name: read_history(folders[name] / "history.jsonl")
            for name in CURVES
            if not is_disabled(folders[name])
        },
        disabled=[name for name in ("sft", "rl") if is_disabled(folders[name])],
        calibration=read_json(calibration)["bins"] if calibration.is_file() else None,
        hygiene=read_json(hygiene) if hygiene.is_file() else None,
        contained={
            name: not metrics["unsandboxed_code"]
            for name, metrics in graded.items()
            if "unsandboxed_code" in metrics
        },
    )


def read_history(path: Path) -> list[dict[str, Any]]:
    """One row of metrics a step."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def write_report(inputs: Inputs, config: ReportConfig, folder: Path) -> None:
    """Fill `folder` with the page, its plots and the table; equal inputs give equal bytes."""
    summary = inputs.summary
    figures = {
        "results": _result_plots(summary, folder / "plots"),
        **{name: _curve_plots(name, history, folder / "plots") for name, history in inputs.histories.items()},
    }
    if inputs.calibration:
        path = folder / "plots" / "reward_model_calibration.png"
        plot_calibration(path, "Calibration", inputs.calibration)
        figures["reward_model"].append(
            _figure(path, "Reward model: accuracy against predicted probability on held-out pairs")
        )
    if inputs.hygiene:
        figures["data"] = _data_plots(inputs.hygiene, folder / "plots")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = figure
    page = environment.get_template("report.html.j2").render(
        title=config.title,
        labels=LABELS,
        colors=COLORS,
        summary=summary,
        models=summary["models"],
        headline=headline(summary),
        checks=CHECKS,
        measures=MEASURES,
        at_k=[
            (f"{kind}_at_{k}", f"{label}@{k}")
            for kind, label in (("pass", "Pass"), ("maj", "Maj"))
            for k in summary["k"]
        ],
        figures=figures,
        examples={
            name: examples(inputs.evaluation, model, config.examples)
            for name, model in summary["models"].items()
        },
        counts=inputs.counts,
        validation=validation_rows(inputs.validation),
        source=inputs.source,
        hygiene=inputs.hygiene,
        contained=inputs.contained,
        disabled=inputs.disabled,
        trained={name: history[-1] for name, history in inputs.histories.items() if history},
    )
    write_text(folder / "index.html", page)
    write_text(folder / "table.md", table_markdown(summary))


def headline(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The metrics that stand side by side first: Pass@1, Pass@8 and Maj@8 where these were evaluated."""
    k = HEADLINE_K if HEADLINE_K in summary["k"] else max(summary["k"])
    wanted = [("pass_at_1", "Pass@1"), (f"pass_at_{k}", f"Pass@{k}"), (f"maj_at_{k}", f"Maj@{k}")]
    known = next(iter(summary["models"].values()))["metrics"]
    return list(dict(pair for pair in wanted if pair[0] in known).items())


def gains(summary: dict[str, Any]) -> dict[str, float]:
    """How much the last model has over the base in each headline metric."""
    models = summary["models"]
    return {
        f"gain/{name}": models["rl"]["metrics"][name]["value"] - models["base"]["metrics"][name]["value"]
        for name, _ in headline(summary)
    }


def table_markdown(summary: dict[str, Any]) -> str:
    """The headline metrics as a Markdown table: a line a model, each value with its 95 % interval."""
    columns = headline(summary)
    lines = [
        "| Model | " + " | ".join(label for _, label in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for name, model in summary["models"].items():
        note = f" (off: same as {LABELS[model['same_as']]})" if model["same_as"] else ""
        cells = [_with_interval(model["metrics"][metric], metric) for metric, _ in columns]
        lines.append(f"| {LABELS[name]}{note} | " + " | ".join(cells) + " |")
    test = summary["test_set"]
    lines += [
        "",
        f"{test['problems']} held-out problems, {summary['n']} samples each; brackets: bootstrap 95 % intervals over problems.",
    ]
    return "\n".join(lines) + "\n"


def figure(value: float, metric: str) -> str:
    """A share with three digits, a length in tokens with one."""
    return f"{value:.1f}" if metric.endswith("length") else f"{value:.3f}"


def validation_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """How many of each split's expectations hold, and those that don't by name."""
    return [
        {
            "split": split,
            "held": sum(entry["success"] for entry in entries),
            "all": len(entries),
            "failed": [
                f"{entry['expectation']} ({entry['column']})" for entry in entries if not entry["success"]
            ],
        }
        for split, entries in result["splits"].items()
    ]


def examples(evaluation: Path, model: dict[str, Any], wanted: int) -> list[dict[str, Any]]:
    """Up to `wanted` sampled completions of a model, wrong ones first, at most one of each kind a problem."""
    if model["same_as"]:
        return []
    quota = {False: (wanted + 1) // 2, True: (wanted + 1) // 2}
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    seen: set[tuple[str, bool]] = set()
    for row in _rows(evaluation / model["samples"]):
        kind = (row["id"], row["correct"])
        if kind not in seen and len(found[row["correct"]]) < quota[row["correct"]]:
            seen.add(kind)
            found[row["correct"]].append(row)
        if all(len(found[correct]) >= quota[correct] for correct in found):
            break
    return (found[False] + found[True])[:wanted]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for batch in pq.ParquetFile(path).iter_batches(batch_size=1024):
        yield from batch.to_pylist()


def _result_plots(summary: dict[str, Any], folder: Path) -> list[dict[str, str]]:
    shown = []
    for kind, label in (("pass", "Pass"), ("maj", "Maj")):
        curves = {}
        for name, model in summary["models"].items():
            if model["same_as"]:
                continue
            estimates = [(k, model["metrics"][f"{kind}_at_{k}"]) for k in summary["k"]]
            curves[name] = (LABELS[name], [(k, e["value"], e["low"], e["high"]) for k, e in estimates])
        path = folder / f"{kind}_at_k.png"
        plot_at_k(path, f"{label}@K", curves)
        shown.append(_figure(path, f"{label}@K against K for each model, with 95 % intervals"))
    return shown


def _data_plots(hygiene: dict[str, Any], folder: Path) -> list[dict[str, str]]:
    shown = []
    worst: dict[str, tuple[float, float]] = {}
    for entry in hygiene["checks"]:
        share = entry["failing"] / entry["rows"]
        worst[entry["column"]] = max(worst.get(entry["column"], (0.0, 0.0)), (share, entry["max_share"]))
    rows = [(CHECKS[column], *shares) for column, shares in worst.items()]
    if rows:
        path = folder / "data_checks.png"
        plot_checks(path, "Rows that fail a check", rows)
        shown.append(
            _figure(path, "Share of the rows that fail each check, in the split with most, and its limit")
        )
    for name, label in (("prompt_tokens", "Prompt length"), ("completion_tokens", "Reference length")):
        histogram = hygiene["lengths"][name]
        if histogram["edges"]:
            path = folder / f"data_{name}.png"
            plot_lengths(path, f"{label}, share of rows", histogram["edges"], histogram["counts"])
            shown.append(_figure(path, f"{label} in tokens, by split"))
    return shown


def _metrics(folder: Path) -> dict[str, float]:
    file = folder / "metrics.json"
    return read_json(file) if file.is_file() else {}


def _curve_plots(stage: str, history: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, str]]:
    shown = []
    for file, title, names in CURVES[stage]:
        recorded = {
            name: label for name, label in names.items() if any(row.get(name) is not None for row in history)
        }
        if recorded:
            path = folder / f"{stage}_{file}.png"
            plot_steps(path, title, history, recorded, COLORS[stage])
            shown.append(_figure(path, f"{LABELS[stage]}: {title} by step"))
    return shown


def _figure(path: Path, text: str) -> dict[str, str]:
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    return {"uri": f"data:image/png;base64,{encoded}", "alt": text}


def _with_interval(estimate: dict[str, float], metric: str) -> str:
    value, low, high = (figure(estimate[part], metric) for part in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
