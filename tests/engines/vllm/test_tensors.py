from __future__ import annotations

import gc
import math
import struct
import sys
import tracemalloc
import weakref
from types import SimpleNamespace
from typing import Any

import attrs
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio.engines.vllm.tensors import DEPTH, Tensor, attach, from_numbers, read_tensor
from lockstep_trio.errors import WireError

FORMATS = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "float32": "f",
    "float64": "d",
}
SIZES = {name: struct.calcsize(code) for name, code in FORMATS.items()} | {
    "float16": 2,
    "bfloat16": 2,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
SHORT = {"bool": "|b1", "int8": "|i1", "uint8": "|u1", "float16": "<f2", "complex64": "<c8", "complex128": "<c16"} | {
    name: f"<{name[0]}{SIZES[name]}"
    for name in ("int16", "int32", "int64", "uint16", "uint32", "uint64", "float32", "float64")
}
little = pytest.mark.skipif(sys.byteorder != "little", reason="numpy's short names are those of a little-endian engine")


@pytest.mark.parametrize("dtype", FORMATS)
def test_numbers_are_read_where_they_lie(dtype: str) -> None:
    items = [1, 0, 1, 1, 0, 1]
    data = struct.pack(f"=6{FORMATS[dtype]}", *items)
    tensor = read_tensor("part", (dtype, (2, 3), data))
    assert (tensor.dtype, tensor.shape, tensor.data) == (dtype, (2, 3), data)
    assert tensor.flat.tolist() == items
    assert tensor.flat.obj is data
    assert tensor.flat[3:6].tolist() == items[3:6]


@little
@pytest.mark.parametrize(("dtype", "short"), SHORT.items())
def test_a_type_has_one_name_whichever_the_engine_used(dtype: str, short: str) -> None:
    assert read_tensor("part", (short, (3,), bytes(3 * SIZES[dtype]))).dtype == dtype


@pytest.mark.parametrize("dtype", sorted(set(SIZES) - set(FORMATS)))
def test_what_python_cannot_read_stays_bytes(dtype: str) -> None:
    data = bytes(range(2 * SIZES[dtype]))
    tensor = read_tensor("part", (dtype, (2,), data))
    assert tensor.data is data
    with pytest.raises(TypeError, match=dtype):
        _ = tensor.flat


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1, 1, 1, 1, 1, 1, 1, 1)])
def test_a_single_number_and_no_number_at_all_are_arrays_too(shape: tuple[int, ...]) -> None:
    tensor = read_tensor("part", ("float32", shape, bytes(4 * math.prod(shape))))
    assert tensor.flat.tolist() == [0.0] * math.prod(shape)


def test_a_tensor_is_frozen_and_compares_by_what_is_in_it() -> None:
    tensor = read_tensor("part", ("int8", (2,), b"\1\2"))
    assert tensor == Tensor("int8", (2,), memoryview(b"\1\2"))
    assert tensor != Tensor("int8", (2,), b"\1\3")
    assert "data" not in repr(tensor)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        tensor.dtype = "int16"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, r"\[dtype, shape, data\]"),
        (5, "5"),
        ((), r"\[dtype"),
        (("int8", (1,)), r"\[dtype"),
        (("int8", (1,), b"x", 1), r"\[dtype"),
        ({"int8": 1}, r"\[dtype"),
        (msgpack.ExtType(40, b"abc"), r"\[dtype"),
        ((b"int8", (1,), b"x"), "dtype"),
        ((5, (1,), b"x"), "dtype"),
        (("int7", (1,), b"x"), "dtype 'int7'"),
        ((">i4" if sys.byteorder == "little" else "<i4", (1,), b"xxxx"), "dtype"),
        (("O", (1,), b"x"), "dtype"),
        (("x" * 1000, (1,), b"x"), "dtype"),
        (("int8", 1, b"x"), "shape 1"),
        (("int8", None, b"x"), "shape"),
        (("int8", (-1,), b"x"), "shape"),
        (("int8", (-1, -1), b"x"), "shape"),
        (("int8", (True,), b"x"), "shape"),
        (("int8", (1.0,), b"x"), "shape"),
        (("int8", ("1",), b"x"), "shape"),
        (("int8", (1,) * 9, b"x"), "at most 8 sizes"),
        (("int8", (2**62, 2), b""), "shape"),
        (("int8", (2**62, 2**62, 0), b""), "shape"),
        (("int64", (2**60,), b""), "shape"),
        (("int8", (2**40,), b"x"), f"1 bytes of data where its dtype and shape make {2**40}"),
        (("int8", (2,), b"x"), "1 bytes of data where its dtype and shape make 2"),
        (("int8", (2,), b"xxx"), "3 bytes"),
        (("int8", (), b""), "0 bytes"),
        (("int32", (1,), b"x"), "1 bytes"),
        (("int8", (0,), b"x"), "1 bytes"),
        (("int8", (2,), 1), "frame 1"),
        (("int8", (2,), -1), "frame -1"),
        (("int8", (2,), True), "True"),
        (("int8", (2,), {"name": "psm"}), "shared memory"),
        (("int8", (2,), "xx"), "'xx'"),
        (("int8", (2,), None), "None"),
        (("int8", (2,), (1, 2)), r"\(1, 2\)"),
    ],
    ids=repr,
)
def test_what_is_no_array_is_a_wire_error_that_names_the_part_and_the_limit(value: object, words: str) -> None:
    with pytest.raises(WireError, match=words) as caught:
        read_tensor("its part", value)
    assert caught.value.part == "its part"
    assert len(str(caught.value)) < 250


def test_a_hostile_shape_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            read_tensor("part", ("int8", (2**40,), b"x"))
        read_tensor("part", ("int8", (2**40, 0), b""))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_number_becomes_the_frame_itself() -> None:
    frames = [b"message", b"\1\2", memoryview(b"\3\4\5")]
    value = (("int8", (2,), 1), None, {"k": ("int8", (3,), 2)}, ("int8", (1,), b"x"))
    first, none, inner, inline = attach(value, frames)  # type: ignore[misc]
    assert first[2] is frames[1]
    assert none is None
    assert inner["k"][2].obj is frames[2].obj  # type: ignore[union-attr]
    assert inline is value[3]


def test_a_frame_that_can_be_written_to_is_read_only_for_whoever_gets_it() -> None:
    _, _, data = attach(("int8", (2,), 1), [b"", memoryview(bytearray(2))])  # type: ignore[misc]
    assert data.readonly


@pytest.mark.parametrize(
    "value",
    [
        5,
        None,
        "text",
        (),
        (1, 2, 3),
        ("int8", (2,), 0),
        ("int8", (2,), -1),
        ("int8", (2,), 2),
        ("int8", (2,), 2**64),
        ("int8", (2,), True),
        ("int8", (3,), 1),
        ("int8", None, 1),
        ("a list", "of", 1),
        ("int16", (2,), 1),
        (1.5, ("int8", (2,), 1), 1.5),
        {"a": {"b": (1, 2)}},
        [("int8", (2,), 1)],
    ],
    ids=repr,
)
def test_what_is_no_number_of_a_frame_of_that_length_stays_the_very_same(value: object) -> None:
    assert attach(value, [b"xx", b"xx"]) is value


def test_arrays_are_found_so_deep_and_no_deeper() -> None:
    def nested(depth: int) -> object:
        value: object = ("int8", (2,), 1)
        for _ in range(depth):
            value = (None, value)
        return value

    assert attach(nested(DEPTH), [b"", b"xx"]) != nested(DEPTH)
    assert attach(nested(DEPTH + 1), [b"", b"xx"]) == nested(DEPTH + 1)


def test_a_frame_lives_as_long_as_what_refers_to_it_and_no_longer() -> None:
    class Buffer(bytearray):
        pass

    one, other = Buffer(1000), Buffer(1000)
    alive = [weakref.ref(one), weakref.ref(other)]
    frames = [b"", memoryview(one), memoryview(other)]
    kept = attach(("int8", (1000,), 2), frames)
    del frames, one, other
    gc.collect()
    assert [each() is not None for each in alive] == [False, True]
    tensor = read_tensor("part", kept)
    del kept
    rows = tensor.flat[5:10]
    del tensor
    assert alive[1]() is not None
    del rows
    assert alive[1]() is None


def test_64_mib_are_not_copied_on_the_way_to_a_number() -> None:
    size = 64 * 1024 * 1024
    frame = memoryview(bytearray(size))
    tracemalloc.start()
    try:
        tensor = read_tensor("part", attach(("float32", (1024, size // 4096), 1), [b"", frame]))
        row = tensor.flat[1024:2048]
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert isinstance(tensor.data, memoryview)
    assert tensor.data.obj is frame.obj
    assert row.obj is frame.obj


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(1, 3))
def test_numbers_that_came_as_a_list_become_an_array(items: list[int], rows: int) -> None:
    tensor = from_numbers("part", "int64", [items] * rows, (rows, len(items)))
    assert (tensor.dtype, tensor.shape) == ("int64", (rows, len(items)))
    assert tensor.flat.tolist() == items * rows
    assert isinstance(tensor.data, memoryview)
    assert tensor.data.readonly


@pytest.mark.parametrize(
    ("dtype", "item"),
    [
        ("int64", 1.5),
        ("int64", True),
        ("int64", None),
        ("int64", 2**63),
        ("float64", "1"),
        ("float64", None),
        ("float64", 10**400),
    ],
    ids=repr,
)
def test_a_list_with_something_else_in_it_is_a_wire_error(dtype: str, item: object) -> None:
    with pytest.raises(WireError, match=dtype):
        from_numbers("part", dtype, [[1, item]], (1, 2))


def test_numpy_is_given_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Found:
        def reshape(self, shape: object) -> object:
            return asked[0], shape

    def frombuffer(data: object, dtype: object) -> Found:
        asked.append((data, dtype))
        return Found()

    monkeypatch.setitem(sys.modules, "numpy", SimpleNamespace(frombuffer=frombuffer))  # type: ignore[arg-type]
    data = bytes(24)
    assert read_tensor("part", ("float16", (3, 4), data)).numpy() == ((data, "float16"), (3, 4))
    assert asked[0][0] is data


def test_without_numpy_that_is_what_the_error_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match="numpy"):
        read_tensor("part", ("int8", (1,), b"x")).numpy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_numpy_is_not_asked_for_what_it_does_not_have(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=dtype):
        read_tensor("part", (dtype, (1,), bytes(SIZES[dtype]))).numpy()


def test_the_real_numpy_agrees_on_every_type() -> None:
    numpy = pytest.importorskip("numpy")
    for dtype in sorted(set(SIZES) - {"bfloat16", "float8_e4m3fn", "float8_e5m2"}):
        for shape in ((), (2, 3), (0, 3), (2**40, 0)):
            array = numpy.ones(shape, dtype=dtype)
            wire = (array.dtype.str, shape, array.tobytes())
            found = read_tensor("part", wire).numpy()
            assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, shape, array.tobytes())
            assert not found.flags.writeable
            assert found.size == 0 or numpy.shares_memory(found, numpy.frombuffer(wire[2], dtype="uint8"))
