"""Arrays on their way out: in line if they are short, in frames of their own behind the message if not.

The other direction is in ``tensors``. Names of types are torch's, because in requests the engine declares tensors only
(``vllm/v1/serial_utils.py: MsgpackDecoder._decode_tensor``, 0.10 to 0.33).
"""

from __future__ import annotations

from typing import Final, final

import msgpack

from lockstep_trio.engines.protocol import Frame
from lockstep_trio.engines.vllm.checks import reject
from lockstep_trio.engines.vllm.packing import RAW_VIEW
from lockstep_trio.engines.vllm.tensors import Tensor, nbytes_of

IN_LINE: Final = 256
"""Shorter arrays go in line (``VLLM_MSGPACK_ZERO_COPY_THRESHOLD``, its default). The engine takes either."""


@final
class AuxFrames:
    """The frames behind one message, in the order of their numbers."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def put(self, field: str, value: object) -> list[object]:
        """What stands for an array in the message. Its data is not copied if it gets a frame.

        Raises:
            RequestRejected: It is no array, or its data does not have the length that its type and shape demand.
        """
        if not isinstance(value, Tensor):
            raise reject(field, value, "a Tensor: Tensor.of(array) makes one")
        size = nbytes_of(value)
        if size is None:
            raise reject(field, value, "a Tensor of a dtype that is known here, and of at most 8 dimensions")
        if not _is_bytes(value.data) or len(value.data) != size:
            raise reject(field, value, f"a Tensor whose data is {size} contiguous bytes, as its dtype and shape demand")
        if size < IN_LINE:
            data: object = msgpack.ExtType(RAW_VIEW, bytes(value.data))
        else:
            self.frames.append(value.data)
            data = len(self.frames)  # the message itself is number 0
        return [value.dtype, list(value.shape), data]


def _is_bytes(data: object) -> bool:
    if isinstance(data, memoryview):
        return data.format == "B" and data.ndim == 1 and data.c_contiguous
    return isinstance(data, bytes)
