"""Only plain data crosses, unchanged, and no bytes make anything else of it."""

import contextlib
import enum
import math
import os
import re
from collections import Counter, OrderedDict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.sandbox.inside.values import Opaque, decode, encode, receive, send

hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
plain = st.recursive(
    hashable | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(hashable, inner, max_size=3) | st.sets(hashable)
    ),
    max_leaves=12,
)


@given(plain)
def test_a_value_comes_out_as_it_went_in(value) -> None:
    again = decode(encode(value))
    assert repr(again) == repr(value) or (again == value and type(again) is type(value))


def test_special_values_cross() -> None:
    assert math.isnan(decode(encode(float("nan"))))
    assert str(decode(encode(-0.0))) == "-0.0"
    assert decode(encode("\ud800")) == "\ud800"
    assert decode(encode(math.factorial(3000))) == math.factorial(3000)
    assert decode(encode(range(3, 9, 2))) == range(3, 9, 2)
    assert list(decode(encode(x * x for x in range(3)))) == [0, 1, 4]
    assert list(decode(encode({1: 2}.keys()))) == [1]


def test_a_subclass_becomes_its_base() -> None:
    class Equal(int):
        def __eq__(self, other: object) -> bool:
            return True

    class Colour(enum.IntEnum):
        RED = 3

    assert decode(encode(Equal(5))) != 6
    assert [type(decode(encode(v))) for v in (Equal(5), Colour.RED, True)] == [int, int, bool]
    assert decode(encode([Counter("aab"), OrderedDict(a=1)])) == [{"a": 2, "b": 1}, {"a": 1}]


def test_of_other_things_only_their_truth_crosses() -> None:
    match, empty = decode(encode(re.match("a", "a"))), decode(encode(deque()))
    assert (type(match), bool(match), bool(empty)) == (Opaque, True, False)
    assert match not in (True, 1, "a")


def test_a_value_nested_too_deeply_is_refused() -> None:
    value: list = []
    for _ in range(1000):
        value = [value]
    with pytest.raises(ValueError, match="deeper"):
        encode(value)
    with pytest.raises(ValueError, match="not a value"):
        decode(b"l1:" * 1000 + b"N")


@given(st.binary() | st.lists(st.sampled_from([b"l", b"d2:", b"t1:", b"e2:", b"i", b";", b"N", b"s3:", b"c", b"r"])).map(b"".join))  # fmt: skip
def test_whatever_the_bytes_decoding_gives_plain_data_or_an_error(data: bytes) -> None:
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        decode(data)


def test_messages_keep_apart_and_have_a_limit() -> None:
    reading, writing = os.pipe()
    for value in (("f", (1, 2), {}), None, "x" * 1000):
        send(writing, value)
    assert [receive(reading) for _ in range(3)] == [("f", (1, 2), {}), None, "x" * 1000]
    with pytest.raises(ValueError, match="may cross"):
        send(writing, "x" * (9 << 20))
    os.write(writing, b"\xff" * 4)
    with pytest.raises(ValueError, match="may cross"):
        receive(reading)
    os.close(writing)
    with pytest.raises(EOFError):
        receive(reading)
    os.close(reading)
