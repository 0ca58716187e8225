"""What the pipeline costs beside its work: `python -m benchmarks.overhead` runs recipe `tiny` in a fresh clone, then again.

Of each stage: the seconds of its Prefect task, those of its own work (its MLflow run), and what lies between them: DVC, the
start of a process, imports. The runs after the first find every stage cached. It writes
benchmarks/results/overhead.json and the tables in docs/performance.md.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import UUID

from benchmarks.pages import RESULTS, ROOT, machine, put, today
from tasks.tracking import STAGES, open_store
from training.storage import write_json

RAW = RESULTS / "overhead.json"
SECTION, PAGE = "overhead", ROOT / "docs" / "performance.md"
RECIPE = "tiny"


def run(tree: Path) -> tuple[float, str]:
    """Seconds of one `gradeline run` in the tree, its start and end included, and the MLflow run's id."""
    began = time.monotonic()
    command = [sys.executable, "-m", "flows.cli", "run", "-c", RECIPE]
    said = subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds = time.monotonic() - began
    found = re.search(r"MLflow +run (\w+)", said)
    assert found
    return seconds, found[1]


def tasks_of(tree: Path, flow_run: str) -> tuple[float, dict[str, float]]:
    """Seconds of a flow run, and of each of its tasks by name, as Prefect kept them."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    from flows.server import prefect_api

    with prefect_api(tree), get_client(sync_client=True) as client:
        whole = client.read_flow_run(UUID(flow_run))
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run)]))
        tasks = client.read_task_runs(flow_run_filter=wanted)
    return whole.total_run_time.total_seconds(), {t.name: t.total_run_time.total_seconds() for t in tasks}


def measure(repeats: int) -> dict[str, Any]:
    """A first run by stage, and the seconds of `repeats` cached ones."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
        total, made = run(tree)
        client, experiment = open_store(tree)
        flow, tasks = tasks_of(tree, client.get_run(made).data.tags["prefect_flow_run"])
        runs = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{made}'")
        work = {one.data.tags["stage"]: one.data.metrics["seconds"] for one in runs}
        return {
            "total": total,
            "flow": flow,
            "stages": {name: {"task": tasks[name], "work": work[name]} for name in STAGES},
            "cached": [run(tree)[0] for _ in range(repeats)],
        }


def section(result: dict[str, Any]) -> str:
    """The tables between the page's markers."""
    stages = result["stages"]
    tasks, work = (sum(one[key] for one in stages.values()) for key in ("task", "work"))
    rows = [(f"`{name}`", one["task"], one["work"]) for name, one in stages.items()]
    rows.append(("between the stages", result["flow"] - tasks, 0.0))
    rows.append(("start of the command and of a Prefect server, end", result["total"] - result["flow"], 0.0))
    rows.append(("all", result["total"], work))
    cached = result["cached"]
    return "\n".join(
        [
            f"| `gradeline run -c {RECIPE}` | seconds | work, s | beside it, s |",
            "|---|---:|---:|---:|",
            *(f"| {name} | {all_:.1f} | {own:.1f} | {all_ - own:.1f} |" for name, all_, own in rows),
            "",
            f"Run again, with every stage cached: {statistics.median(cached):.1f} s [{min(cached):.1f}, {max(cached):.1f}] "
            f"({len(cached)} runs).",
            "",
            f"Made by `python -m benchmarks.overhead` on {result['date']}, {result['machine']}.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="cached runs")
    result = {"machine": machine(), "date": today(), **measure(parser.parse_args().repeats)}
    write_json(RAW, result)
    put(PAGE, SECTION, section(result))
    print(section(result))


if __name__ == "__main__":
    main()
