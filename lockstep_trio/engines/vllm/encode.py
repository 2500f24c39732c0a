"""What we send: request frames as (type, payload), without the identity that the runtime puts in front.

The type is one byte (``EngineCoreRequestType``); a byte that the engine does not know kills its input thread, as
does a payload that it cannot decode. Read from ``vllm/v1/engine/__init__.py`` and ``core.py``, 0.10 to 0.33.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lockstep_trio.engines.protocol import Frame
from lockstep_trio.engines.vllm.admission import Admitted
from lockstep_trio.engines.vllm.checks import reject
from lockstep_trio.engines.vllm.layout import RequestLayout
from lockstep_trio.engines.vllm.packing import pack
from lockstep_trio.engines.vllm.plain import check_plain

ADD: Final = b"\x00"
ABORT: Final = b"\x01"
START_DP_WAVE: Final = b"\x02"
UTILITY: Final = b"\x03"

CLIENT_INDEX: Final = 0
"""We are the only front end."""

FAULT_TOLERANCE_METHOD: Final = "handle_fault_tolerance"
"""Handled by the engine's input thread outside of any ``try`` (``FT_UTILITY_METHOD``); not for anybody to call."""


def encode_add(wire_id: str, admitted: Admitted, layout: RequestLayout) -> tuple[Frame, ...]:
    """An ADD, and behind it the frames of its arrays.

    The array stops where the defaults begin, because what stands behind has moved often. The rank is left out on
    purpose: the socket says it.
    """
    return ADD, pack(layout.array({"request_id": wire_id, **admitted.fields})), *admitted.aux


def encode_abort(wire_ids: Sequence[str]) -> tuple[bytes, bytes]:
    """An ABORT. Ids that the engine does not know are harmless; it does not answer."""
    return ABORT, pack(list(wire_ids))


def encode_start(wave: int, exclude: int | None) -> tuple[bytes, bytes]:
    """A START_DP_WAVE, obeyed by every rank but ``exclude`` whose own wave number is not above ``wave``."""
    return START_DP_WAVE, pack([wave, exclude])


def encode_utility(call_id: int, method: str, args: Sequence[object]) -> tuple[bytes, bytes]:
    """A UTILITY call.

    Raises:
        RequestRejected: ``args`` holds something that the engine's decoder would die of.
    """
    if not _is_method(method):
        raise reject("method", method, f"the name of a method of the engine's, other than {FAULT_TOLERANCE_METHOD}")
    for at, value in enumerate(args):
        check_plain(f"args[{at}]", value)
    return UTILITY, pack([CLIENT_INDEX, call_id, method, list(args)])


def _is_method(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and name != FAULT_TOLERANCE_METHOD
