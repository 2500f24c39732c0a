"""What we send: request frames as (type, payload), without the identity that the runtime puts in front.

Read from ``tokenspeed/runtime/engine/zmq_wire.py`` and ``io_struct.py``. A type byte that the engine does not know is
logged there and dropped; there is no wave and no utility call among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lockstep_trio.engines.common.packing import pack
from lockstep_trio.engines.tokenspeed.admission import Admitted

ADD: Final = b"\x00"
ABORT: Final = b"\x01"

TAG: Final = "TokenizedGenerateReqInput"
"""Element 0 of the array; another one makes the engine drop the message without a word."""


def encode_add(wire_id: str, admitted: Admitted) -> tuple[bytes, bytes]:
    """An ADD, as short as it may be: the shortest legal array ends with the sampling parameters.

    The rank is left out: it comes late in the array and the engine does not look at it here; the socket says it.
    """
    request: list[object] = [
        TAG,
        wire_id,
        None,  # http_worker_ipc
        None,  # input_text
        admitted.prompt,
        admitted.sampling,
    ]
    if admitted.return_logprob or admitted.stream:
        request.append(admitted.return_logprob)
    if admitted.stream:
        # logprob_start_len -1 (output only), top_logprobs_num, token_ids_logprob, stream
        request += [-1, 0, None, True]
    return ADD, pack(request)


def encode_abort(wire_ids: Sequence[str]) -> tuple[bytes, bytes]:
    """An ABORT, which the engine does not answer.

    It remembers ids that it does not know, and kills what comes under them within five minutes: an id must never be
    used again.
    """
    return ABORT, pack(list(wire_ids))
