"""One Prefect server for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def prefect_url(finished_project: Path) -> Iterator[str]:
    """Address of a real Prefect API, which flows of this process use."""
    from flows.server import prefect_api

    with prefect_api(finished_project) as url:
        yield url
