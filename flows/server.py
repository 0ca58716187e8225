"""The Prefect server a run reports to: the configured one, else one of our own for as long as this process lives."""

from __future__ import annotations

import atexit
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import process
from tasks.tree import home, locked, state
from tasks.versioning import environment
from training.errors import BadInput

START_SECONDS = 180.0


@contextmanager
def prefect_api(root: Path) -> Iterator[str]:
    """Yield the address of a Prefect API that answers, and make it the one that flows use.

    A server of our own listens on a free loopback port, in a process group that Ctrl-C does not reach, and ends
    with this process: Prefect sends its last logs and events while the interpreter exits. Raises BadInput when
    the configured server does not answer.
    """
    if configured := PREFECT_API_URL.value():
        if not _answers(configured):
            raise BadInput(
                f"PREFECT_API_URL = {configured}: no server answers; start it with `prefect server start`, or unset it"
            )
        yield configured
        return
    url = _start(home(root))
    with temporary_settings({PREFECT_API_URL: url}):
        yield url


def _start(owner: Path) -> str:
    with locked(state(owner) / "prefect.lock", "starting a Prefect server", wait=2 * START_SECONDS):
        port = _free_port()
        url = f"http://127.0.0.1:{port}/api"
        command = [
            sys.executable,
            "-m",
            "prefect",
            "server",
            "start",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        log = state(owner) / "prefect-server.log"
        with log.open("a") as output:
            server = process.start(command, state(owner), environment(), output, grace=10)
        atexit.register(process.end, server, 10)
        deadline = time.monotonic() + START_SECONDS
        while not _answers(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the local Prefect server did not start; its output is in {log}")
            time.sleep(0.1)
    return url


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
