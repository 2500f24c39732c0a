"""MessagePack as vLLM uses it: pickled data is never looked at.

vLLM marks its own additions with extension codes (``vllm/v1/serial_utils.py``, unchanged from 0.10 to 0.33):
1 for pickle, 2 for cloudpickle, 3 for the raw bytes of an array. The first two appear only if the engine runs
with ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``. Their bytes are dropped unread and a ``Refused`` stands in their
place, so that one of them in a corner does not cost the rest of its message.
"""

from __future__ import annotations

from typing import Final, final

import attrs
import msgpack

from lockstep_trio.engines.common import packing
from lockstep_trio.engines.common.packing import MAX_FRAME, MAX_ITEMS, Frame, pack, quoted

__all__ = ["MAX_FRAME", "MAX_ITEMS", "RAW_VIEW", "Frame", "Refused", "pack", "quoted", "unpack"]

PICKLE: Final = 1
CLOUDPICKLE: Final = 2
RAW_VIEW: Final = 3


@final
@attrs.frozen
class Refused:
    """Stands where pickled data was."""

    code: int
    """Extension code: 1 for pickle, 2 for cloudpickle."""


_REFUSED: Final = {code: Refused(code) for code in (PICKLE, CLOUDPICKLE)}


def _extension(code: int, data: bytes) -> object:
    return data if code == RAW_VIEW else _REFUSED.get(code) or msgpack.ExtType(code, data)


def unpack(part: str, frame: Frame) -> object:
    """Decode one frame whole; see ``lockstep_trio.engines.common.packing.unpack``.

    Raises:
        WireError: It is not one MessagePack value, or beyond the bounds.
    """
    return packing.unpack(part, frame, _extension)
