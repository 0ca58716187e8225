"""What DVC is asked: is a stage's result still true, and why not; run it; push what it made.

DVC runs as a subprocess of the same Python, in the tree it is asked about.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tasks.config import STAGES, ConfigError, flatten, known_stage
from training.errors import BadInput
from training.storage import write_text

DVC = (sys.executable, "-m", "dvc")
SETTINGS = {
    ".dvc/config": '[core]\n    analytics = false\n    autostage = false\n[cache]\n    type = "reflink,copy"\n',
    ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n",
    ".dvcignore": "__pycache__\n.gradeline\n.venv\nmlruns\n",
}


@dataclass
class StagePlan:
    """What a run would do with one stage.

    `cached`: DVC will skip it. `stale`: something that goes into it, or its output, has changed; `reasons` say
    what. `downstream`: a stage before it is stale, and it runs only if that one's output comes out different.
    """

    name: str
    state: str
    reasons: list[str] = field(default_factory=list)


def initialise(root: Path) -> bool:
    """Make `root` a DVC project if it is none, leaving git's index alone; returns whether it had to."""
    if (root / ".dvc").is_dir():
        return False
    for name, text in SETTINGS.items():
        if not (root / name).exists():
            write_text(root / name, text)
    return True


def environment() -> dict[str, str]:
    """This process's environment, with the folder of its Python first on PATH: dvc.yaml says `python -m …`."""
    folder = str(Path(sys.executable).parent)
    return dict(os.environ) | {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def repro_command(stage: str, force: bool = False) -> list[str]:
    """Command that brings one stage up to date, run in its tree; the stages before it are taken as they are."""
    return [
        *DVC,
        "--wait-for-lock",
        "repro",
        "--quiet",
        "--single-item",
        *(["--force"] if force else []),
        stage,
    ]


def stages(root: Path) -> dict[str, dict[str, Any]]:
    """Entries of dvc.yaml, in the file's order: cmd, deps, params, outs."""
    return yaml.safe_load((root / "dvc.yaml").read_text(encoding="utf-8"))["stages"]


def upstream(root: Path) -> dict[str, list[str]]:
    """Stage → stages whose outputs it reads."""
    defined = stages(root)
    makers = {out: name for name, stage in defined.items() for out in stage.get("outs", [])}
    return {
        name: list(dict.fromkeys(makers[dep] for dep in stage.get("deps", []) if dep in makers))
        for name, stage in defined.items()
    }


def downstream(root: Path, stage: str) -> set[str]:
    """`stage` and every stage that depends on it, directly or not."""
    found = {stage}
    edges = upstream(root)
    while more := {name for name, before in edges.items() if found & set(before)} - found:
        found |= more
    return found


def forced_stages(root: Path, from_stage: str | None, only: str | None) -> set[str]:
    """Stages that `from_stage` forces; ConfigError for an unknown stage or for both choices at once."""
    if from_stage and only:
        raise ConfigError(f"from {from_stage} and only {only}: choose one of the two")
    if only:
        known_stage(only)
    return downstream(root, known_stage(from_stage)) if from_stage else set()


def plan(root: Path) -> list[StagePlan]:
    """What a run would do, stage by stage; DVC is asked once.

    Raises BadInput with DVC's own words when it can't tell.
    """
    status = json.loads(_dvc(root, "status", "--json"))
    edges = upstream(root)
    plans: dict[str, StagePlan] = {}
    for name in STAGES:
        waits = [before for before in edges[name] if plans[before].state != "cached"]
        if reasons := _reasons(root, name, status.get(name, [])):
            plans[name] = StagePlan(name, "stale", reasons)
        elif waits:
            plans[name] = StagePlan(
                name, "downstream", [f"{before} comes first; runs if its output changes" for before in waits]
            )
        else:
            plans[name] = StagePlan(name, "cached")
    return list(plans.values())


def has_remote(root: Path) -> bool:
    """Whether a default DVC remote is configured."""
    done = subprocess.run(
        [*DVC, "config", "core.remote"], cwd=root, env=environment(), capture_output=True, text=True
    )
    return bool(done.stdout.strip())


def push(root: Path) -> str:
    """Copy the outputs that dvc.lock names to the default remote; returns DVC's summary. Raises BadInput with its error."""
    return _dvc(root, "push").strip()


def restore_inputs(root: Path) -> None:
    """Bring data tracked by .dvc files (data/raw) into the tree from the cache, or from the remote if need be."""
    tracked = subprocess.run(
        ["git", "-C", str(root), "ls-files", "*.dvc"], capture_output=True, text=True
    ).stdout.split("\n")
    files = [name for name in tracked if name and not (root / name.removesuffix(".dvc")).exists()]
    if files:
        _dvc(root, "pull" if has_remote(root) else "checkout", *files)


def _dvc(root: Path, *arguments: str) -> str:
    done = subprocess.run([*DVC, *arguments], cwd=root, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise BadInput(f"{root}: dvc {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _reasons(root: Path, name: str, status: list[Any]) -> list[str]:
    if not status:
        return []
    locked = _lock(root).get(name)
    if locked is None:
        return ["has not run here yet"]
    reasons = []
    for change in status:
        if isinstance(change, str):  # "changed command", "changed checksum"
            reasons.append(change)
            continue
        for path, how in (change.get("changed deps", {}) | change.get("changed outs", {})).items():
            if isinstance(how, dict):
                reasons += _changed_params(root, locked.get("params", {}).get(path, {}), path)
            else:
                reasons.append(f"{path} is {how}")
    return reasons


def _changed_params(root: Path, locked: dict[str, Any], path: str) -> list[str]:
    """`rl.beta: 0.0 → 0.04` for each value of a params file that differs from dvc.lock's."""
    now = yaml.safe_load((root / path).read_text(encoding="utf-8"))
    before = dict(flatten(locked))
    after: dict[str, str] = {}
    for key in locked:
        value = now
        for part in key.split("."):
            value = value.get(part, {}) if isinstance(value, dict) else {}
        after |= flatten({key: value})
    changed = [key for key in before | after if before.get(key) != after.get(key)]
    return [f"{key}: {before.get(key, 'not set')} → {after.get(key, 'not set')}" for key in changed] or [
        f"{path} is modified"
    ]


def _lock(root: Path) -> dict[str, Any]:
    path = root / "dvc.lock"
    return (
        (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("stages", {}) if path.is_file() else {}
    )
