"""Runs a program that nobody trusts: as functions that answer calls, or from standard input to standard output.

The program shares this process, so it may change anything here. That is why nothing here knows a test or an
expected value, and why what leaves here is taken for data that the program made up.
"""

from __future__ import annotations

import builtins
import os

from training.sandbox.inside import limits
from training.sandbox.inside.values import receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def functions() -> None:
    """Load the program, then answer calls that come on standard input, which is a socket, until it closes."""
    channel = os.dup(0)
    limits.quiet(0, 1, 2)
    namespace: dict[str, Any] = {"__name__": "program"}
    try:
        _run(receive(channel), namespace)
        send(channel, None)
    except BaseException as error:
        send(channel, _described(error))
        return
    while True:
        name, args, kwargs = receive(channel)
        try:
            send(channel, (None, namespace[name](*args, **kwargs)))
        except BaseException as error:
            send(channel, (_described(error), None))


def program() -> None:
    """Run the program that standard input starts with (after its length and a line end) on the rest of it."""
    length = b""
    while not length.endswith(b"\n"):
        length += os.read(0, 1)
    source = b""
    while len(source) < int(length):
        source += os.read(0, int(length) - len(source))
    _run(source.decode("utf-8", "surrogatepass"), {"__name__": "__main__"})


def _run(source: str, namespace: dict[str, Any]) -> None:
    for name in ("exit", "quit"):  # what `site` adds for people's sessions and programs use
        setattr(builtins, name, _exit)
    exec(compile(source, "<program>", "exec", dont_inherit=True), namespace)


def _exit(code: Any = None) -> None:
    raise SystemExit(code)


def _described(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)[:200]
