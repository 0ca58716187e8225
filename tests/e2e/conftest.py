"""A clone of the repository in which pipelines are run, one for each test file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.config import dump_params, load_params
from tests.project import REPOSITORY, dvc, git


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as it stands, committed, with `tiny` as its own params and a DVC remote in a folder."""
    base = tmp_path_factory.mktemp("pipeline")
    root = base / "clone"
    for name in git(REPOSITORY, "ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (REPOSITORY / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, root / name)
    (root / "params.yaml").write_text(dump_params(load_params(REPOSITORY / "configs" / "tiny.yaml")))
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "config", "user.name", "tester")
    git(root, "config", "user.email", "tester@localhost")
    dvc(root, "remote", "add", "--default", "local", str(base / "remote"))
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "Start")
    return root


@pytest.fixture(scope="module")
def prefect_url(clone: Path) -> Iterator[str]:
    """Address of a Prefect server for all runs of a test file."""
    from flows.server import prefect_api

    with prefect_api(clone) as url:
        yield url
