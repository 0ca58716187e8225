"""Trees to run in that disturb nobody: git worktrees under the home's `.gradeline/workspaces/<name>`.

A workspace starts from a commit that holds what the user's tree holds now, uncommitted changes and untracked
files included, with a params.yaml of its own. It shares the home's DVC cache and MLflow store and keeps its own
data/ and dvc.lock from run to run.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.config import ConfigError, Params, dump_params, load_params
from tasks.tree import STATE, git, holder, home, locked, run_lock, state
from tasks.versioning import initialise, restore_inputs
from training.errors import BadInput
from training.storage import read_json, write_json, write_text

LOCK_FILE = "dvc.lock"
RECORD = "workspace.json"
SNAPSHOTS = "refs/gradeline/snapshots"


@dataclass(frozen=True)
class Workspace:
    """One workspace as `gradeline workspaces list` shows it."""

    name: str
    path: Path
    commit: str
    recipe: str
    overrides: list[str]
    used: float
    """Unix time of its last use, seconds."""
    pid: int | None
    """Process that runs in it now."""


@contextmanager
def claimed(
    root: Path, recipe: str | None = None, overrides: list[str] | None = None, name: str | None = None
) -> Iterator[Path]:
    """Yield the tree that a run happens in, held for this process alone until the end.

    Without arguments that is `root` itself; with any, a workspace brought up to `root`'s present state.
    Raises TreeBusy with the holder's pid, ConfigError for a recipe or override that can't be used.
    """
    if recipe is None and not overrides and name is None:
        load_params(root / "params.yaml")
        with locked(run_lock(root), "a pipeline run"):
            initialise(root)
            yield root
        return
    initialise(root)
    sources = find_recipe(root, recipe)
    params = load_params(sources, overrides)
    name = checked_name(name or default_name(sources, overrides or []))
    tree = folder(root, name)
    quiet = ("-c", "core.hooksPath=/dev/null")
    with locked(state(home(root)) / "workspaces.lock", "preparing a workspace", wait=120):
        commit = snapshot(root, {"params.yaml": dump_params(params)})
        if not (tree / ".git").is_file():
            git(root, "worktree", "prune")
            git(root, *quiet, "worktree", "add", "--quiet", "--detach", str(tree), commit)
    with locked(run_lock(tree), f"a run in workspace {name!r}"):
        _update(root, tree, commit, params)
        record = {"recipe": str(recipe or "params.yaml"), "overrides": overrides or [], "used": time.time()}
        write_json(state(tree) / RECORD, record)
        yield tree


def find_recipe(root: Path, recipe: str | None) -> list[Path]:
    """Files of a recipe, to be laid over each other: `TASK+ALGORITHM`, or any number of parts.

    A part is a path, or a name in configs/ or configs/algorithms/; without a recipe it is params.yaml.
    """
    if recipe is None:
        return [root / "params.yaml"]
    return [_find_part(root, part) for part in ([recipe] if Path(recipe).is_file() else recipe.split("+"))]


def _find_part(root: Path, part: str) -> Path:
    folders = [root / "configs", root / "configs" / "algorithms"]
    for path in (Path(part), root / part, *(folder / f"{part}.yaml" for folder in folders)):
        if path.is_file():
            return path
    known = [", ".join(sorted(path.stem for path in folder.glob("*.yaml"))) or "none" for folder in folders]
    raise ConfigError(
        f"recipe {part!r}: no such file, nor a name in configs/ (there: {known[0]}) or configs/algorithms/ "
        f"(there: {known[1]})"
    )


def default_name(parts: list[Path], overrides: list[str]) -> str:
    """Recipe and a short hash of the overrides, so that the same request finds the same workspace."""
    digest = hashlib.sha256(repr(overrides).encode()).hexdigest()[:6]
    name = "-".join(path.stem for path in parts)
    return f"{name}-{digest}" if overrides else name


def checked_name(name: str) -> str:
    """`name` if a workspace may have it."""
    if (
        not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name)
        or name.endswith((".lock", "."))
        or ".." in name
    ):
        raise ConfigError(
            f"workspace name {name!r}: expected up to 64 letters, digits, dots, dashes and underscores"
        )
    return name


def folder(root: Path, name: str) -> Path:
    """Where a workspace of this name lies, whether it exists or not."""
    return home(root) / STATE / "workspaces" / name


def snapshot(root: Path, files: dict[str, str]) -> str:
    """Commit with all that stands in `root` now but git ignores, and `files` (path → text) instead of its own.

    Index, files and stashes stay as they are. DVC's lock file is HEAD's, for it is a result. The same content
    gives the same commit, HEAD itself where nothing differs; a ref keeps it from being collected.
    """
    head = git(root, "rev-parse", "HEAD")
    with tempfile.TemporaryDirectory() as temporary:
        env = {"GIT_INDEX_FILE": f"{temporary}/index"}
        git(root, "read-tree", head, env=env)
        git(root, "add", "--all", "--", ".", f":(exclude){LOCK_FILE}", env=env)
        for path, text in files.items():
            content = Path(temporary) / "content"
            content.write_text(text, encoding="utf-8")
            blob = git(root, "hash-object", "-w", "--no-filters", str(content))
            git(root, "update-index", "--add", "--cacheinfo", f"100644,{blob},{path}", env=env)
        tree = git(root, "write-tree", env=env)
    if tree == git(root, "rev-parse", f"{head}^{{tree}}"):
        return head
    date = git(root, "show", "--no-patch", "--format=%cI", head)
    identity = {"NAME": "gradeline", "EMAIL": "gradeline@localhost", "DATE": date}
    who = {f"GIT_{role}_{part}": text for role in ("AUTHOR", "COMMITTER") for part, text in identity.items()}
    commit = git(root, "commit-tree", tree, "-p", head, "-m", "What a workspace started from", env=who)
    git(root, "update-ref", f"{SNAPSHOTS}/{commit}", commit)
    return commit


def workspaces(root: Path) -> list[Workspace]:
    """Every workspace of this repository, the last used first."""
    found = []
    for path in (home(root) / STATE / "workspaces").glob("*"):
        if not (path / ".git").is_file():
            continue
        file = path / STATE / RECORD
        record: dict[str, Any] = (
            read_json(file) if file.is_file() else {"recipe": "", "overrides": [], "used": 0.0}
        )
        commit = git(path, "rev-parse", "HEAD")
        found.append(
            Workspace(
                path.name, path, commit, record["recipe"], record["overrides"], record["used"], _busy(path)
            )
        )
    return sorted(found, key=lambda workspace: -workspace.used)


def prune(root: Path, name: str) -> None:
    """Remove a workspace: its files, data/ and scratch. What it made stays in the DVC cache and in MLflow.

    Raises TreeBusy with the pid when something runs in it, BadInput when there is none of that name.
    """
    path = folder(root, checked_name(name))
    if not (path / ".git").is_file():
        known = ", ".join(workspace.name for workspace in workspaces(root)) or "none"
        raise BadInput(f"workspace {name!r}: there is none (there: {known})")
    with (
        locked(run_lock(path), f"a run in workspace {name!r}"),
        locked(state(path) / "stage.lock", "a stage"),
    ):
        git(root, "worktree", "remove", "--force", str(path))
    shutil.rmtree(path, ignore_errors=True)


def _update(root: Path, tree: Path, commit: str, params: Params) -> None:
    """Bring a workspace's tracked files to `commit`; data/ and dvc.lock stay."""
    lock = tree / LOCK_FILE
    kept = lock.read_text(encoding="utf-8") if lock.is_file() else None
    git(tree, "reset", "--quiet", "--hard", commit)
    if kept is not None:
        write_text(lock, kept)
    write_text(tree / "params.yaml", dump_params(params))
    initialise(tree)
    _share_cache(home(root), tree)
    restore_inputs(tree)


def _share_cache(owner: Path, tree: Path) -> None:
    """Give the workspace the home's cache, remotes and local settings; relative paths in them mean the home's."""
    from dvc.config import Config

    initialise(owner)
    source = Config(str(owner / ".dvc"), validate=False)
    with Config(str(tree / ".dvc"), validate=False).edit("local", validate=False) as local:
        local.clear()
        local.update(source.read("local"))
        merged = source.read()
        local["remote"] = merged.get("remote", {})
        local.setdefault("cache", {})["dir"] = merged.get("cache", {}).get("dir") or str(
            owner / ".dvc" / "cache"
        )


def _busy(path: Path) -> int | None:
    return holder(path / STATE / "run.lock") or holder(path / STATE / "stage.lock")
