"""Arrays on the wire, and as values.

vLLM writes an array as ``[dtype, shape, data]`` (``vllm/v1/serial_utils.py``, 0.10 to 0.33). The type of a numpy array
is numpy's short name (``<f4``), that of a torch tensor torch's name (``float32``). The data is in C order and in the
byte order of the machine: either in line, as extension type 3, or in a frame of its own behind the message, and then
its number stands here.

The number means something only together with the frames of its message, which many requests share. So ``attach`` puts
the frame itself in its place while the message is read: from then on an output keeps alive the frames that it names,
and no others, and nobody has to carry frames about. Nothing is copied on the way, and nothing is checked before
somebody looks.
"""

from __future__ import annotations

import array
import importlib
import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Self, cast, final

import attrs

from lockstep_trio.engines.protocol import Frame
from lockstep_trio.engines.vllm.packing import quoted
from lockstep_trio.errors import WireError

MAX_DIMS: Final = 8
"""Most dimensions of an array that is read. The engines send up to three."""
MAX_BYTES: Final = 2**62
"""Larger than any array, so that arithmetic on shapes stays within what numpy can do. Sizes of zero do not count."""
DEPTH: Final = 6
"""How deep arrays are looked for, counted from one output. The engines nest them up to three deep, answers to calls of
every worker somewhat deeper."""

_KINDS: Final[Mapping[str, tuple[int, str | None]]] = MappingProxyType(
    {
        "bool": (1, "?"),
        "int8": (1, "b"),
        "int16": (2, "h"),
        "int32": (4, "i"),
        "int64": (8, "q"),
        "uint8": (1, "B"),
        "uint16": (2, "H"),
        "uint32": (4, "I"),
        "uint64": (8, "Q"),
        "float32": (4, "f"),
        "float64": (8, "d"),
        # Python 3.11 has no memoryview of float16, and none has one of the others.
        "float16": (2, None),
        "complex64": (8, None),
        "complex128": (16, None),
        "bfloat16": (2, None),
        "float8_e4m3fn": (1, None),
        "float8_e4m3fnuz": (1, None),
        "float8_e5m2": (1, None),
        "float8_e5m2fnuz": (1, None),
        "float8_e8m0fnu": (1, None),
    }
)
"""dtype -> bytes of one item, and the format of its memoryview."""

_NOT_IN_NUMPY: Final = frozenset(name for name in _KINDS if name.startswith(("bfloat", "float8")))
_NATIVE: Final = "<" if sys.byteorder == "little" else ">"
_SHORT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "|b1": "bool",
        "|i1": "int8",
        "|u1": "uint8",
        **{f"{_NATIVE}i{size}": f"int{8 * size}" for size in (2, 4, 8)},
        **{f"{_NATIVE}u{size}": f"uint{8 * size}" for size in (2, 4, 8)},
        **{f"{_NATIVE}f{size}": f"float{8 * size}" for size in (2, 4, 8)},
        **{f"{_NATIVE}c{size}": f"complex{8 * size}" for size in (8, 16)},
    }
)
"""numpy's short names -> the long ones."""

CONTAINERS: Final = frozenset((tuple, dict))
"""Where arrays may be found in."""
_INTS: Final = frozenset((int,))
_NUMBERS: Final = frozenset((int, float))
_FRAMES: Final = frozenset((bytes, memoryview))
INTEGERS: Final = frozenset(name for name in _KINDS if name.startswith(("int", "uint")))
FLOATS: Final = frozenset(("float32", "float64"))
"""Those that Python can read without help."""


_FORMATS: Final[Mapping[tuple[str, int], str]] = MappingProxyType(
    {
        ("?", 1): "bool",
        **{(code, size): f"int{8 * size}" for code in "bhilq" for size in (1, 2, 4, 8)},
        **{(code.upper(), size): f"uint{8 * size}" for code in "bhilq" for size in (1, 2, 4, 8)},
        ("f", 4): "float32",
        ("d", 8): "float64",
    }
)
"""(format, bytes of one item) of a buffer -> dtype. ``l`` has another size on another platform."""


@final
@attrs.frozen
class Tensor:
    """An array as it came, or as it shall be sent: its bytes, and what they mean. Nothing is converted unasked."""

    dtype: str
    """What its items are, by the name that torch has for it: ``int32``, ``float32``, ``bfloat16``."""
    shape: tuple[int, ...]
    """Its dimensions; none for a single number."""
    data: Frame = attrs.field(repr=False)
    """Its bytes in C order, read-only. Part of the message that it came in, which lives as long as this does."""

    @classmethod
    def of(cls, source: object, dtype: str | None = None) -> Self:
        """An array to be sent, of numpy or of whatever else has a buffer. Nothing is copied.

        Args:
            source: C-contiguous, in the machine's byte order. Of torch: ``tensor.numpy()``.
            dtype: What its items really are, for types that Python does not have: those of ``bfloat16`` are given as
                integers of two bytes, ``tensor.view(torch.int16).numpy()``. None: what the buffer says.

        Raises:
            TypeError: It has no buffer.
            ValueError: It is not contiguous, or of a type that is not known here.

        Ownership: the memory is read when the request is sent, and by ZeroMQ for a while after that. It must not be
        written to any more; it is kept alive.

        Example:
            >>> import array
            >>> Tensor.of(array.array("f", [0.5, 1.5]))
            Tensor(dtype='float32', shape=(2,))
        """
        view = memoryview(cast("bytes", source)).toreadonly()
        found = _FORMATS.get((view.format, view.itemsize))
        if not view.c_contiguous:
            raise ValueError(f"the array of shape {view.shape} is not C-contiguous: make a copy of it that is")
        if found is None:
            raise ValueError(f"format {view.format!r} is not known: view the items as integers, and name their dtype")
        if dtype is not None and _KINDS.get(dtype, (0, None))[0] != view.itemsize:
            raise ValueError(f"dtype {dtype!r} has not {view.itemsize} bytes, or is not one of {', '.join(_KINDS)}")
        return cls(dtype or found, tuple(view.shape or ()), view.cast("B") if view.nbytes else memoryview(b""))

    @property
    def flat(self) -> memoryview:
        """All items in one dimension, without a copy; slice it for rows, ``tolist()`` it for numbers.

        Raises:
            TypeError: Python has no numbers of this type (``bfloat16``, ``float16``, ``float8_...``, ``complex...``).
        """
        code = _KINDS[self.dtype][1]
        if code is None:
            raise TypeError(f"Python cannot read {self.dtype} by itself: use numpy() where numpy has it, or data")
        return memoryview(self.data).cast(cast(Any, code))

    def numpy(self) -> Any:
        """The same as a numpy array over the same memory, read-only. Needs numpy, which this package does not install.

        Raises:
            ModuleNotFoundError: numpy is not installed.
            TypeError: numpy has no such type (``bfloat16``, ``float8_...``): ``data`` has the bytes, for
                ``torch.frombuffer`` for example.
        """
        if self.dtype in _NOT_IN_NUMPY:
            raise TypeError(f"numpy has no {self.dtype}: use data")
        # By name, so that neither this package nor a type checker needs it to be there.
        numpy = importlib.import_module("numpy")
        return numpy.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)


def nbytes_of(tensor: Tensor) -> int | None:
    """How long the data of such an array is; None if there is no such array."""
    return _size(tensor.dtype, tensor.shape) if tensor.dtype in _KINDS else None


def read_tensor(part: str, value: object, field: str = "") -> Tensor:
    """An array from the wire, after ``attach``.

    Args:
        part: What it is, for the error.
        value: What is in its place.
        field: What it is of the part, likewise; apart, so that it costs nothing where there is no error.

    Raises:
        WireError: It is none, or its data does not have the length that its type and shape demand.
    """
    if type(value) is not tuple or len(value) != 3:
        raise WireError(part + field, f"{quoted(value)} where [dtype, shape, data] was expected")
    dtype, shape, data = value
    name = _name(dtype)
    if name is None:
        raise WireError(part + field, f"dtype {quoted(dtype)}, which is not known here")
    size = _size(name, shape)
    if size is None:
        limits = f"at most {MAX_DIMS} sizes of {MAX_BYTES} bytes were expected"
        raise WireError(part + field, f"shape {quoted(shape)}; {limits}")
    if type(data) not in _FRAMES or len(data) != size:
        raise WireError(part + field, _complaint(data, size))
    return Tensor(name, shape, data)


def attach(value: object, frames: Sequence[Frame], depth: int = DEPTH) -> object:
    """``value`` with frames in place of their numbers, wherever in it there are arrays; itself if nothing changes.

    A number without a frame, or with one of another length, stays: it may be no array at all, and if it is one then
    ``read_tensor`` complains.

    Args:
        value: Plain data.
        frames: All frames of the message, whose first is the message itself.
        depth: How deep to look.
    """
    if type(value) is tuple:
        if len(value) == 3 and type(value[0]) is str and type(value[1]) is tuple:
            return _attached(value, frames) if type(value[2]) is int else value
        if depth and value and not _is_numbers(value):
            items = _attach_all(value, frames, depth - 1)
            return tuple(items) if any(map(_differs, items, value)) else value
    elif type(value) is dict and depth and value:
        items = _attach_all(value.values(), frames, depth - 1)
        return dict(zip(value, items, strict=True)) if any(map(_differs, items, value.values())) else value
    return value


def _attach_all(values: Iterable[object], frames: Sequence[Frame], depth: int) -> list[object]:
    # Looked at before the call: a hostile message has millions of values, and most of a friendly one's are nil.
    return [attach(each, frames, depth) if type(each) in CONTAINERS and each else each for each in values]


def from_numbers(part: str, dtype: str, rows: Iterable[tuple[object, ...]], shape: tuple[int, ...]) -> Tensor:
    """An array from numbers that came as such, by a copy: vLLM up to 0.11.0 sends some as lists.

    Raises:
        WireError: They are not all of that type.
    """
    kinds = _INTS if dtype in INTEGERS else _NUMBERS
    items = tuple(itertools.chain.from_iterable(rows))
    if not kinds.issuperset(map(type, items)):
        raise WireError(part, f"{quoted(items)} where numbers of type {dtype} were expected")
    try:
        numbers = array.array(cast(str, _KINDS[dtype][1]), cast("tuple[int, ...]", items))
    except OverflowError:
        raise WireError(part, f"{quoted(items)}: not all of it fits into {dtype}") from None
    return Tensor(dtype, shape, memoryview(numbers).cast("B").toreadonly())


def _is_numbers(value: tuple[object, ...]) -> bool:
    """Numbers come by the thousand, and in lists of nothing else."""
    return type(value[0]) in _NUMBERS and type(value[-1]) in _NUMBERS


def _differs(one: object, other: object) -> bool:
    return one is not other


def _attached(triple: tuple[object, ...], frames: Sequence[Frame]) -> tuple[object, ...]:
    dtype, shape, number = triple
    if not 0 < cast(int, number) < len(frames):
        return triple
    frame = frames[cast(int, number)]
    name = _name(dtype)
    if name is None or _size(name, shape) != len(frame):
        return triple
    return (dtype, shape, frame.toreadonly() if isinstance(frame, memoryview) else frame)


def _name(dtype: object) -> str | None:
    if type(dtype) is not str:
        return None
    return dtype if dtype in _KINDS else _SHORT.get(dtype)


def _size(name: str, shape: object) -> int | None:
    """Bytes of such an array; None if there can be none."""
    if type(shape) is not tuple or len(shape) > MAX_DIMS:
        return None
    if not _INTS.issuperset(map(type, shape)) or min(shape, default=0) < 0:
        return None
    itemsize = _KINDS[name][0]
    size = math.prod(shape) * itemsize
    bound = size or math.prod(filter(None, shape)) * itemsize
    return size if bound <= MAX_BYTES else None


def _complaint(data: object, size: int) -> str:
    """What is wrong with the data of an array of so many bytes."""
    if isinstance(data, (bytes, memoryview)):
        return f"{len(data)} bytes of data where its dtype and shape make {size}"
    if type(data) is int:
        return f"frame {quoted(data)}, where the message has none of that number and {size} bytes"
    if type(data) is dict:
        return "its data is in shared memory, which is not looked into"
    return f"{quoted(data)} where its data was expected"
