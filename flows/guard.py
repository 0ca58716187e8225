"""Runs a command so that no process of it outlives its caller.

    python guard.py GRACE COMMAND...

The caller holds the other end of standard input. When that closes (the caller is done with the command, or has
died, by SIGKILL even) or the command ends, every process that descends from it gets SIGTERM once and, after
GRACE seconds, SIGKILL. As a child subreaper the guard stays the ancestor of processes whose own parent died or
that made a session of their own, so it finds all of them. Exits with the command's code; 128 + N after signal N.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

import psutil

PR_SET_CHILD_SUBREAPER = 36
POLL = 0.1


class Asked(Exception):
    """Someone sent the guard itself a signal to end."""


def main(grace: float, command: list[str]) -> int:
    """Run `command` and end all that is left of it; returns its exit code."""
    signal.signal(signal.SIGTERM, _asked)
    signal.signal(signal.SIGINT, _asked)
    with contextlib.suppress(
        OSError, AttributeError
    ):  # Linux only; elsewhere children(recursive=True) has to do
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    codes: dict[int, int] = {}
    with contextlib.suppress(Asked):
        while child.pid not in codes and not _closed():
            _reap(codes)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_descendants(grace, codes)
    code = codes.get(child.pid, -signal.SIGTERM)
    return code if code >= 0 else 128 - code


def _asked(signum: int, frame: Any) -> None:
    raise Asked


def _closed() -> bool:
    readable, _, _ = select.select([0], [], [], POLL)
    return bool(readable) and not os.read(0, 4096)


def _end_descendants(grace: float, codes: dict[int, int]) -> None:
    deadline = time.monotonic() + grace
    told: set[psutil.Process] = (
        set()
    )  # once only: a second SIGTERM would cut short what the first one started
    while family := psutil.Process().children(recursive=True):
        late = time.monotonic() >= deadline
        for process in family if late else set(family) - told:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL if late else signal.SIGTERM)
        told |= set(family)
        time.sleep(POLL / 2)
        _reap(codes)


def _reap(codes: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
