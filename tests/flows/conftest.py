"""One Prefect server for the tests of this folder, with a home of its own."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["PREFECT_HOME"] = tempfile.mkdtemp(prefix="prefect-")
atexit.register(shutil.rmtree, os.environ["PREFECT_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def prefect_url(finished_project: Path) -> Iterator[str]:
    """Address of a real Prefect API, which flows of this process use."""
    from flows.server import prefect_api

    with prefect_api(finished_project) as url:
        yield url
