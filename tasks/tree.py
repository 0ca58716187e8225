"""Where things are: the tree a run happens in, the home it shares with other workspaces, and its locks.

A tree is a git checkout that holds dvc.yaml. Its own scratch lies under `.gradeline/`. Workspaces are further
git worktrees of the same repository; the MLflow store and the DVC cache are those of the main one, the home.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.errors import BadInput
from training.storage import write_text

STATE = ".gradeline"


class TreeBusy(RuntimeError):
    """Another process works in this tree; the message holds its pid."""


def git(root: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    """Output of a git command run in `root`, stripped; raises BadInput with git's own message."""
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        env=None if env is None else os.environ | env,
    )
    if done.returncode:
        raise BadInput(f"{root}: git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def find_root(start: Path) -> Path:
    """The tree around `start`: the nearest folder with dvc.yaml, which must be inside a git repository."""
    start = start.resolve()
    for folder in (start, *start.parents):
        if (folder / "dvc.yaml").is_file():
            check_repository(folder)
            return folder
    raise BadInput(
        f"{start}: neither it nor a folder above it has a dvc.yaml; run gradeline inside a project"
    )


def check_repository(root: Path) -> None:
    """Raise BadInput unless `root` lies in a git repository (runs name the code they ran by its commit)."""
    if subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True).returncode:
        raise BadInput(
            f"{root}: not a git repository with a commit; run `git init && git add -A && git commit` there first"
        )


def home(root: Path) -> Path:
    """The main checkout of the repository that `root` is a worktree of; it holds mlruns/ and the DVC cache."""
    return Path(git(root, "rev-parse", "--path-format=absolute", "--git-common-dir")).parent


def state(root: Path) -> Path:
    """Folder of this tree's own scratch files (ignored by git)."""
    folder = root / STATE
    folder.mkdir(exist_ok=True)
    ignore = folder / ".gitignore"
    if not ignore.is_file():
        write_text(ignore, "*\n")
    return folder


def run_lock(root: Path) -> Path:
    """Lock that a pipeline run holds on its tree from beginning to end."""
    return state(root) / "run.lock"


def holder(path: Path) -> int | None:
    """Pid of the process that holds the lock `path` now, or None."""
    if not path.is_file():
        return None
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            found = _holder(file.read())
            return int(found) if found.isdigit() else -1
    return None


@contextmanager
def locked(path: Path, what: str, wait: float = 0.0) -> Iterator[None]:
    """Hold an OS lock on `path` (released even by SIGKILL); `what` says in errors what the holder does.

    Waits up to `wait` seconds, then raises TreeBusy with the holder's pid.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + max(wait, 0.2)  # `holder` looks by taking the lock for a moment
    with path.open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    raise TreeBusy(
                        f"{what} is already running here, pid {_holder(file.read())} (lock {path})"
                    ) from None
                time.sleep(0.05)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "what": what}))
        file.flush()
        yield


def _holder(text: str) -> str:
    try:
        return str(json.loads(text)["pid"])
    except (ValueError, KeyError):
        return "unknown"
