"""Symbolic equality of answers by math-verify, which can take for ever: in processes that are killed when it does.

The comparisons run in a server process of their own, which holds no model, so that its pooled workers are forked, and replaced when killed, in milliseconds. It ends with its caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import TimeoutError as TimedOut
from functools import lru_cache
from pathlib import Path
from typing import Any

WORKERS = max(2, min(8, os.cpu_count() or 1))
PR_SET_PDEATHSIG = 1
EXAMPLES = (
    r"\frac{x+1}{2}", r"-2\sqrt{3}-i", "x^2+3x-4", "(1,-2)", r"(-\infty,2]\cup[3,\infty)", r"\{1,2\}", "y=2x+1",
    r"\frac{\pi}{4}", r"\begin{pmatrix}1\\2\end{pmatrix}", "2,3,4", r"x\leq5", r"\sin(x)", r"50\%",
)  # fmt: skip
"""Kinds of answers; the parser that has seen them is several times faster at the next."""

_server: subprocess.Popen[str] | None = None
_lock = threading.Lock()


def compare(pairs: Sequence[tuple[str, str]], timeout: float) -> list[float | None]:
    """For each (found, answer): 1.0 equal, 0.0 not, None where it took more than `timeout` seconds or crashed.

    The server is started at the first call and again if it died.
    """
    global _server
    request = json.dumps({"pairs": pairs, "timeout": timeout}) + "\n"
    with _lock:
        for _ in range(2):
            if _server is None or _server.poll() is not None:
                _server = _start()
            assert _server.stdin is not None
            assert _server.stdout is not None
            try:
                _server.stdin.write(request)
                _server.stdin.flush()
                if reply := _reply(_server):
                    return json.loads(reply)
            except BrokenPipeError:
                pass
            _server.kill()
            _server.wait()
    return [None] * len(pairs)


def _reply(server: subprocess.Popen[str]) -> str:
    """The server's next line, "" when it is dead: a worker that is just starting may hold its pipe open."""
    assert server.stdout is not None
    while not select.select([server.stdout], [], [], 0.2)[0]:
        if server.poll() is not None:
            return ""
    return server.stdout.readline()


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from training.rewards.symbolic import serve; serve()"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def serve() -> None:
    """Answer requests, one JSON line each, until standard input closes."""
    import multiprocessing

    from pebble import ProcessPool

    logging.disable(logging.WARNING)  # math-verify warns that its own time limit is off; ours is not
    for (
        example
    ) in EXAMPLES:  # before the workers are forked, so that they have math-verify and what it has learnt
        _parsed(example)
    answers, sys.stdout = sys.stdout, sys.stderr
    # a worker that is forked while this thread reads closes sys.stdin, and would wait for the reader's lock for ever
    requests, sys.stdin = sys.stdin, open(os.devnull)  # noqa: SIM115
    context = multiprocessing.get_context("fork")
    with ProcessPool(WORKERS, initializer=_leave_the_pipes, context=context) as pool:
        for line in requests:
            request = json.loads(line)
            futures = [
                pool.schedule(_equal, args=pair, timeout=request["timeout"]) for pair in request["pairs"]
            ]
            answers.write(json.dumps([_result(future) for future in futures]) + "\n")
            answers.flush()
        pool.stop()


def _leave_the_pipes() -> None:
    """A worker that kept the server's pipes open would hide from its caller that the server died; it dies too."""
    with contextlib.suppress(
        OSError, AttributeError
    ):  # Linux only; elsewhere a worker may outlive its server
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)


def _equal(found: str, answer: str) -> float:
    from math_verify import verify

    return float(verify(_parsed(answer), _parsed(found), timeout_seconds=None))


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    """A group's completions are compared with one answer, and often say the same: parsing is the dear part."""
    from math_verify import parse

    return parse(f"${text.strip('$')}$", parsing_timeout=None)


def _result(future: object) -> float | None:
    try:
        return future.result()  # type: ignore[attr-defined]
    except TimedOut:
        return None
    except Exception as error:  # a worker that died, or input that math-verify can't take
        print(f"math reward: not compared: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return None
