"""Fixtures that every folder of tests may use."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest

os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="prefect-")
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)
os.environ.pop("PREFECT_API_URL", None)
os.environ.pop("MLFLOW_TRACKING_URI", None)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project (tests.project) in which nothing has run yet."""
    from tests.project import make_project

    return make_project(tmp_path / "project")


@pytest.fixture(scope="session")
def finished_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose pipeline was run by `dvc repro` alone, one for all test workers; copy it, don't change it."""
    from tasks.tree import locked
    from tests.project import dvc, git, make_project

    temporary = tmp_path_factory.getbasetemp()
    shared = temporary.parent if "PYTEST_XDIST_WORKER" in os.environ else temporary
    root, done = shared / "finished" / "project", shared / "finished" / "done"
    with locked(shared / "finished.lock", "making the finished project", wait=600):
        if not done.exists():
            make_project(root)
            dvc(root, "repro")
            git(root, "add", "dvc.lock")
            git(root, "commit", "--quiet", "--message", "Run the pipeline")
            done.touch()
    return root


@pytest.fixture
def finished(finished_project: Path, tmp_path: Path) -> Path:
    """A copy of the finished project, free to change."""
    return Path(shutil.copytree(finished_project, tmp_path / "project", symlinks=True))
