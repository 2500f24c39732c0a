"""Log-probabilities of tokens that the caller names, in place of the likeliest ones.

The ids are used as indices, and nothing in the engine looks at them before. Those of the prompt go as an array of
numpy's, one row per token of the prompt but the last (``v1/worker/gpu/sample/prompt_logprob.py``).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Final, cast

import msgpack

from lockstep_trio.engines.vllm.checks import INT32, Limits, reject, sequence, token_ids, whole
from lockstep_trio.engines.vllm.packing import RAW_VIEW

MAX_SCORED: Final = 128
"""``vllm/sampling_params.py: MAX_LOGPROB_TOKEN_IDS``, the width of a table of the model runner's."""

PAD: Final = -1
"""Stands where a row of the prompt has fewer ids than another."""

_DTYPE: Final = "<i4" if sys.byteorder == "little" else ">i4"


def most_logprobs(limits: Limits) -> int:
    """How many log-probabilities there may be per token."""
    caps = [cap for cap in (limits.max_logprobs, limits.vocab_size) if cap is not None and cap >= 0]
    return min(caps, default=INT32)


def check_scored(field: str, value: object, limits: Limits) -> list[int]:
    """The ids to score in place of the likeliest ones, each once.

    Raises:
        RequestRejected: There are none, too many, or some that are no tokens.
    """
    ids = list(dict.fromkeys(token_ids(field, value, limits.token_bound)))
    if not 0 < len(ids) <= MAX_SCORED:
        raise reject(field, value, f"1 to {MAX_SCORED} token ids, or None")
    return ids


def check_rows(field: str, value: object, limits: Limits) -> list[object]:
    """The ids to score at each token of the prompt, as the array that is sent; how many rows is not looked at.

    Raises:
        RequestRejected: They are no table of token ids, or wider than ``max_logprobs``.
    """
    words = "a sequence of sequences of token ids, or None"
    rows = [_row(f"{field}[{at}]", row, limits.token_bound) for at, row in enumerate(sequence(field, value, words))]
    most = most_logprobs(limits)
    width = max(map(len, rows), default=0)
    if not 0 < width <= most:
        raise reject(field, value, f"rows of 1 to {most} token ids (max_logprobs {limits.max_logprobs})")
    items = array("i", chain.from_iterable([*row, *[PAD] * (width - len(row))] for row in rows))
    return [_DTYPE, [len(rows), width], msgpack.ExtType(RAW_VIEW, items.tobytes())]


def _row(field: str, value: object, bound: int) -> Sequence[int]:
    ids = sequence(field, value, "a sequence of token ids")
    words = f"a token id from 0 to {bound - 1}, or {PAD} for none"
    if {*map(type, ids)} <= {int}:  # tables are large: two passes, as for prompts
        numbers = cast("Sequence[int]", ids)
        outside = [worst for worst in {min(numbers, default=0), max(numbers, default=0)} if not PAD <= worst < bound]
        if not outside:
            return numbers
    return [whole(f"{field}[{at}]", each, PAD, bound - 1, words) for at, each in enumerate(ids)]
