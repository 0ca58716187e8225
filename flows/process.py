"""Commands in a process group of their own, which ends whole: on time-out, on a signal, when the caller dies."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

GUARD = Path(__file__).with_name("guard.py")
GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL: time to close MLflow runs."""


class TimedOut(RuntimeError):
    """A command ran past its time and was ended."""


def run(
    command: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    on_line: Callable[[str], None],
    timeout: float | None = None,
    grace: float = GRACE,
) -> int:
    """Run `command` and hand each line it prints (stdout and stderr) to `on_line`; returns its exit code.

    Raises TimedOut after `timeout` seconds. However this function is left, by a signal's exception too, no
    process of the command is left running.
    """
    process = start(command, cwd, dict(env) | {"PYTHONUNBUFFERED": "1"}, subprocess.PIPE, grace)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        while deadline is None or time.monotonic() < deadline:
            try:
                line = lines.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                continue
            if line is None:
                return process.wait()
            on_line(line)
        raise TimedOut(f"still running after {timeout:g} s, the time-out; its processes were ended")
    finally:
        end(process, grace)


def start(
    command: Sequence[str], cwd: Path, env: Mapping[str, str], output: int | IO[str], grace: float = GRACE
) -> subprocess.Popen[str]:
    """Start `command` in a session of its own, under a guard that ends it when `end` is called or this process dies."""
    return subprocess.Popen(
        [sys.executable, "-I", str(GUARD), str(grace), *command],
        cwd=cwd,
        env=env,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], grace: float = GRACE) -> None:
    """End a command that `start` began, and wait until all its processes are gone; nothing to do if they are."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        code = process.wait(grace + 10)
    except subprocess.TimeoutExpired:
        code = -signal.SIGKILL
    if code == -signal.SIGKILL:  # the guard itself was killed or hangs: what stayed in its group goes with it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _read(stream: IO[str] | None, lines: queue.SimpleQueue[str | None]) -> None:
    assert stream is not None
    with stream:
        for line in stream:
            lines.put(line.rstrip("\n"))
    lines.put(None)
