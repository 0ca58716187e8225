"""A small project of its own git repository: the real machinery around stages that take a moment.

Every stage is named as in the real pipeline and goes through `tasks.stage`, DVC and MLflow. What a stage does
besides publishing one line of text is set, outside anything that DVC tracks, with `behave`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tasks.config import Params, dump_params
from tasks.tracking import OUTPUTS
from tasks.versioning import SETTINGS, environment

REPOSITORY = Path(__file__).parents[1]
READS = {
    "model": [],
    "prepare": [],
    "validate": ["model", "prepare"],
    "sft": ["model", "prepare", "validate"],
    "preferences": ["model", "sft", "prepare", "validate"],
    "dpo": ["model", "sft", "preferences", "validate"],
    "reward_model": ["model", "sft", "preferences"],
    "rl": ["model", "sft", "dpo", "reward_model", "prepare", "validate"],
    "evaluate": ["model", "sft", "dpo", "rl", "prepare"],
    "report": ["evaluate", "validate"],
}
OPTIONAL = ("preferences", "dpo", "reward_model")
"""Stages that are off unless asked for; the small project asks for them."""
STAGE = """
import json, os, subprocess, sys, time
from pathlib import Path

from tasks.stage import Stage
from training.errors import BadInput

READS = {reads!r}


def {name}(stage: Stage) -> None:
    file = Path(".gradeline/behaviour.json")
    behaviour = json.loads(file.read_text()).get("{name}", "") if file.is_file() else ""
    print("{name} says hello", flush=True)
    if behaviour == "fail once" and int((stage.scratch / "attempt").read_text()) == 1:
        raise OSError("the disk hiccuped")
    if behaviour == "bad input":
        raise BadInput("data/x.jsonl line 7: not JSON")
    if behaviour == "out of memory":
        raise MemoryError("too large")
    if behaviour == "stay":
        stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (stage.scratch / "pids").write_text(f"{{os.getpid()}} {{stray.pid}} {{os.getppid()}}")
        print("{name} stays", flush=True)
        time.sleep(600)
    section = stage.params.section("{name}")
    stage.run.progress(1, 2, reward=0.5)
    with stage.publish({{"score": float(len(READS))}}) as folder:
        (folder / "text").write_text(section.model_dump_json())
        (folder / "table.md").write_text("| model | pass@1 |\\n|---|---|\\n| base | 0.1 |\\n| rl | 0.9 |\\n")
"""


def make_project(root: Path) -> Path:
    """Create the project in `root`, committed, its DVC initialised; nothing has run yet."""
    root.mkdir(parents=True)
    for package in ("flows", "tasks", "training"):
        shutil.copytree(REPOSITORY / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in SETTINGS.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    stages: dict[str, Any] = {}
    for name, reads in READS.items():
        (root / "tasks" / f"{name}.py").write_text(STAGE.format(name=name, reads=reads))
        stages[name] = {
            "cmd": f"python -m tasks {name}",
            "deps": [f"tasks/{name}.py", *(OUTPUTS[read] for read in reads)],
            "params": ["seed", name],
            "outs": [OUTPUTS[name]],
        }
    (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}, sort_keys=False))
    (root / "params.yaml").write_text(dump_params(Params()))
    set_params(root, rl__beta=0.0, sft__num_steps=20, flow__retry_delay_seconds=0.1)
    set_params(root, **{f"{name}__enabled": True for name in OPTIONAL})
    (root / "configs").mkdir()
    (root / "configs" / "small.yaml").write_text("rl: {num_steps: 3}\n")
    shutil.copy(REPOSITORY / ".gitignore", root / ".gitignore")
    shutil.copy(REPOSITORY / "prefect.yaml", root / "prefect.yaml")
    for folder in ("data", "mlruns"):
        (root / folder).mkdir()
        (root / folder / ".gitkeep").touch()
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "config", "user.name", "tester")
    git(root, "config", "user.email", "tester@localhost")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "Start")
    behave(root)
    return root


def behave(tree: Path, **behaviour: str) -> None:
    """Say what stages do: `fail once`, `bad input`, `out of memory`, `stay` (until ended)."""
    (tree / ".gradeline").mkdir(exist_ok=True)
    (tree / ".gradeline" / "behaviour.json").write_text(json.dumps(behaviour))


def set_params(tree: Path, **values: Any) -> None:
    """Change params.yaml; dots are written as double underscores."""
    params = yaml.safe_load((tree / "params.yaml").read_text())
    for key, value in values.items():
        *parents, leaf = key.split("__")
        node = params
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    (tree / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))


def git(root: Path, *arguments: str) -> str:
    """Output of a git command."""
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    ).stdout


def dvc(tree: Path, *arguments: str) -> str:
    """Output of a DVC command run in the tree, stdout and stderr."""
    command = [sys.executable, "-m", "dvc", *arguments]
    done = subprocess.run(command, cwd=tree, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def gradeline(tree: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the project's own command line in the tree."""
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=tree,
        env=dict(os.environ) | {"COLUMNS": "200"} | env,
        capture_output=True,
        text=True,
    )


def start_gradeline(tree: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """Begin the project's own command line in the tree, in a process group of its own.

    It heeds Ctrl-C even where these tests run in the background of a shell, which ignores it.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=tree,
        env=dict(os.environ) | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(condition: Any, what: str, seconds: float = 120) -> Any:
    """Poll until `condition()` is true and return its value; fails the test after a generous while."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.1)
    return value
