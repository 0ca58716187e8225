"""Calls that can take for ever, or crash: in pooled processes that are killed when they do.

They belong to a server process that holds no model, so that its workers are small, and replaced in milliseconds when
killed. It ends with its caller. Python's hash seed is the same in all of them, so that what depends on the order of a
set is the same every time.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as TimedOut
from pathlib import Path
from typing import Any

WORKERS = max(2, min(8, os.cpu_count() or 1))
FIXED_HASHES = {"PYTHONHASHSEED": "0"}


class Workers:
    """A server and its workers, started at the first call and again if they died.

    `function` is called with JSON values and returns one; `preload` names modules that every worker begins with;
    `memory` is the bytes of address space that a worker may have, None for any.
    """

    def __init__(self, function: str, preload: Sequence[str], memory: int | None = None) -> None:
        arguments = f"{function!r}, {list(preload)!r}, {memory}"
        self._code = f"from training.rewards.workers import serve; serve({arguments})"
        self._lock = threading.Lock()
        self.server: subprocess.Popen[str] | None = None

    def call(self, calls: Sequence[Sequence[Any]], timeout: float) -> list[Any]:
        """The result of each call, None where it took more than `timeout` seconds or crashed."""
        request = json.dumps({"calls": calls, "timeout": timeout}) + "\n"
        with self._lock:
            for _ in range(2):
                if self.server is None or self.server.poll() is not None:
                    self.server = self._start()
                assert self.server.stdin is not None
                assert self.server.stdout is not None
                try:
                    self.server.stdin.write(request)
                    self.server.stdin.flush()
                    if reply := self.server.stdout.readline():
                        return json.loads(reply)
                except BrokenPipeError:
                    pass
                self.server.kill()
                self.server.wait()
        return [None] * len(calls)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", self._code],
            cwd=Path(__file__).parents[2],
            env=os.environ | FIXED_HASHES,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


def serve(function: str, preload: list[str], memory: int | None) -> None:
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
    context.set_forkserver_preload(preload)
    with ProcessPool(WORKERS, initializer=_limited, initargs=[memory], context=context) as pool:
        for line in requests:
            request = json.loads(line)
            futures = [
                pool.schedule(_called, args=(function, call), timeout=request["timeout"])
                for call in request["calls"]
            ]
            answers.write(json.dumps([_result(future) for future in futures]) + "\n")
            answers.flush()
        pool.stop()


def _limited(memory: int | None) -> None:
    if memory is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _called(function: str, arguments: list[Any]) -> Any:
    module, _, name = function.partition(":")
    target: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return target(*arguments)


def _result(future: Any) -> Any:
    try:
        return future.result()
    except TimedOut:
        return None
    except Exception as error:  # a worker that died, or input that the function can't take
        print(f"reward: not graded: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return None
