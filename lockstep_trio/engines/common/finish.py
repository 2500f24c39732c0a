"""Why requests end, whatever the engine."""

from __future__ import annotations

import enum
from typing import Final, final


@final
class FinishReason(enum.Enum):
    """Why a request ended.

    The first five of vLLM in its order (``FinishReason`` of ``vllm/v1/engine/__init__.py``), by the words that
    TokenSpeed has for three of them (``tokenspeed/runtime/engine/request_types.py``).
    """

    STOP = "stop"
    """A stop token, or the end-of-sequence token."""
    LENGTH = "length"
    """The most tokens that were asked for, or the end of the model's context."""
    ABORT = "abort"
    """Aborted on the engine: by a client, by a pause or a shutdown, or because the engine does not take the request."""
    ERROR = "error"
    """The engine gave up on this request alone. Reasons that this version does not know count as this."""
    REPETITION = "repetition"
    """The engine saw its output repeat."""

    @classmethod
    def of(cls, number: object) -> FinishReason:
        """The reason that the engine has this number for; any other number, or anything else, is an error."""
        # By type too, because True == 1.
        return _NUMBERS.get(number, cls.ERROR) if type(number) is int else cls.ERROR

    @classmethod
    def named(cls, word: object) -> FinishReason:
        """The reason that the engine has this word for; any other word, or anything else, is an error."""
        return _WORDS.get(word, cls.ERROR) if type(word) is str else cls.ERROR


_NUMBERS: Final = dict(enumerate(FinishReason))
_WORDS: Final = {reason.value: reason for reason in FinishReason}
