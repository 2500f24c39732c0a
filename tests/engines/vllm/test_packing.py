from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio.engines.vllm.packing import MAX_FRAME, Refused, pack, quoted, unpack
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", [b"", b"\xc1", b"\x81\x90\x00"], ids=repr)
def test_what_was_taken_for_a_frame_that_cannot_be_read_is_given_back(end: bytes) -> None:
    # msgpack before 1.2.1 loses half a gigabyte for each such frame, if it has a thousand of these headers.
    frame = b"\xdc\xff\xff" * 100 + end

    def pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    with contextlib.suppress(WireError):
        unpack("part", frame + bytes(70_000))
    before = pages()
    for _ in range(8):
        with pytest.raises(WireError):
            unpack("part", frame + bytes(70_000))
    assert (pages() - before) * 4096 < 100_000_000


@pytest.mark.parametrize("key", [(), (1, 2), ((),), {}, {"a": 1}, Refused(1), msgpack.Timestamp(1, 2)], ids=repr)
def test_a_map_with_a_key_that_is_no_scalar_comes_as_its_pairs(key: object) -> None:
    # Arrays can be chosen so that thousands of them have one hash: a map of 65,536 such keys would take minutes.
    spelled = ExtType(1, b"") if isinstance(key, Refused) else key
    frame = b"\x91\x82" + b"".join(map(msgpack.packb, ["a", 1, spelled, {"b": 2}]))
    assert unpack("part", frame) == ((("a", 1), (key, {"b": 2})),)


def test_maps_with_scalar_keys_are_dicts_however_deep_a_number_is_among_them() -> None:
    value = {"a": {"b": {5: {None: 1}}}, b"c": {1.5: 2, True: 3}}
    assert unpack("part", msgpack.packb(value)) == value


@pytest.mark.parametrize(
    "frame", [b"\x91" * 1000 + b"\xc0", b"\x81\xa1k" * 1000 + b"\xc0", pack("x" * 10**6), pack(b"\0" * 10**6)]
)
def test_whatever_came_can_be_quoted_in_few_words(frame: bytes) -> None:
    # repr raises RecursionError for the first two.
    value = unpack("part", frame)
    assert 5 < len(quoted(value, 30)) <= 30
    assert len(quoted((value, {"a": value}))) <= 80


def test_short_things_are_quoted_whole() -> None:
    for value in ("text", 5, None, 1.5, b"bytes", (1, "a"), {"a": (1, 2)}, ()):
        assert quoted(value) == repr(value)


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
