"""MessagePack as the protocols use it: plain data, and bounded. What extension codes mean is each engine's business."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Final, TypeAlias, cast, final

import msgpack

from lockstep_trio.errors import WireError

Frame: TypeAlias = bytes | memoryview

MAX_FRAME: Final = 8 * 1024 * 1024
"""Longest message that is looked at, bytes. A step of a thousand requests has some 100 kB. An empty map takes one byte
of a frame and 70 of memory, so this is 0.6 GB, and some seconds of work, at the worst."""
MAX_ITEMS: Final = 65_536
"""Most items of one array or map. An array's memory is taken when its header is read, before its items are there, and
headers nest up to 1,024 deep: again half a gigabyte, for an instant, is what a hostile frame of 75 kB can make msgpack
1.2.1 take (1.2.4 stops at 70 MB by itself; before 1.2.1 it was never given back). A lower bound would gain more than
it cost, were it not for utility calls that return long lists."""

_HASHABLE: Final = frozenset((str, bytes, int, float, bool, type(None)))
"""Keys whose hashes cannot be made to collide by the thousand. Those of arrays can: 65,536 of them take minutes."""


def _map(pairs: list[tuple[object, object]]) -> object:
    for key, _ in pairs:
        if type(key) not in _HASHABLE:
            return tuple(pairs)
    return dict(pairs)


def pack(value: object) -> bytes:
    """Encode plain data.

    A new packer each time: a shared one breaks if a finalizer that runs in the middle of it packs something too.

    Raises:
        TypeError, ValueError, OverflowError: ``value`` is not plain data.
    """
    return cast(bytes, msgpack.packb(value))


def unpack(part: str, frame: Frame, extension: Callable[[int, bytes], object] = msgpack.ExtType) -> object:
    """Decode one frame whole.

    Arrays become tuples. A map becomes a tuple of its pairs if it has a key that is not text, bytes, a number, a
    boolean or nil.

    Args:
        part: What the frame is, for the error.
        frame: The bytes.
        extension: What to make of an extension type, from its code and its bytes.

    Raises:
        WireError: It is not one MessagePack value, or beyond the bounds.
    """
    size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
    if size > MAX_FRAME:
        raise WireError(part, f"{size} bytes are more than {MAX_FRAME}")
    try:
        try:
            return _unpack(frame, size, ext_hook=extension, strict_map_key=True)
        except ValueError as problem:
            if "strict_map_key" not in str(problem):
                raise
            # A key is neither text nor bytes. Rare enough to begin anew, so that the usual message need not call a
            # hook for each of its maps.
            return _unpack(frame, size, ext_hook=extension, strict_map_key=False, object_pairs_hook=_map)
    except (ValueError, TypeError, RecursionError, OverflowError) as problem:
        # Truncated, trailing bytes, bad UTF-8, a length beyond the bound, nested too deeply.
        raise WireError(part, f"not MessagePack as expected: {str(problem) or type(problem).__name__}") from None


def _unpack(frame: Frame, size: int, **options: object) -> object:
    items = min(size, MAX_ITEMS)
    return msgpack.unpackb(frame, raw=False, use_list=False, max_array_len=items, max_map_len=items, **options)


@final
class _Quoter(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80

    def repr_bytes(self, value: bytes, _: int) -> str:
        return repr(value[: self.maxother])


_quoter: Final = _Quoter()


def quoted(value: object, limit: int = 80) -> str:
    """What was found where something else was expected, for a message to people; at most ``limit`` characters.

    ``repr`` would do it all before it is cut, and raise for what is nested a thousand deep.
    """
    return _quoter.repr(value)[:limit]
