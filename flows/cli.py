"""The command line: `gradeline run`, `plan`, `stages`, `grade`, `workspaces`, `ui`, `schema`.

Everything heavy is imported by the command that needs it, so that help is there at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from training.errors import BadInput

if TYPE_CHECKING:
    from rich.table import Table

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Fine-tune language models on tasks whose answers can be graded.",
)
workspaces_app = typer.Typer(no_args_is_help=True, help="Trees in which runs with other settings happen.")
app.add_typer(workspaces_app, name="workspaces")

INTERRUPTED, TERMINATED, BUSY = 130, 143, 75

Recipe = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        metavar="RECIPE",
        help="Recipe: a file, a name in configs/, or several laid over each other, e.g. tiny+dapo. Runs in a workspace.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", "-S", metavar="KEY=VALUE", help="Change one setting, e.g. rl.beta=0.04. Runs in a workspace."
    ),
]
Name = Annotated[
    str | None,
    typer.Option("--name", help="Name of the workspace; the recipe and a hash of the settings by default."),
]
FromStage = Annotated[
    str | None,
    typer.Option("--from", metavar="STAGE", help="Run this stage and all that depend on it again."),
]
Only = Annotated[str | None, typer.Option("--only", metavar="STAGE", help="Run this stage alone.")]


@app.command()
def run(
    recipe: Recipe = None,
    overrides: Overrides = None,
    name: Name = None,
    from_stage: FromStage = None,
    only: Only = None,
) -> None:
    """Run the pipeline: the tree's params.yaml in place, anything else in a workspace. Only what changed runs."""
    with _clean_errors():
        from tasks.tree import find_root
        from tasks.versioning import forced_stages, plan
        from tasks.workspaces import claimed

        began = time.monotonic()
        root = find_root(Path.cwd())
        forced_stages(root, from_stage, only)
        with claimed(root, recipe, overrides, name) as tree:
            nothing_to_do = not (from_stage or only) and all(stage.state == "cached" for stage in plan(tree))
            run_id = _record_cached(tree) if nothing_to_do else ""
        if not nothing_to_do:
            run_id = _run_flow(root, recipe, overrides, name, from_stage, only)
        _show_results(root, tree, run_id, time.monotonic() - began)


@app.command()
def plan(recipe: Recipe = None, overrides: Overrides = None, name: Name = None) -> None:
    """Show what a run would do: each stage cached, or stale and why."""
    with _clean_errors():
        from tasks import versioning
        from tasks.tree import find_root
        from tasks.workspaces import claimed

        root = find_root(Path.cwd())
        if recipe or overrides or name:
            with claimed(root, recipe, overrides, name) as tree:
                stages = versioning.plan(tree)
        else:
            versioning.initialise(root)
            stages = versioning.plan(root)
        colours = {"cached": "green", "stale": "yellow", "downstream": "cyan"}
        rows = [
            [stage.name, f"[{colours[stage.state]}]{stage.state}", _plain("\n".join(stage.reasons))]
            for stage in stages
        ]
        _print(_table(["stage", "state", "why"], rows))


@app.command()
def stages() -> None:
    """List the stages: command, what goes in, what comes out, whether it is switched on."""
    with _clean_errors():
        from tasks import versioning
        from tasks.config import load_params
        from tasks.tree import find_root

        root = find_root(Path.cwd())
        params = load_params(root / "params.yaml")
        rows = []
        for name, stage in versioning.stages(root).items():
            enabled = getattr(params.section(name), "enabled", True)
            inputs = [*stage.get("deps", []), "params: " + ", ".join(stage.get("params", []))]
            rows.append(
                [
                    name,
                    "yes" if enabled else "no",
                    stage["cmd"],
                    *(_plain("\n".join(part)) for part in (inputs, stage["outs"])),
                ]
            )
        _print(_table(["stage", "enabled", "command", "inputs", "outputs"], rows))


@app.command()
def grade(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.jsonl", help="Rows with `completion` and, say, `answer`.")
    ],
    reward: Annotated[
        str,
        typer.Option(
            "--reward", metavar="NAME", help="A built-in reward, package.module:function or file.py:function."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", metavar="OUT.jsonl", help="Where the graded rows go.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            "--config", "-c", metavar="RECIPE", help="Take settings from this recipe, not params.yaml."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-S", metavar="KEY=VALUE", help="Change one setting, e.g. rewards.math.timeout=1."
        ),
    ] = None,
) -> None:
    """Try a reward on a file: writes each row, in order, with `score`, `extracted` and `reason`."""
    with _clean_errors():
        from tasks.config import load_params
        from tasks.grade import grade_file
        from tasks.tree import find_root
        from tasks.workspaces import find_recipe

        root = find_root(Path.cwd())
        params = load_params(find_recipe(root, recipe), overrides)
        file, output = (Path(os.path.relpath(path, root)) for path in (file, output))
        os.chdir(root)  # a stage looks for a user's reward from there
        said = grade_file(reward, params.rewards, file, output)
        mean = "none" if said["mean"] is None else f"{said['mean']:.4g}"
        print(f"{said['rows']} rows, mean {reward} {mean}, {said['ungraded']} without a score: {output}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of params.yaml and of the recipes, for editors."""
    from tasks.config import json_schema

    print(json_schema(), end="")


@app.command()
def ui(port: Annotated[int, typer.Option(help="Port on the loopback interface.")] = 5000) -> None:
    """Serve the MLflow pages of this project's runs on this machine."""
    with _clean_errors():
        from tasks.tracking import open_store, tracking_uri
        from tasks.tree import find_root

        root = find_root(Path.cwd())
        uri = tracking_uri(root)
        if uri.startswith("http"):
            print(f"MLflow: {uri}")
            return
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                raise BadInput(f"--port {port}: in use; give another one") from None
        open_store(root)
        print(f"MLflow: http://127.0.0.1:{port} (Ctrl-C ends it)", flush=True)
        os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--workers", "1"]
        os.execv(sys.executable, [*command, "--host", "127.0.0.1", "--port", str(port)])


@workspaces_app.command("list")
def list_workspaces() -> None:
    """List the workspaces, the last used first."""
    with _clean_errors():
        from tasks.tree import find_root
        from tasks.workspaces import workspaces

        found = workspaces(find_root(Path.cwd()))
        rows = [
            [
                one.name,
                _plain(" ".join([one.recipe, *one.overrides])),
                one.commit[:10],
                time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used)),
                f"pid {one.pid}" if one.pid else "no",
            ]
            for one in found
        ]
        _print(
            _table(["workspace", "settings", "commit", "last used", "running"], rows)
            if rows
            else "no workspaces"
        )
        if found:
            print(f"in {found[0].path.parent}")


@workspaces_app.command("prune")
def prune_workspaces(
    names: Annotated[list[str] | None, typer.Argument(help="Workspaces to remove.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Remove all that nothing runs in.")] = False,
) -> None:
    """Remove workspaces; what they made stays in the DVC cache and in MLflow."""
    with _clean_errors():
        from tasks.tree import find_root
        from tasks.workspaces import prune, workspaces

        root = find_root(Path.cwd())
        if not names and not every:
            raise BadInput(
                "name the workspaces to remove, or give --all (`gradeline workspaces list` shows them)"
            )
        for name in names or [one.name for one in workspaces(root) if one.pid is None]:
            prune(root, name)
            print(f"removed {name}")


def main() -> None:
    """Entry point of the `gradeline` command."""
    app()


@contextmanager
def _clean_errors() -> Iterator[None]:
    """Turn errors that the user can act on into one message on stderr and an exit code."""
    try:
        yield
    except BadInput as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except RuntimeError as error:
        from tasks.tree import TreeBusy

        if isinstance(error, TreeBusy):
            _fail(str(error), BUSY)
        if type(error).__name__ == "StageFailed":  # flows.stage is not imported just to ask
            _fail(str(error), getattr(error, "code", None) or 1)
        raise


def _fail(message: str, code: int) -> None:
    print(f"gradeline: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _record_cached(tree: Path) -> str:
    """Record a run in which nothing had to be done; returns its MLflow run id."""
    from tasks import versioning
    from tasks.config import load_params
    from tasks.tracking import Pipeline

    pipeline = Pipeline.start(tree, load_params(tree / "params.yaml"), launcher="gradeline run")
    pipeline.conclude(tree)
    pipeline.finish()
    if versioning.has_remote(tree):
        versioning.push(tree)
    print("every stage is cached")
    return pipeline.run_id


def _run_flow(root: Path, *arguments: Any) -> str:
    signal.signal(signal.SIGTERM, _terminate)
    from flows.finetune import finetune
    from flows.server import prefect_api

    with prefect_api(root):
        return finetune(*arguments)


def _terminate(signum: int, frame: Any) -> None:
    raise SystemExit(TERMINATED)


def _show_results(root: Path, tree: Path, run_id: str, seconds: float) -> None:
    from rich.markdown import Markdown

    from tasks.tracking import OUTPUTS

    report = tree / OUTPUTS["report"]
    if (report / "table.md").is_file():
        _print(Markdown((report / "table.md").read_text(encoding="utf-8")))
    print(f"\nMLflow     run {run_id}; `gradeline ui` shows it")
    if (report / "index.html").is_file():
        print(f"report     {report / 'index.html'}")
    if tree != root:
        print(f"workspace  {tree}")
    print(f"took       {seconds:.0f} s")


def _table(columns: list[str], rows: list[list[str]]) -> Table:
    from rich.table import Table

    table = Table(show_lines=any("\n" in cell for row in rows for cell in row))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _print(what: Any) -> None:
    from rich.console import Console

    Console().print(what)


if __name__ == "__main__":
    main()
