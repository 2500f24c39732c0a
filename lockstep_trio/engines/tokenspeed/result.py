"""What comes back for a request: rows of the engine's ``BatchTokenIDOutSlim`` columns, seen as one value."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, cast, final

import attrs

from lockstep_trio.engines.common.finish import FinishReason
from lockstep_trio.engines.common.packing import quoted
from lockstep_trio.errors import WireError

TOKENS, FINISH_REASON, PROMPT_TOKENS, COMPLETION_TOKENS, CACHED_TOKENS, LOGPROBS, LOGPROB_IDS = range(7)
"""A row as ``decode`` makes it: the columns in the engine's order, without the ids."""

_ARRAYS: Final = frozenset((tuple,))
_INTEGERS: Final = frozenset((int,))
_NUMBERS: Final = frozenset((int, float))


@final
@attrs.frozen
class TokenSpeedOutput:
    """New output of one request: one engine output, or several that nobody had read yet, as one."""

    request_id: str
    """The caller's id."""
    rank: int
    """The rank that runs it."""
    token_ids: tuple[int, ...]
    """Tokens since the last output, in order; may be empty."""
    finish_reason: FinishReason | None = None
    """Set on the last output only. The engine does not tell which stop token it was, or why it aborted."""
    prompt_tokens: int | None = None
    """Tokens of the prompt, as the engine counts them; None if it told something else than a number."""
    completion_tokens: int | None = None
    """Tokens generated so far, these included."""
    cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each of ``logprob_token_ids``; empty unless ``return_logprob`` asked for it."""
    logprob_token_ids: tuple[int, ...] = ()
    """The tokens that were sampled, one per log-probability."""
    raw: tuple[Sequence[object], ...] = attrs.field(default=(), repr=False)
    """The rows of the engine's columns as they came, oldest first."""

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


def merge(request_id: str, rank: int, raw: Sequence[Sequence[object]]) -> TokenSpeedOutput:
    """The typed view of rows of one request, oldest first. Runs once per read, so it is written to be short.

    Raises:
        WireError: A token id is not an integer, or a log-probability is not a number.
    """
    last = raw[-1]
    finish = last[FINISH_REASON]
    return TokenSpeedOutput(
        request_id,
        rank,
        cast("tuple[int, ...]", _joined(raw, TOKENS, _INTEGERS)),
        FinishReason.named(finish) if finish else None,
        _count(last[PROMPT_TOKENS]),
        _count(last[COMPLETION_TOKENS]),
        _count(last[CACHED_TOKENS]),
        cast("tuple[float, ...]", _joined(raw, LOGPROBS, _NUMBERS)),
        cast("tuple[int, ...]", _joined(raw, LOGPROB_IDS, _INTEGERS)),
        tuple(raw),
    )


def _joined(raw: Sequence[Sequence[object]], column: int, kinds: frozenset[type]) -> tuple[object, ...]:
    cells = [row[column] for row in raw if row[column]]
    if not cells:  # log-probabilities are seldom asked for
        return ()
    if not _ARRAYS.issuperset(map(type, cells)):
        raise WireError(f"BatchTokenIDOutSlim column {column + 2}", f"not all arrays: {quoted(cells)}")
    arrays = cast("Sequence[tuple[object, ...]]", cells)
    joined = arrays[0] if len(arrays) == 1 else tuple(itertools.chain.from_iterable(arrays))
    if not kinds.issuperset(map(type, joined)):
        raise WireError(f"BatchTokenIDOutSlim column {column + 2}", f"not all numbers: {quoted(joined)}")
    return joined


def _count(value: object) -> int | None:
    return value if type(value) is int else None
