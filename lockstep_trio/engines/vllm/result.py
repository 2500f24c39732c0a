"""What comes back for a request: the engine's ``EngineCoreOutput`` arrays, seen as one value.

Items 0 to 8 of the array have had the same meaning since 0.9.2: id, new token ids, new logprobs, prompt logprobs,
pooling output, finish reason, stop reason, events, KV transfer parameters (``vllm/v1/engine/__init__.py``).
What follows moved about; the only thing read from there is found by what it is and not by where.
"""

from __future__ import annotations

import enum
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Final, cast, final

import attrs

from lockstep_trio.engines.vllm.packing import quoted
from lockstep_trio.errors import WireError

TOKENS: Final = 1
FINISH_REASON: Final = 5
STOP_REASON: Final = 6
PREFILL_STATS: Final = slice(11, 9, -1)
"""Where ``prefill_stats`` may be: item 11 from 0.26, item 10 from 0.20 to 0.25. The neighbour that is item 10 from
0.26 on, ``trace_headers``, is a map too, but one without the key that is looked for."""

_NEW_TOKENS: Final = operator.itemgetter(TOKENS)
_INTEGERS: Final = frozenset((int,))


@final
class FinishReason(enum.Enum):
    """Why a request ended (``FinishReason`` of ``vllm/v1/engine/__init__.py``)."""

    STOP = "stop"
    """A stop token, or the end-of-sequence token."""
    LENGTH = "length"
    """``max_tokens``, or the end of the model's context."""
    ABORT = "abort"
    """Aborted on the engine, by a client or by a pause or shutdown."""
    ERROR = "error"
    """The engine gave up on this request alone. Reasons that this version does not know count as this."""
    REPETITION = "repetition"
    """The engine saw its output repeat."""

    @classmethod
    def of(cls, number: object) -> FinishReason:
        """The reason that the engine has this number for; any other number, or anything else, is an error."""
        # By type too, because True == 1.
        return _REASONS.get(number, cls.ERROR) if type(number) is int else cls.ERROR


_REASONS: Final = dict(enumerate(FinishReason))


@final
@attrs.frozen
class RequestOutput:
    """New output of one request: one engine output, or several that nobody had read yet, as one."""

    request_id: str
    """The caller's id."""
    rank: int
    """The rank that runs it."""
    token_ids: tuple[int, ...]
    """Tokens since the last output, in order; may be empty."""
    finish_reason: FinishReason | None = None
    """Set on the last output only."""
    stop_reason: int | str | None = None
    """The stop token that ended it, or a word of the engine's; None for the end-of-sequence token."""
    cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache; told once, with the first output."""
    raw: tuple[Sequence[object], ...] = attrs.field(default=(), repr=False)
    """The engine's arrays as they came, oldest first. Raw bytes of arrays are ``bytes``; those of more than 256
    bytes travel in frames of their own and are not here, only their number is."""

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


def merge(request_id: str, rank: int, raw: Sequence[Sequence[object]]) -> RequestOutput:
    """The typed view of raw outputs of one request, oldest first. Runs once per read, so it is written to be short.

    Raises:
        WireError: A token id is not an integer.
    """
    last = raw[-1]
    finish = last[FINISH_REASON] if len(last) > FINISH_REASON else None
    if finish is None:
        return RequestOutput(request_id, rank, _tokens(raw), None, None, _cached_tokens(raw), tuple(raw))
    stop = last[STOP_REASON] if len(last) > STOP_REASON else None
    reason = FinishReason.of(finish)
    return RequestOutput(request_id, rank, _tokens(raw), reason, _stop_reason(stop), _cached_tokens(raw), tuple(raw))


def is_bare_abort(raw: Sequence[object]) -> bool:
    """Whether one raw output says that its request was aborted, and brings no token."""
    return len(raw) > FINISH_REASON and not raw[TOKENS] and FinishReason.of(raw[FINISH_REASON]) is FinishReason.ABORT


def _tokens(raw: Sequence[Sequence[object]]) -> tuple[int, ...]:
    lists = cast("Iterable[Iterable[int]]", map(_NEW_TOKENS, raw))
    tokens = tuple(itertools.chain.from_iterable(lists))
    if not _INTEGERS.issuperset(map(type, tokens)):
        raise WireError(f"EngineCoreOutput[{TOKENS}] new_token_ids", f"not all integers: {quoted(tokens)}")
    return tokens


def _stop_reason(value: object) -> int | str | None:
    return value if isinstance(value, (int, str)) and not isinstance(value, bool) else None


def _cached_tokens(raw: Sequence[Sequence[object]]) -> int | None:
    for each in raw:
        for stats in each[PREFILL_STATS]:
            if isinstance(stats, dict) and type(cached := stats.get("num_cached_tokens")) is int:
                return cached
    return None
