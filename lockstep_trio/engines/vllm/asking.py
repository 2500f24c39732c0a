"""What an engine does not tell, it can be asked, before the first request.

Releases differ in their methods. A utility call of a method that the engine has not is answered with "... has no
attribute ..."; one with more arguments than the method takes is answered with another failure, before anything is
called (``vllm/v1/engine/core.py``: ``getattr``, then ``_convert_msgspec_args``, 0.10.0 to 0.33.0). So every question
is such a call, and none of them does anything. A parked rank answers without being woken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, final

from lockstep_trio.engines.protocol import Frame
from lockstep_trio.engines.vllm import encode, outputs
from lockstep_trio.errors import WireError

IS_COORDINATED: Final = "_has_global_unfinished_reqs"
"""Only ranks that step in lockstep have it (``DPEngineCoreProc``)."""
SINCE_0_10_1: Final = "get_supported_tasks"
SINCE_0_10_2: Final = "post_step"
SINCE_0_17: Final = "is_scheduler_paused"
SINCE_0_21: Final = "_pause_complete"
"""Never without a surplus argument: on ranks in lockstep it begins a pause."""

SURPLUS: Final = (None,) * 8
"""More arguments than any of these methods takes."""
_MISSING: Final = "has no attribute"
_FIRST_CALL: Final = 2**62
"""Far from the numbers of later calls."""


def methods_to_ask(told: Mapping[str, object], *, pinned: bool) -> tuple[str, ...]:
    """The methods to ask for.

    Args:
        told: READY and registration.
        pinned: The caller said which version it is, so that only the lockstep may be open.
    """
    if "vllm_version" in told:
        return ()
    if "max_model_len" in told:  # the registration is not empty: 0.20 or later, and the hash tells the lockstep
        return () if "dtype" in told or pinned else (SINCE_0_21,)
    lockstep = () if "parallel_config_hash" in told else (IS_COORDINATED,)
    return lockstep if pinned else (SINCE_0_10_1, SINCE_0_10_2, SINCE_0_17, *lockstep)


@final
class Questions:
    """The questions to one rank, all asked at once, and its answers."""

    def __init__(self, methods: Sequence[str]) -> None:
        self._unsent = {_FIRST_CALL + at: method for at, method in enumerate(methods)}
        self._open = dict(self._unsent)
        self.answers: dict[str, bool] = {}
        """Method -> whether the rank has it."""

    @property
    def answered(self) -> bool:
        """Nothing is left open."""
        return not self._open

    def take(self) -> list[tuple[Frame, ...]]:
        """The messages to be sent, once."""
        unsent, self._unsent = self._unsent, {}
        return [encode.encode_utility(call_id, method, SURPLUS) for call_id, method in unsent.items()]

    def receive(self, frames: Sequence[Frame]) -> bool:
        """A message of the rank; whether it is one of the answers."""
        try:
            reply = outputs.decode(frames).utility
        except WireError:
            return False
        method = None if reply is None else self._open.pop(reply.call_id, None)
        if reply is None or method is None:
            return False
        self.answers[method] = reply.failure is None or _MISSING not in reply.failure
        return True
