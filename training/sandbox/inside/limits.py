"""The first thing that runs in the sandbox: give up root, set the limits, say so, and only then go on."""

from __future__ import annotations

import os
import resource

MEBIBYTE = 1 << 20
FILE_BYTES = 16 * MEBIBYTE
"""Largest file, and so the most that a program may print."""
OPEN_FILES = 64
TASKS = 32
"""Threads (processes are refused by the filter)."""


def enter(ready: int, seconds: int, mebibytes: int, user: int, contained: bool) -> None:
    """Set hard limits that the process can't raise, then write `+` to file descriptor `ready` and close it.

    `user` is the id to become where the sandbox was started by root, an id of its own, so that the limit on tasks
    counts this sandbox's alone; `contained` is false without a sandbox, where that limit would count the whole user's.
    """
    if os.getuid() == 0 and contained:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: mebibytes * MEBIBYTE,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if contained:
        limits[resource.RLIMIT_NPROC] = TASKS
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))
    os.write(ready, b"+")
    os.close(ready)


def quiet(*descriptors: int) -> None:
    """Point file descriptors at nothing."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
