"""Trees, homes and locks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.tree import TreeBusy, find_root, holder, home, locked, state
from tests.project import git
from training.errors import BadInput


def test_the_tree_is_the_nearest_folder_with_dvc_yaml(project: Path) -> None:
    assert find_root(project / "tasks") == project
    with pytest.raises(BadInput, match=r"has a dvc\.yaml"):
        find_root(project.parent)


def test_a_tree_outside_git_is_refused(project: Path) -> None:
    shutil.rmtree(project / ".git")
    with pytest.raises(BadInput, match="not a git repository with a commit; run `git init"):
        find_root(project)


def test_a_worktree_shares_the_home_and_has_its_own_state(project: Path) -> None:
    git(project, "worktree", "add", "--quiet", "--detach", str(project.parent / "other"))
    other = project.parent / "other"
    assert home(other) == home(project) == project
    assert state(other) != state(project)
    assert git(other, "status", "--porcelain") == ""


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    holding = f"""
import time
from pathlib import Path
from tasks.tree import locked
with locked(Path({str(path)!r}), "a test"):
    print("held", flush=True)
    time.sleep(600)
"""
    assert holder(path) is None
    running = subprocess.Popen(
        [sys.executable, "-c", holding], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "held\n"
    assert holder(path) == running.pid
    with (
        pytest.raises(TreeBusy, match=rf"the same is already running here, pid {running.pid} "),
        locked(path, "the same"),
    ):
        pass
    running.kill()
    running.wait()
    assert holder(path) is None
    with locked(path, "the next"):
        pass
