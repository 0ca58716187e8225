"""Great Expectations suites over the prepared splits: run them, report in plain values, write GX's pages.

Importing GX takes seconds, so it happens inside the functions. Equal data and limits give equal bytes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pandas as pd

from tasks.config import Params
from tasks.hygiene import checks
from training.data.splits import SPLITS
from training.data.table import COLUMNS, REQUIRED
from training.storage import write_json

SAMPLE_ROWS = 3
"""Failing rows shown for one expectation."""
_RANDOM_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TIME = re.compile(r"\d{8}T\d{6}\.\d{6}Z")
_NO_TIME = "20000101T000000.000000Z"


def suite_of(split: str, frame: pd.DataFrame, params: Params, context: int) -> list[Any]:
    """The expectations of one split, or of a further evaluation set; what `measure` adds is expected only where it could be added.

    `context` is the model's longest sequence in tokens.
    """
    gxe = _great_expectations().expectations
    hygiene = [one.expectation(gxe) for one in checks(params) if one.column in frame]
    if split not in SPLITS:
        return hygiene
    present = [name for name in COLUMNS if name in frame]
    required = REQUIRED if split == "train" else (*REQUIRED, "answer")
    min_rows = {str(name): number for name, number in params.validation.min_rows.items()}
    suite: list[Any] = [
        gxe.ExpectTableColumnsToMatchSet(column_set=list(COLUMNS), exact_match=False),
        gxe.ExpectTableRowCountToBeBetween(min_value=min_rows.get(split, 0)),
        *(gxe.ExpectColumnValuesToBeOfType(column=name, type_="str") for name in present),
        *(gxe.ExpectColumnValuesToNotBeNull(column=name) for name in present if name in required),
    ]
    if "id" in frame:
        suite.append(gxe.ExpectColumnValuesToBeUnique(column="id"))
    if "grade" in frame:
        limits = {
            "prompt_tokens": params.rl.max_prompt_length,
            "completion_tokens": params.validation.max_completion_tokens,
            "sequence_tokens": context,
            "rollout_tokens": context,
        }
        suite += [
            *(gxe.ExpectColumnValuesToMatchRegex(column=name, regex=r"\S") for name in COLUMNS),
            *(
                gxe.ExpectColumnValuesToBeBetween(column=name, min_value=1, max_value=limit)
                for name, limit in limits.items()
            ),
            gxe.ExpectColumnValuesToBeNull(column="other_split"),
            gxe.ExpectColumnValuesToBeInSet(
                column="grade", value_set=["right"], mostly=params.validation.min_accepted_answers
            ),
            *hygiene,
        ]
    return suite


def check(
    frames: dict[str, pd.DataFrame], params: Params, context: int, data: str, folder: Path
) -> dict[str, Any]:
    """Run each split's suite, write report.json and data_docs/ into `folder`, and return the report.

    `context` is the model's longest sequence in tokens, `data` names the data in report and pages. The report
    holds, by split, a list of: expectation, column, expected, observed, success, failing_rows (a sample).
    """
    gx = _great_expectations()
    from great_expectations.core.run_identifier import RunIdentifier
    from great_expectations.data_context.types.base import ProgressBarsConfig

    project = gx.get_context(mode="ephemeral")
    project.variables.progress_bars = ProgressBarsConfig(globally=False)
    for site in project.get_site_names():
        project.delete_data_docs_site(site)
    project.add_data_docs_site("data_docs", _site(folder / "data_docs"))
    source = project.data_sources.add_pandas("prepared")
    run_id = RunIdentifier(run_name=data, run_time=_NO_TIME)
    report: dict[str, Any] = {"data": data, "context_length": context, "splits": {}}
    for split, frame in frames.items():
        suite = project.suites.add(
            gx.ExpectationSuite(name=split, expectations=suite_of(split, frame, params, context))
        )
        batch = source.add_dataframe_asset(split).add_batch_definition_whole_dataframe(split)
        definition = project.validation_definitions.add(
            gx.ValidationDefinition(name=split, data=batch, suite=suite)
        )
        result = definition.run(
            batch_parameters={"dataframe": frame},
            result_format={"result_format": "SUMMARY", "partial_unexpected_count": SAMPLE_ROWS},
            run_id=run_id,
        )
        report["splits"][split] = [_outcome(item, frame) for item in result.results]
    project.build_data_docs()
    for page in (folder / "data_docs").rglob("*.html"):
        page.write_text(_settled(page.read_text(encoding="utf-8")), encoding="utf-8")
    write_json(folder / "report.json", report)
    return report


def _outcome(item: Any, frame: pd.DataFrame) -> dict[str, Any]:
    """One expectation's result in plain values."""
    settings, result = item.expectation_config.kwargs, item.result
    column = settings.get("column")
    if "unexpected_count" in result:
        observed: Any = {"failing": int(result["unexpected_count"]), "rows": int(result["element_count"])}
    else:
        observed = result.get("observed_value", str(item.exception_info))
    failing = (result.get("partial_unexpected_index_list") or [])[:SAMPLE_ROWS]
    return {
        "expectation": item.expectation_config.type,
        "column": column,
        "expected": {key: value for key, value in settings.items() if key not in ("batch_id", "column")},
        "observed": observed,
        "success": bool(item.success),
        "failing_rows": [_shown(frame.iloc[int(index)], (*COLUMNS, column)) for index in failing],
    }


def _shown(row: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: _plain(row[name]) for name in dict.fromkeys(names) if name in row}


def _plain(value: Any) -> Any:
    """A JSON value; long texts are cut."""
    if isinstance(value, str):
        return value if len(value) <= 200 else value[:199] + "…"
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else str(value)


def _settled(page: str) -> str:
    """A page without what differs from run to run of equal data: random ids are numbered, times set to one."""
    numbers: dict[str, str] = {}
    return _RANDOM_ID.sub(
        lambda match: numbers.setdefault(match[0], f"{len(numbers):012d}"), _TIME.sub(_NO_TIME, page)
    )


def _site(folder: Path) -> dict[str, Any]:
    return {
        "class_name": "SiteBuilder",
        "show_how_to_buttons": False,
        "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(folder)},
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
    }


def _great_expectations() -> Any:
    """The package, without its telemetry."""
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    import great_expectations
    import great_expectations.expectations

    return great_expectations
