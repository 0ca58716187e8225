"""Workspaces start from what the tree holds, leave it alone, and are held by one run at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tasks import workspaces
from tasks.config import ConfigError, load_params
from tasks.tree import TreeBusy, locked, run_lock
from tests.project import dvc, git, set_params
from training.errors import BadInput


def everything(root: Path) -> tuple[str, str, str, str, dict[str, bytes]]:
    """What must not change: status, index, stashes, HEAD, and the bytes of all files outside ignored folders."""
    names = git(root, "ls-files", "--cached", "--others", "--exclude-standard").split()
    files = {name: (root / name).read_bytes() for name in names if (root / name).is_file()}
    index = git(root, "ls-files", "--stage")
    return (
        git(root, "status", "--porcelain"),
        index,
        git(root, "stash", "list"),
        git(root, "rev-parse", "HEAD"),
        files,
    )


def test_contains_uncommitted_and_untracked_work_and_leaves_it_alone(project: Path) -> None:
    (project / "tasks" / "rl.py").write_text("# changed\n")
    (project / "tasks" / "new.py").write_text("# untracked\n")
    (project / "staged.txt").write_text("staged\n")
    git(project, "add", "staged.txt")
    (project / "staged.txt").write_text("staged, then changed\n")
    (project / "configs" / "small.yaml").unlink()
    (project / "data" / "ignored.bin").write_text("ignored")
    before = everything(project)
    with workspaces.claimed(project, overrides=["rl.beta=0.04"], name="try") as tree:
        assert tree == project / ".gradeline" / "workspaces" / "try"
        assert (tree / "tasks" / "rl.py").read_text() == "# changed\n"
        assert (tree / "tasks" / "new.py").read_text() == "# untracked\n"
        assert (tree / "staged.txt").read_text() == "staged, then changed\n"
        assert not (tree / "configs" / "small.yaml").exists()
        assert not (tree / "data" / "ignored.bin").exists()
        assert load_params(tree / "params.yaml").rl.beta == 0.04
        assert git(tree, "status", "--porcelain") == ""
    assert everything(project) == before


def test_the_same_content_is_the_same_commit_and_head_where_nothing_differs(project: Path) -> None:
    head = git(project, "rev-parse", "HEAD").strip()
    assert workspaces.snapshot(project, {}) == head
    first = workspaces.snapshot(project, {"params.yaml": "seed: 2\n"})
    assert first != head
    assert workspaces.snapshot(project, {"params.yaml": "seed: 2\n"}) == first
    (project / "dvc.lock").write_text("stages: {}\n")
    assert workspaces.snapshot(project, {}) == head
    assert git(project, "show", f"{first}:params.yaml") == "seed: 2\n"
    git(project, "gc", "--quiet", "--prune=now")
    assert git(project, "cat-file", "-t", first).strip() == "commit"


def test_is_reused_by_name_brought_up_to_date_and_keeps_its_results(project: Path) -> None:
    with workspaces.claimed(project, "small") as tree:
        assert tree.name == "small"
        (tree / "data" / "prepared").mkdir()
        (tree / "data" / "prepared" / "rows").write_text("kept")
        (tree / "dvc.lock").write_text("schema: '2.0'\n")
    (project / "tasks" / "rl.py").write_text("# newer\n")
    (project / "tasks" / "sft.py").unlink()
    with workspaces.claimed(project, "configs/small.yaml") as again:
        assert again == tree
        assert (tree / "tasks" / "rl.py").read_text() == "# newer\n"
        assert not (tree / "tasks" / "sft.py").exists()
        assert (tree / "data" / "prepared" / "rows").read_text() == "kept"
        assert (tree / "dvc.lock").read_text() == "schema: '2.0'\n"
        full = yaml.safe_load((tree / "params.yaml").read_text())
        assert full["rl"]["num_steps"] == 3
        assert full["sft"]["num_steps"] == 20  # a default, spelled out


def test_default_names_differ_by_overrides(project: Path) -> None:
    parts = [project / "configs" / "small.yaml"]
    names = {workspaces.default_name(parts, overrides) for overrides in ([], ["rl.beta=1"], ["rl.beta=2"])}
    assert len(names) == 3
    assert "small" in names
    assert workspaces.default_name([*parts, project / "dapo.yaml"], []) == "small-dapo"


def test_a_recipe_may_be_several_laid_over_each_other(project: Path) -> None:
    (project / "configs" / "algorithms").mkdir()
    (project / "configs" / "algorithms" / "bold.yaml").write_text("rl: {epsilon_high: 0.3, num_steps: 5}\n")
    with workspaces.claimed(project, "small+bold", ["rl.num_steps=7"]) as tree:
        params = load_params(tree / "params.yaml")
    small = load_params(project / "configs" / "small.yaml")
    assert params.rl == small.rl.model_copy(update={"epsilon_high": 0.3, "num_steps": 7})
    assert params.sft == small.sft
    with pytest.raises(ConfigError, match=r"recipe 'bald'.*algorithms/ \(there: bold\)"):
        workspaces.find_recipe(project, "small+bald")


def test_shares_cache_and_remotes_whose_relative_paths_mean_the_home(project: Path) -> None:
    dvc(project, "remote", "add", "--default", "store", "../store")
    dvc(project, "remote", "modify", "--local", "store", "verify", "true")
    with workspaces.claimed(project, name="shared") as tree:
        pass
    assert dvc(tree, "cache", "dir").strip() == str(project / ".dvc" / "cache")
    listed = dvc(tree, "remote", "list").split()
    assert listed[0] == "store"
    assert os.path.realpath(tree / ".dvc" / listed[1]) == str((project.parent / "store").resolve())
    assert dvc(tree, "config", "core.remote").strip() == "store"
    assert dvc(tree, "config", "remote.store.verify").strip() == "true"


def test_brings_in_raw_data_that_dvc_tracks(project: Path) -> None:
    (project / "data" / "raw").mkdir()
    (project / "data" / "raw" / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    dvc(project, "add", "--quiet", "data/raw/rows.jsonl")
    with workspaces.claimed(project, name="raw") as tree:
        assert (tree / "data" / "raw" / "rows.jsonl").read_text() == '{"question": "1+1", "answer": "2"}\n'


def test_a_run_at_work_keeps_a_second_one_out_and_names_its_pid(project: Path) -> None:
    holder = f"""
import sys, time
from pathlib import Path
from tasks.workspaces import claimed
with claimed(Path({str(project)!r}), name=sys.argv[1] or None):
    print("held", flush=True)
    time.sleep(600)
"""
    for name in ("busy", ""):
        running = subprocess.Popen(
            [sys.executable, "-c", holder, name], cwd=project, stdout=subprocess.PIPE, text=True
        )
        try:
            assert running.stdout is not None
            assert running.stdout.readline() == "held\n"
            with (
                pytest.raises(TreeBusy, match=f"pid {running.pid}"),
                workspaces.claimed(project, name=name or None),
            ):
                pass
            if name:
                assert [one.pid for one in workspaces.workspaces(project)] == [running.pid]
                with pytest.raises(TreeBusy, match=f"pid {running.pid}"):
                    workspaces.prune(project, name)
                with workspaces.claimed(project, name="other"):
                    pass
        finally:
            running.kill()
            running.wait()
        with workspaces.claimed(project, name=name or None):  # a killed holder holds nothing
            pass


def test_prune_removes_all_of_it(project: Path) -> None:
    with workspaces.claimed(project, "small", ["seed=3"], "gone") as tree:
        pass
    assert [(one.name, one.recipe, one.overrides) for one in workspaces.workspaces(project)] == [
        ("gone", "small", ["seed=3"])
    ]
    workspaces.prune(project, "gone")
    assert not tree.exists()
    assert workspaces.workspaces(project) == []
    assert len(git(project, "worktree", "list").splitlines()) == 1
    with workspaces.claimed(project, name="gone"):  # the name is free again
        pass


def test_refuses_what_it_can_not_use(project: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"recipe 'tinny'.*there: small"),
        workspaces.claimed(project, "tinny"),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="did you mean 'beta'"),
        workspaces.claimed(project, overrides=["rl.betta=1"]),
    ):
        pass
    for name in ("../out", "a/b", ".hidden", "x..y", "x.lock"):
        with pytest.raises(ConfigError, match="workspace name"), workspaces.claimed(project, name=name):
            pass
    with pytest.raises(BadInput, match=r"'none': there is none"):
        workspaces.prune(project, "none")


def test_the_trees_own_settings_are_checked_before_it_is_held(project: Path) -> None:
    set_params(project, rl__num_generations=1)
    with pytest.raises(ConfigError, match="rl: num_generations 1 is no group"), workspaces.claimed(project):
        pass
    with locked(run_lock(project), "a test"):
        pass


def test_a_workspace_removed_by_hand_comes_back(project: Path) -> None:
    with workspaces.claimed(project, name="lost") as tree:
        pass
    subprocess.run(["rm", "-rf", str(tree)], check=True)
    with workspaces.claimed(project, name="lost"):
        assert (tree / "dvc.yaml").is_file()
