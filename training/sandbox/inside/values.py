"""Plain values as bytes, and messages on a stream: what crosses between a program and its tests.

A value is a letter and a payload; containers say how many values follow. Only plain data comes out, whoever wrote
the bytes: no classes, no code, nothing that could bring its own `__eq__`. Not even `typing` is imported, which takes
as long as starting Python.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MESSAGE_BYTES = 8 << 20
"""Longest message."""
DEPTH = 100
"""Deepest nesting of containers."""
ITEMS = 1_000_000
"""Most items taken from an iterator."""

_SINGLES: dict[bytes, Any] = {b"N": None, b"T": True, b"F": False, b".": ...}
_SEQUENCES: dict[bytes, Callable[[list[Any]], Any]] = {
    b"l": list, b"t": tuple, b"e": set, b"z": frozenset, b"g": iter
}  # fmt: skip


class Opaque:
    """What stands for a value that is no plain data, such as a regular expression's match: true or not, equal to nothing."""

    def __init__(self, truth: bool) -> None:
        self._truth = truth

    def __bool__(self) -> bool:
        return self._truth


def encode(value: Any, depth: int = 0) -> bytes:
    """`value` as bytes; subclasses become their base (a Counter is a dict), iterators the items they give.

    Of anything else only its truth crosses. Raises ValueError when it is nested too deeply.
    """
    if depth > DEPTH:
        raise ValueError(f"a value nested deeper than {DEPTH}")
    for letter, single in _SINGLES.items():
        if value is single:
            return letter
    if isinstance(value, int):
        return b"i%x;" % value if value >= 0 else b"i-%x;" % -value
    if isinstance(value, float):
        return b"f" + float.hex(value).encode() + b";"
    if isinstance(value, complex):
        return b"c" + encode(value.real) + encode(value.imag)
    if isinstance(value, str):
        return _counted(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes | bytearray):
        return _counted(b"b", bytes(value))
    if isinstance(value, dict):
        items = b"".join(encode(k, depth + 1) + encode(v, depth + 1) for k, v in value.items())
        return b"d%d:" % len(value) + items
    if isinstance(value, range):
        return b"r" + encode(value.start) + encode(value.stop) + encode(value.step)
    for letter, kind in ((b"l", list), (b"t", tuple), (b"e", set), (b"z", frozenset)):
        if isinstance(value, kind):
            return b"%b%d:" % (letter, len(value)) + b"".join(encode(item, depth + 1) for item in value)
    if hasattr(type(value), "__next__") or type(value).__name__ in ("dict_keys", "dict_values", "dict_items"):
        taken = [encode(item, depth + 1) for item, _ in zip(value, range(ITEMS), strict=False)]
        return b"g%d:" % len(taken) + b"".join(taken)
    return b"o" + (b"T" if value else b"F")


def decode(data: bytes) -> Any:
    """The value in `data`; ValueError or TypeError when it holds anything but one value."""
    value, end = _decode(data, 0, 0)
    if end != len(data):
        raise ValueError("bytes after the value")
    return value


def _decode(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    letter = data[at : at + 1]
    if depth > DEPTH or not letter:
        raise ValueError("not a value")
    if letter in _SINGLES:
        return _SINGLES[letter], at + 1
    if letter in (b"i", b"f"):
        end = data.index(b";", at)
        text = data[at + 1 : end].decode("ascii")
        return int(text, 16) if letter == b"i" else float.fromhex(text), end + 1
    if letter in (b"c", b"r"):
        parts, at = _several(data, at + 1, 2 if letter == b"c" else 3, depth)
        return complex(*parts) if letter == b"c" else range(*parts), at
    if letter == b"o":
        return Opaque(data[at + 1 : at + 2] == b"T"), at + 2
    colon = data.index(b":", at, at + 12)
    count, at = int(data[at + 1 : colon]), colon + 1
    if not 0 <= count <= len(data) - at:
        raise ValueError("not a value")
    if letter == b"s":
        return data[at : at + count].decode("utf-8", "surrogatepass"), at + count
    if letter == b"b":
        return data[at : at + count], at + count
    if letter == b"d":
        parts, at = _several(data, at, 2 * count, depth)
        return dict(zip(parts[::2], parts[1::2], strict=True)), at
    parts, at = _several(data, at, count, depth)
    if letter not in _SEQUENCES:
        raise ValueError("not a value")
    return _SEQUENCES[letter](parts), at


def _several(data: bytes, at: int, count: int, depth: int) -> tuple[list[Any], int]:
    values = []
    for _ in range(count):
        value, at = _decode(data, at, depth + 1)
        values.append(value)
    return values, at


def _counted(letter: bytes, payload: bytes) -> bytes:
    return b"%b%d:" % (letter, len(payload)) + payload


def send(stream: int, value: Any) -> None:
    """Write a value as one message to a file descriptor."""
    data = encode(value)
    if len(data) > MESSAGE_BYTES:
        raise ValueError(f"a value of {len(data)} bytes; {MESSAGE_BYTES} may cross")
    data = len(data).to_bytes(4, "big") + data
    while data:
        data = data[os.write(stream, data) :]


def receive(stream: int) -> Any:
    """The next message's value; EOFError when the other side is gone, ValueError when it sends anything else."""
    length = int.from_bytes(b"".join(_read(stream, 4)), "big")
    if length > MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes; {MESSAGE_BYTES} may cross")
    return decode(b"".join(_read(stream, length)))


def _read(stream: int, length: int) -> Iterator[bytes]:
    while length:
        piece = os.read(stream, min(length, 1 << 16))
        if not piece:
            raise EOFError("the other side is gone")
        length -= len(piece)
        yield piece
