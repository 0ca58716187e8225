"""From a program and its tests to a verdict, with the program in one sandbox and its tests in another.

Nothing that a program can reach holds an expected value or takes a verdict. Functions: the tests run in a sandbox
of their own and call the program over a socket; what comes back is data. Standard input and output: the program
gets a case's input, and what it printed is compared here.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from training.config import CodeRewardConfig
from training.errors import BadInput
from training.sandbox.bubblewrap import Contained, Role, start, why_unavailable
from training.sandbox.inside import candidate, runner
from training.sandbox.inside.limits import FILE_BYTES
from training.sandbox.inside.values import receive, send

_LAST_WORDS = 2.0
"""Seconds that tests may go on once their program was ended; each further call fails at once."""
_FOR_EVER = 10**6


@dataclass(frozen=True)
class Tests:
    """How a program is tested: by assertions about its functions, or by cases of (input, expected output)."""

    __test__ = False

    assertions: str = ""
    setup: str = ""
    names: tuple[str, ...] = ()
    cases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """`score` in [0, 1], or None where the program could not be graded; `reason` says why it is not 1."""

    score: float | None
    reason: str = ""
    passed: int = 0
    total: int = 0


def parse_tests(text: str) -> Tests:
    """The tests in a row's `answer`, which is JSON in one of the forms of docs/rewards.md; BadInput for another."""
    try:
        value = json.loads(text)
        if isinstance(value, list):
            value = {"tests": value}
        if "cases" in value or "inputs" in value:
            pairs = (
                [(case["stdin"], case["stdout"]) for case in value["cases"]]
                if "cases" in value
                else list(zip(value["inputs"], value["outputs"], strict=True))
            )
            if pairs and all(isinstance(part, str) for pair in pairs for part in pair):
                return Tests(cases=tuple(pairs))
        else:
            tests, setup, names = value["tests"], value.get("setup", ""), value.get("entry_point", [])
            names = [names] if isinstance(names, str) else names
            assertions = tests if isinstance(tests, str) else "\n".join(tests)
            if isinstance(setup, str) and all(isinstance(name, str) for name in names):
                return Tests(assertions, setup, tuple(names))
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    raise BadInput(
        f"reward 'code': column answer = {text[:80]!r} holds no tests; accepted is JSON: a list of assertions, "
        '{"tests": ..., "setup": ..., "entry_point": ...} or {"cases": [{"stdin": ..., "stdout": ...}, ...]}'
    )


@dataclass
class Grader:
    """Grades programs, `config.workers` at a time. Raises BadInput where there is no sandbox and no leave to do without."""

    config: CodeRewardConfig
    contained: bool = field(init=False)

    def __post_init__(self) -> None:
        reason = why_unavailable()
        self.contained = reason is None
        if reason is not None and sys.platform != "linux":
            raise BadInput(f"reward 'code': {reason}; run it on Linux")
        if reason is not None and not self.config.unsafe:
            raise BadInput(
                f"reward 'code' runs programs in a bubblewrap sandbox, and there is none: {reason}; "
                "rewards.code.unsafe = true would run them without, with your rights, and record that"
            )
        if not self.contained:
            warnings.warn(
                f"reward 'code' runs programs with your rights, without a sandbox: {reason}", stacklevel=2
            )
        workers = self.config.workers or len(os.sched_getaffinity(0)) + 1
        self._pool = ThreadPoolExecutor(workers, "code-grader")
        self._threads = threading.local()
        self._servers: list[_TestServer] = []

    def grade_all(self, programs: list[tuple[str | None, str]]) -> list[Verdict]:
        """Verdicts on (program, tests as in `parse_tests`) pairs, in order."""
        parsed = [(code, parse_tests(tests)) for code, tests in programs]
        return list(self._pool.map(lambda pair: self._grade(*pair), parsed))

    def grade(self, code: str | None, tests: str) -> Verdict:
        """The verdict on one program; None stands for a completion without one."""
        return self.grade_all([(code, tests)])[0]

    def close(self) -> None:
        """End the sandboxes that run tests."""
        self._pool.shutdown()
        for server in self._servers:
            server.close()

    def _grade(self, code: str | None, tests: Tests) -> Verdict:
        if code is None or not code.strip():
            return Verdict(0.0, "no program")
        source = f"{tests.setup.rstrip()}\n{code}" if tests.setup.strip() else code
        try:
            source.encode()
            return self._cases(source, tests) if tests.cases else self._assertions(source, tests)
        except UnicodeEncodeError:
            return Verdict(0.0, "half of a surrogate pair in the program")
        except OSError as error:  # no process, file descriptor or memory left: not the program's fault
            return Verdict(None, f"not graded: {error}")

    def _score(self, passed: int, total: int) -> float:
        return passed / total if self.config.partial else float(passed == total)

    def _start(self, role: Role, stdin: Any, stdout: Any) -> Contained:
        seconds = _FOR_EVER if role is runner.serve else math.ceil(self.config.timeout)
        return start(role, stdin, stdout, seconds, self.config.memory_mb, self.contained)

    def _cases(self, source: str, tests: Tests) -> Verdict:
        passed, reason = 0, ""
        for number, (given, expected) in enumerate(tests.cases, 1):
            failure, printed = self._run(source, given)
            if failure is not None and failure.score is None:
                return failure
            if failure is None and _lines(printed) == _lines(expected):
                passed += 1
            else:
                reason = reason or f"case {number}: {failure.reason if failure else 'other output'}"
                if not self.config.partial:
                    break
        return Verdict(self._score(passed, len(tests.cases)), reason, passed, len(tests.cases))

    def _run(self, source: str, given: str) -> tuple[Verdict | None, str]:
        """What a program prints on an input; a verdict instead where it fails."""
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
            program = source.encode()
            stdin.write(b"%d\n" % len(program) + program + given.encode("utf-8", "replace"))
            stdin.seek(0)
            sandbox = self._start(candidate.program, stdin, stdout)
            status = sandbox.wait(self.config.timeout)
            if (refused := sandbox.refused()) is not None:
                return Verdict(None, f"not graded: {refused}"), ""
            if status is None:
                return Verdict(0.0, f"more than {self.config.timeout:g} s"), ""
            if status:
                return Verdict(0.0, f"ended with status {status}"), ""
            stdout.seek(0)
            return None, stdout.read(FILE_BYTES).decode(errors="replace")

    def _assertions(self, source: str, tests: Tests) -> Verdict:
        job = {
            "program": source,
            "setup": tests.setup,
            "tests": tests.assertions,
            "names": tests.names,
            "seconds": math.ceil(self.config.timeout + _LAST_WORDS),
        }
        server = self._server()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            sandbox = self._start(candidate.functions, theirs.fileno(), subprocess.DEVNULL)
            theirs.close()
            try:
                server.submit(job, ours)
                ours.close()
                reply = server.reply(self.config.timeout)
                if late := reply is None:
                    sandbox.kill()
                    reply = server.reply(_LAST_WORDS)
            except (
                EOFError,
                ConnectionError,
                ValueError,
            ) as error:  # ValueError: a program or tests too large
                return Verdict(None, f"not graded: {error} {server.close()}".strip())
            finally:
                refused = sandbox.refused()
        if reply is None:  # the program gave the tests something that keeps them busy
            server.close()
            reply = {"passed": 0, "total": 0, "reason": ""}
        if refused is not None or "error" in reply:
            return Verdict(None, f"not graded: {reply.get('error') or refused}")
        reason = f"more than {self.config.timeout:g} s" if late else reply["reason"]
        passed, total = reply["passed"], reply["total"]
        return Verdict(self._score(passed, total) if total else 0.0, reason, passed, total)

    def _server(self) -> _TestServer:
        """This thread's server of tests: it ends with the thread that started it."""
        server: _TestServer | None = getattr(self._threads, "server", None)
        if server is None or server.closed:
            server = self._threads.server = _TestServer(self._start)
            self._servers.append(server)
        return server


class _TestServer:
    """A sandbox in which tests run, a process each; `closed` once it was ended."""

    def __init__(self, start: Callable[[Role, Any, Any], Contained]) -> None:
        self.closed = False
        self._control, theirs = socket.socketpair()
        with theirs:
            self._sandbox = start(runner.serve, theirs.fileno(), subprocess.DEVNULL)

    def submit(self, job: dict[str, Any], channel: socket.socket) -> None:
        """Hand a job over, with the socket that leads to its program."""
        socket.send_fds(self._control, [b"+"], [channel.fileno()])
        send(self._control.fileno(), job)

    def reply(self, timeout: float) -> dict[str, Any] | None:
        """The verdict of the job, None after `timeout` seconds; EOFError when the sandbox ended."""
        ready, _, _ = select.select([self._control], [], [], timeout)
        return receive(self._control.fileno()) if ready else None

    def close(self) -> str:
        """End the sandbox; what it said on its standard error."""
        if self.closed:
            return ""
        self.closed = True
        self._control.close()
        return self._sandbox.close()[1]


def _lines(text: str) -> list[str]:
    """Lines as judges compare them: without space at their ends and empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
