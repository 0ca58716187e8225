"""Runs tests against functions that live in another sandbox, and says which assertions held.

The tests see plain data only: a call goes out as bytes, a value comes back as bytes. A process of its own runs each
job's tests, forked from a server, so that jobs can't meet.
"""

from __future__ import annotations

import array
import ast
import builtins
import importlib
import os
import random
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any

from training.sandbox.inside import limits
from training.sandbox.inside.values import receive, send

_TALLY = "__tally__"
_ENDS_LOOPS = (StopIteration, StopAsyncIteration)
"""Exceptions that a program may not raise here: they would end a test's `map` or `for` as if it were done."""


def serve() -> None:
    """Take jobs from standard input, a socket, each with the file descriptor of its program; send a verdict each."""
    control = socket.socket(fileno=os.dup(0))
    limits.quiet(0, 1, 2)
    while True:
        head, ancillary, _, _ = control.recvmsg(1, socket.CMSG_SPACE(4))
        if not head:
            return
        channel = array.array("i", ancillary[0][2])[0]
        job = receive(control.fileno())
        child = os.fork()
        if child == 0:
            try:
                _answer(control.fileno(), channel, job)
            finally:
                os._exit(1)
        os.close(channel)
        if os.waitpid(child, 0)[1]:
            send(
                control.fileno(),
                {"passed": 0, "total": 1, "reason": "the tests crashed on what the program gave"},
            )


def _answer(control: int, channel: int, job: dict[str, Any]) -> None:
    """Send the verdict and end; whatever the tests did, the process goes no further."""
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (job["seconds"], job["seconds"]))
        random.seed(0)
        verdict = run(job, channel)
    except BaseException as error:
        verdict = {"error": f"the tests can't run: {_shown(error)}"}
    send(control, verdict)
    os._exit(0)


def run(job: dict[str, Any], channel: int) -> dict[str, Any]:
    """The verdict on a job (`program`, `setup`, `tests`, `names`): `passed` and `total` assertions, and a `reason`.

    An assertion passes when it ran at least once and held every time; one that only states a constant isn't
    counted. Where the tests stop before their end, at least one counts as not passed. `error` instead means that the tests themselves are broken, with no word from the program heard.
    """
    tree = ast.parse(job["tests"])
    counted = _Counted()
    tree = ast.fix_missing_locations(counted.visit(tree))
    if not counted.total:
        return {"error": "the tests assert nothing"}
    space: dict[str, Any] = {"__name__": "tests"}
    exec(compile(job["setup"], "<setup>", "exec"), space)
    code = compile(tree, "<tests>", "exec")

    held: dict[int, bool] = {}
    reasons: list[str] = []

    def tally(index: int, assertion: Callable[[], Any]) -> None:
        try:
            holds, reason = bool(assertion()), "is false"
        except Exception as error:
            holds, reason = False, f"raised {_shown(error)}"
        held[index] = held.get(index, True) and holds
        if not holds and not reasons:
            reasons.append(f"assertion {index + 1} {reason}")

    free = _free_names(tree) - space.keys()
    names = {*job["names"], *(free - sys.stdlib_module_names)}
    space |= {name: importlib.import_module(name) for name in free & sys.stdlib_module_names}
    space |= {_TALLY: tally} | {name: _remote(channel, name) for name in names}
    ended = False
    try:
        send(channel, job["program"])
        failure = receive(channel)
        if failure is not None:
            reasons.append(f"the program raised {failure[0]}: {failure[1]}")
        else:
            exec(code, space)
            ended = True
    except BaseException as error:
        reasons.append(f"the tests stopped: {_shown(error)}")
    passed = sum(held.values()) if ended else min(sum(held.values()), counted.total - 1)
    return {"passed": passed, "total": counted.total, "reason": _reason(reasons, passed == counted.total)}


class _Counted(ast.NodeTransformer):
    """Puts `__tally__(number, lambda: condition)` in the place of each assertion."""

    def __init__(self) -> None:
        self.total = 0

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if isinstance(node.test, ast.Constant):
            return ast.copy_location(ast.Pass(), node)
        self.total += 1
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        call = ast.Call(
            ast.Name(_TALLY, ast.Load()),
            [ast.Constant(self.total - 1), ast.Lambda(nothing, node.test)],
            [],
        )
        return ast.copy_location(ast.Expr(call), node)


def _free_names(tree: ast.AST) -> set[str]:
    """Names that are read and neither bound in the tests nor built in: the program's functions, or modules it imports."""
    read: set[str] = set()
    bound = {_TALLY, *dir(builtins)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound


def _remote(channel: int, name: str) -> Callable[..., Any]:
    """A function whose calls the program answers; what it raised is raised here, as a built-in exception."""

    def call(*args: Any, **kwargs: Any) -> Any:
        send(channel, (name, args, kwargs))
        failure, value = receive(channel)
        if failure is None:
            return value
        kind = getattr(builtins, failure[0], None)
        known = isinstance(kind, type) and issubclass(kind, Exception) and kind not in _ENDS_LOOPS
        try:
            error = kind(failure[1]) if known else None  # type: ignore[misc]
        except TypeError:  # a UnicodeError wants more than a text
            error = None
        raise error or RuntimeError(f"{failure[0]}: {failure[1]}")

    call.__name__ = name
    return call


def _reason(reasons: list[str], passed: bool) -> str:
    return "" if passed else reasons[0] if reasons else "some assertion never ran"


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
