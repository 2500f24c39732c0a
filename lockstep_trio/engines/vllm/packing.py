"""MessagePack as this protocol uses it: plain data, bounded, and pickled data never looked at.

vLLM marks its own additions with extension codes (``vllm/v1/serial_utils.py``, unchanged from 0.20 to 0.33):
1 for pickle, 2 for cloudpickle, 3 for the raw bytes of an array. The first two appear only if the engine runs
with ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``. Their bytes are dropped unread and a ``Refused`` stands in their
place, so that one of them in a corner does not cost the rest of its message.
"""

from __future__ import annotations

from typing import Final, TypeAlias, cast, final

import attrs
import msgpack

from lockstep_trio.errors import WireError

Frame: TypeAlias = bytes | memoryview

PICKLE: Final = 1
CLOUDPICKLE: Final = 2
RAW_VIEW: Final = 3

MAX_FRAME: Final = 256 * 1024 * 1024
"""Longest message that is looked at, bytes."""
MAX_ITEMS: Final = 65_536
"""Most items of one array or map. An array's memory is taken when its header is read, before its items are
there, and headers nest up to 1,024 deep: half a gigabyte is what a hostile frame can make msgpack take for an
instant (1.2.4 stops at 64 MB by itself). More would be gained by a lower bound than lost, were it not for utility
calls that return long lists."""


@final
@attrs.frozen
class Refused:
    """Stands where pickled data was."""

    code: int
    """Extension code: 1 for pickle, 2 for cloudpickle."""


def _extension(code: int, data: bytes) -> object:
    if code == RAW_VIEW:
        return data
    if code in (PICKLE, CLOUDPICKLE):
        return Refused(code)
    return msgpack.ExtType(code, data)


def pack(value: object) -> bytes:
    """Encode plain data.

    A new packer each time: a shared one breaks if a finalizer that runs in the middle of it packs something too.

    Raises:
        TypeError, ValueError, OverflowError: ``value`` is not plain data.
    """
    return cast(bytes, msgpack.packb(value))


def unpack(part: str, frame: Frame) -> object:
    """Decode one frame whole; arrays become tuples.

    Args:
        part: What the frame is, for the error.
        frame: The bytes.

    Raises:
        WireError: It is not one MessagePack value, or beyond the bounds.
    """
    size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
    if size > MAX_FRAME:
        raise WireError(part, f"{size} bytes are more than {MAX_FRAME}")
    items = min(size, MAX_ITEMS)
    try:
        value: object = msgpack.unpackb(
            frame,
            raw=False,
            use_list=False,
            strict_map_key=False,
            ext_hook=_extension,
            max_array_len=items,
            max_map_len=items,
        )
    except (ValueError, TypeError, RecursionError, OverflowError) as problem:
        # Truncated, trailing bytes, bad UTF-8, a length beyond the bound, nested too deeply, an unhashable key.
        raise WireError(part, f"not MessagePack as expected: {str(problem) or type(problem).__name__}") from None
    return value
