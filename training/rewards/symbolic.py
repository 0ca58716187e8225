"""Symbolic equality of answers by math-verify, which can take for ever: in processes that are killed when it does.

The comparisons run in a server process of their own, which holds no model, so that its pooled workers are small, and
replaced in milliseconds when killed. It ends with its caller.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import TimeoutError as TimedOut
from pathlib import Path

WORKERS = max(2, min(8, os.cpu_count() or 1))

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
                if reply := _server.stdout.readline():
                    return json.loads(reply)
            except BrokenPipeError:
                pass
            _server.kill()
            _server.wait()
    return [None] * len(pairs)


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from training.rewards.symbolic import serve; serve()"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def serve() -> None:
    """Answer requests, one JSON line each, until standard input closes.

    Workers come from a fork server, which has no threads: forked from here, a worker could find a lock held for
    ever (that of standard input, say, while this process waits for a request). Nor do they inherit the pipes to the
    caller, which would hide from it that this process died.
    """
    import multiprocessing

    from pebble import ProcessPool

    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["training.rewards.parser"])
    with ProcessPool(WORKERS, context=context) as pool:
        for line in requests:
            request = json.loads(line)
            futures = [
                pool.schedule(_equal, args=pair, timeout=request["timeout"]) for pair in request["pairs"]
            ]
            answers.write(json.dumps([_result(future) for future in futures]) + "\n")
            answers.flush()
        pool.stop()


def _equal(found: str, answer: str) -> float:
    from math_verify import verify

    from training.rewards.parser import parsed

    return float(verify(parsed(answer), parsed(found), timeout_seconds=None))


def _result(future: object) -> float | None:
    try:
        return future.result()  # type: ignore[attr-defined]
    except TimedOut:
        return None
    except Exception as error:  # a worker that died, or input that math-verify can't take
        print(f"math reward: not compared: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return None
