"""Checks of the parts of a request that every engine has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lockstep_trio.engines.common.checks import reject, text, token_ids, whole

MAX_ID_CHARS: Final = 256
"""Longest request id of a caller."""


def check_request_id(name: object) -> str | None:
    """A caller's id for a request, or None."""
    return text("request_id", name, MAX_ID_CHARS)


def check_rank(rank: object) -> int | None:
    """The rank that a request is pinned to, or None. Whether there is such a rank is the group's to say."""
    if rank is None:
        return None
    return whole("data_parallel_rank", rank, 0, 65_535, "the index of a rank, or None")


def check_prompt(prompt: object, bound: int, context: int | None, room: int) -> Sequence[int]:
    """A prompt that has something in it and leaves room.

    Args:
        prompt: Token ids.
        bound: One above the highest of them.
        context: ``max_model_len``; None if nobody told.
        room: Tokens of it that must be left, 1 or more: without any an engine dies of the prompt.
    """
    ids = token_ids("prompt_token_ids", prompt, bound)
    if not ids:
        raise reject("prompt_token_ids", prompt, "at least one token id")
    if context is not None and len(ids) > context - room:
        words = f"at most {context - room} tokens (max_model_len {context}, less {room} to generate)"
        raise reject("len(prompt_token_ids)", len(ids), words)
    return ids
