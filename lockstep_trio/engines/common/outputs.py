"""What all messages of a running rank have in common: they are arrays, or the notice of its death."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

from lockstep_trio.engines.common.packing import Frame
from lockstep_trio.errors import WireError

DEAD: Final = b"ENGINE_CORE_DEAD"
"""One frame, these bytes and no more: ``EngineCoreProc.ENGINE_CORE_DEAD`` of vLLM, ``ENGINE_CORE_DEAD`` of
TokenSpeed's ``zmq_msgpack.py``."""


def array_of(part: str, frames: Sequence[Frame], unpack: Callable[[str, Frame], object]) -> tuple[object, ...] | None:
    """The array in the first frame of a message; None for the notice of death.

    Args:
        part: What the message is, for the error.
        frames: The message.
        unpack: Decodes a frame, with the extension types of this engine.

    Raises:
        WireError: It is neither.
    """
    if not frames:
        raise WireError(part, "a message without frames")
    if len(frames) == 1 and frames[0] == DEAD:
        return None
    array = unpack(part, frames[0])
    if type(array) is not tuple:  # an extension type is a tuple too, of another kind
        raise WireError(part, f"{type(array).__name__} where an array was expected")
    return cast("tuple[object, ...]", array)
