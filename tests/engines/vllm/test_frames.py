"""Arrays on their way out, and what they are made of."""

from __future__ import annotations

import array
import tracemalloc
from typing import Any

import msgpack
import pytest

from lockstep_trio import RequestRejected
from lockstep_trio.engines.vllm import Tensor
from lockstep_trio.engines.vllm.frames import IN_LINE, AuxFrames
from lockstep_trio.engines.vllm.tensors import attach, read_tensor


def test_short_arrays_go_in_line_and_others_get_frames_in_order() -> None:
    aux = AuxFrames()
    short = Tensor("uint8", (IN_LINE - 1,), b"s" * (IN_LINE - 1))
    first, second = (Tensor("uint8", (2, IN_LINE // 2), bytes([at]) * IN_LINE) for at in (1, 2))
    written = [aux.put("x", tensor) for tensor in (first, short, second)]
    assert written == [
        ["uint8", [2, 128], 1],
        ["uint8", [255], msgpack.ExtType(3, b"s" * 255)],
        ["uint8", [2, 128], 2],
    ]
    assert aux.frames == [first.data, second.data]


def test_what_is_written_is_read_back() -> None:
    aux = AuxFrames()
    tensors = [Tensor("float32", (2, 3), bytes(range(24))), Tensor("bfloat16", (200,), bytes(400))]
    message = msgpack.packb([aux.put("x", tensor) for tensor in tensors])
    read: Any = msgpack.unpackb(message, use_list=False, ext_hook=lambda _, data: data)
    assert [read_tensor("x", attach(each, [message, *aux.frames])) for each in read] == tensors


def test_64_mib_are_not_copied_and_their_memory_is_the_callers() -> None:
    memory = bytearray(64 * 1024 * 1024)
    aux = AuxFrames()
    tracemalloc.start()
    try:
        tensor = Tensor.of(memoryview(memory).cast("f"))
        aux.put("x", tensor)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    [frame] = aux.frames
    assert isinstance(frame, memoryview)
    assert frame.obj is memory
    with pytest.raises(BufferError):
        memory.append(0)  # it is held


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1.0, 2.0], r"Tensor\.of"),
        (None, r"Tensor\.of"),
        (Tensor("float128", (1,), bytes(16)), "dtype that is known"),
        (Tensor("uint8", (1,) * 9, b"x"), "at most 8 dimensions"),
        (Tensor("uint8", (-1,), b""), "dimensions"),
        (Tensor("uint8", [1], b"x"), "dimensions"),  # type: ignore[arg-type]
        (Tensor("float32", (2,), bytes(7)), "8 contiguous bytes"),
        (Tensor("float32", (2,), memoryview(bytes(8)).cast("f")), "8 contiguous bytes"),
        (Tensor("uint8", (2,), memoryview(bytes(4))[::2]), "2 contiguous bytes"),
        (Tensor("uint8", (2,), bytearray(2)), "2 contiguous bytes"),  # type: ignore[arg-type]
        (Tensor("uint8", (2,), "xx"), "2 contiguous bytes"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_array_is_refused(value: object, words: str) -> None:
    aux = AuxFrames()
    with pytest.raises(RequestRejected, match=words) as caught:
        aux.put("prompt_embeds", value)
    assert caught.value.field == "prompt_embeds"
    assert not aux.frames


@pytest.mark.parametrize(
    ("source", "dtype"),
    [
        (array.array("f", [1.5]), "float32"),
        (array.array("d", [1.5]), "float64"),
        (array.array("b", [-1]), "int8"),
        (array.array("H", [1]), "uint16"),
        (array.array("i", [1]), "int32"),
        (array.array("q", [1]), "int64"),
        (b"\x01", "uint8"),
        (memoryview(b"\x01").cast("?"), "bool"),
    ],
)
def test_a_buffer_says_what_it_holds(source: Any, dtype: str) -> None:
    tensor = Tensor.of(source)
    assert (tensor.dtype, tensor.shape, bytes(tensor.data)) == (dtype, (1,), bytes(memoryview(source).cast("B")))


def test_a_type_that_python_does_not_have_is_named() -> None:
    tensor = Tensor.of(array.array("H", [0x3F80, 0x4000]), "bfloat16")
    assert (tensor.dtype, tensor.shape, len(tensor.data)) == ("bfloat16", (2,), 4)
    for dtype in ("float32", "no such type"):
        with pytest.raises(ValueError, match="has not 2 bytes"):
            Tensor.of(array.array("H", [1]), dtype)


def test_shapes_are_kept() -> None:
    assert Tensor.of(memoryview(bytes(24)).cast("f", [2, 3])).shape == (2, 3)
    nothing = Tensor.of(array.array("f"))
    assert (nothing.shape, bytes(nothing.data)) == ((0,), b"")


def test_arrays_of_numpy_are_taken_as_they_are() -> None:
    numpy = pytest.importorskip("numpy")
    source = numpy.arange(6, dtype="float32").reshape(2, 3)
    tensor = Tensor.of(source)
    assert (tensor.dtype, tensor.shape, bytes(tensor.data)) == ("float32", (2, 3), source.tobytes())
    assert Tensor.of(numpy.float32(3)).shape == ()
    assert Tensor.of(numpy.zeros((0, 4), "float32")).shape == (0, 4)
    assert Tensor.of(numpy.zeros(4, "float16").view("uint16"), "float16").dtype == "float16"
    for strange in (source.T, source.astype(">f4"), numpy.zeros(2, "complex64")):
        with pytest.raises(ValueError, match=r"C-contiguous|is not known"):
            Tensor.of(strange)


def test_what_has_no_buffer_is_no_array() -> None:
    with pytest.raises(TypeError):
        Tensor.of([1.0])
