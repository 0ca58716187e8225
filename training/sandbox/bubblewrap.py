"""Starting a process in a sandbox of its own, made by bubblewrap (https://github.com/containers/bubblewrap).

Its namespaces have no network, no other process, no /proc and no home; of the system only the libraries and the
Python are there, read-only; `/tmp`, a small tmpfs, is all that can be written. `inside/limits.py` sets the limits,
`seccomp.py` is the filter. Started by root, the program runs as a user id that nothing else has.
"""

from __future__ import annotations

import contextlib
import functools
import os
import py_compile
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from training.sandbox.inside import candidate, runner
from training.sandbox.seccomp import filter_program

Role = Callable[[], None]
"""The function of a module in `inside/` that the process runs."""

SCRATCH_BYTES = 16 << 20
"""Size of the sandbox's `/tmp`."""
_ROOT = Path(__file__).parents[2]
_INSIDE = Path("training/sandbox/inside")
_MOUNTED = Path("/gradeline")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LIBRARIES = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_FIRST_USER = 1 << 30
_ERROR_BYTES = 4096
_REAPED_WITHIN = 5.0


class Contained:
    """A process started in a sandbox; `kill` ends it and everything in there."""

    def __init__(
        self, process: subprocess.Popen[bytes], ready: int, errors: IO[bytes], about: IO[bytes]
    ) -> None:
        self._process, self._ready, self._errors, self._about = process, ready, errors, about

    def wait(self, timeout: float) -> int | None:
        """The exit status (minus the signal's number, or 128 more than it), None after `timeout` seconds."""
        handle = os.pidfd_open(self._process.pid)  # Popen.wait sleeps between looks
        try:
            return self._process.wait() if select.select([handle], [], [], timeout)[0] else None
        finally:
            os.close(handle)

    def kill(self) -> None:
        """SIGKILL of the sandbox's first process, with which all others end; bwrap then reaps it, so that no zombie is left."""
        if self._process.poll() is None:
            self._about.seek(0)
            found = re.search(rb'"child-pid": (\d+)', self._about.read())
            with contextlib.suppress(ProcessLookupError):
                if found:
                    os.kill(int(found[1]), signal.SIGKILL)
            if not found or self.wait(_REAPED_WITHIN) is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> tuple[bool, str]:
        """Kill what is left; whether the limits were in force before any program ran, and the end of its standard error."""
        self.kill()
        started = os.read(self._ready, 1) == b"+"
        os.close(self._ready)
        self._about.close()
        with self._errors as file:
            file.seek(-min(_ERROR_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
            return started, file.read(_ERROR_BYTES).decode(errors="replace").strip()

    def refused(self) -> str | None:
        """Close; None if the program was run, or could have been, within its limits, else why it wasn't."""
        started, text = self.close()
        return None if started else text or f"it ended with {self._process.returncode} before it began"


def start(
    role: Role, stdin: IO[bytes] | int, stdout: IO[bytes] | int, seconds: int, mebibytes: int, contained: bool
) -> Contained:
    """Start `role` with `seconds` of CPU time and `mebibytes` of memory; without a sandbox if not `contained`."""
    ready, announce = os.pipe()
    errors, about = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 (closed by Contained)
    with tempfile.TemporaryFile() as rules:
        rules.write(filter_program(may_fork=role is runner.serve) if contained else b"")
        rules.seek(0)
        user = _FIRST_USER + secrets.randbelow(_FIRST_USER)
        command = python_command(role, announce, seconds, mebibytes, user, contained)
        process = subprocess.Popen(
            [*sandbox_command(rules.fileno(), about.fileno()), *command] if contained else command,
            stdin=stdin,
            stdout=stdout,
            stderr=errors,
            env={"PYTHONHASHSEED": "0"},
            cwd="/",
            pass_fds=[announce, rules.fileno(), about.fileno()],
            start_new_session=True,
        )
    os.close(announce)
    return Contained(process, ready, errors, about)


def python_command(
    role: Role, announce: int, seconds: int, mebibytes: int, user: int, contained: bool
) -> list[str]:
    """Python as it is installed, without site-packages, running `role` within its limits."""
    root = _MOUNTED if contained else _ROOT
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r}); from training.sandbox.inside import limits; "
        f"from {role.__module__} import {role.__name__} as role; "
        f"limits.enter({announce}, {seconds}, {mebibytes}, {user}, {contained}); role()"
    )
    return [os.path.realpath(sys.executable), "-P", "-s", "-S", "-B", "-c", code]


def sandbox_command(rules: int, about: int) -> list[str]:
    """bwrap and its options up to the command; `rules` is the file descriptor with the seccomp filter, `about` the one
    that bwrap tells its child's process id."""
    python = Path(os.path.realpath(sys.executable))
    options = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    options += ["--as-pid-1", "--info-fd", str(about)]
    options += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if os.getuid() == 0:
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # to stop being root
    else:
        options += ["--unshare-user"]
    mounts = [("--ro-bind-try", path, path) for path in (*_LIBRARIES, f"{sys.base_prefix}/lib", str(python))]
    mounts += [("--ro-bind", str(_ROOT / _INSIDE), str(_MOUNTED / _INSIDE))]
    mounts += [("--dev-bind", path, path) for path in _DEVICES]
    folders = {str(folder): None for *_, target in mounts for folder in reversed(Path(target).parents[:-1])}
    for folder in folders:  # bwrap would make them for the user it runs as alone
        options += ["--perms", "0755", "--dir", folder]
    for mount in mounts:
        options += mount
    options += ["--perms", "1777", "--size", str(SCRATCH_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    options += ["--clearenv", "--setenv", "PYTHONHASHSEED", "0"]
    return [*options, "--remount-ro", "/", "--seccomp", str(rules), "--"]


@functools.cache
def why_unavailable() -> str | None:
    """None where the sandbox can be had, else the reason; found out once by running a program in it."""
    if sys.platform != "linux":
        return f"bubblewrap needs Linux, this is {sys.platform}"
    if shutil.which("bwrap") is None:
        return "bwrap is not installed (Debian and Ubuntu: apt-get install bubblewrap)"
    for module in (_ROOT / _INSIDE).glob("*.py"):  # a sandbox can't keep what it compiled
        with contextlib.suppress(OSError):
            py_compile.compile(str(module))
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
        source = b"print(6 * 7)"
        given.write(b"%d\n" % len(source) + source)
        given.seek(0)
        try:
            sandbox = start(candidate.program, given, printed, 10, 256, contained=True)
        except (OSError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        status = sandbox.wait(30)
        failure = sandbox.refused()
        printed.seek(0)
        if failure is None and status == 0 and printed.read() == b"42\n":
            return None
        return f"a program could not be run in it: {failure or f'it ended with {status}'}"
