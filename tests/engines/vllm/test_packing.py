from __future__ import annotations

import contextlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio.engines.vllm.packing import MAX_FRAME, Refused, pack, unpack
from lockstep_trio.errors import WireError

# The class that msgpack's compiled part goes by. ``msgpack.ExtType`` is another one once msgpack was imported twice,
# which is what coverage does to the imports of a package that it measures, and is then packed as an array.
ExtType = type(msgpack.unpackb(b"\xd4\x28x"))

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(-(2**63), 2**64 - 1), inner),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_data_survives_the_round_trip(value: object) -> None:
    assert unpack("part", pack(value)) == value


@given(PLAIN)
def test_a_memoryview_is_read_like_bytes(value: object) -> None:
    assert unpack("part", memoryview(pack(value))) == value


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_read_or_a_wire_error(noise: bytes) -> None:
    with contextlib.suppress(WireError):
        unpack("part", noise)


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"\xc1",
        b"\x91",
        b"\x01\x02",
        b"\xa4\xff\xfe\xfd\xfc",
        b"\x81\x80\x00",  # a map for a key
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\xd6\xff",
    ],
    ids=repr,
)
def test_bytes_that_are_not_one_value_are_a_wire_error(noise: bytes) -> None:
    with pytest.raises(WireError, match=r"^part: "):
        unpack("part", noise)


def test_a_few_nested_headers_do_not_take_gigabytes() -> None:
    claim = (2**31).to_bytes(4, "big")
    with pytest.raises(WireError):
        unpack("part", (b"\xdd" + claim) * 500)


def test_a_frame_beyond_the_bound_is_not_looked_at() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_FRAME + 1

    with pytest.raises(WireError, match=str(MAX_FRAME)):
        unpack("part", Huge())


@pytest.mark.parametrize("code", [1, 2])
def test_pickled_data_is_dropped_unread_and_the_rest_is_kept(code: int) -> None:
    frame = msgpack.packb([7, ExtType(code, b"cos\nsystem\n(S'true'\ntR."), 8])
    assert unpack("part", frame) == (7, Refused(code), 8)


def test_the_raw_bytes_of_an_array_are_kept_as_bytes() -> None:
    assert unpack("part", msgpack.packb(["<i4", [1], ExtType(3, b"\x01\0\0\0")])) == (
        "<i4",
        (1,),
        b"\x01\0\0\0",
    )


def test_an_unknown_extension_is_kept_as_it_came() -> None:
    assert unpack("part", msgpack.packb(ExtType(40, b"x"))) == (40, b"x")
