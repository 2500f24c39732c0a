"""Nothing leaves that could hurt the engine: every request is checked whole, and put into the wire's own types.

vLLM trusts its front end. A value that its decoder or ``SamplingParams._verify_args`` refuses kills the thread
that reads requests, without a message; one that only the model runner trips over kills the whole group
(``vllm/v1/engine/core.py``, ``process_input_sockets``; watched on 0.32.0). So the limits here are those of

* the decoder: ``EngineCoreRequest``, ``SamplingParams`` (an int where a float is declared is fine, not the
  reverse, and a bool is neither);
* vLLM's own front end: ``SamplingParams.verify``, ``InputProcessor._validate_model_input``;
* the model runner's fixed tables, which vLLM's front end does not check: ``vllm/v1/worker/gpu/sample/``
  (``logit_bias.py``, ``bad_words.py``, ``states.py``), sized in int32 and by the constants below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, final

import attrs

from lockstep_trio.engines.vllm.checks import Limits, real, reject, text, token_ids, whole
from lockstep_trio.engines.vllm.request import EngineCoreRequest, SamplingParams
from lockstep_trio.engines.vllm.sampling import check_sampling

MAX_ID_CHARS: Final = 256
"""Longest request id of a caller."""


@final
@attrs.frozen
class Admitted:
    """A request in the wire's own types, nothing about it left to check."""

    prompt: Sequence[int]
    sampling: dict[str, object]
    """The sampling map as sent."""
    arrival_time: float
    cache_salt: str | None
    priority: int


def admit(request: EngineCoreRequest, limits: Limits) -> Admitted:
    """Check a request against everything that is known.

    Raises:
        RequestRejected: With the field, the value and the limit.
    """
    prompt = _prompt(request.prompt_token_ids, limits)
    if not isinstance(request.sampling, SamplingParams):
        raise reject("sampling", request.sampling, "SamplingParams")
    return Admitted(
        prompt,
        check_sampling(request.sampling, len(prompt), limits),
        real("arrival_time", request.arrival_time, -math.inf, math.inf, "a finite number"),
        text("cache_salt", request.cache_salt, None),
        _priority(request.priority, limits),
    )


def check_head(request: EngineCoreRequest) -> tuple[str | None, int | None]:
    """The caller's id and pinned rank, checked before anything is registered under them."""
    if not isinstance(request, EngineCoreRequest):
        raise reject("request", request, "an EngineCoreRequest")
    rank = request.data_parallel_rank
    if rank is not None:
        rank = whole("data_parallel_rank", rank, 0, 65_535, "the index of a rank, or None")
    return text("request_id", request.request_id, MAX_ID_CHARS), rank


def _prompt(prompt: Sequence[int], limits: Limits) -> Sequence[int]:
    ids = token_ids("prompt_token_ids", prompt, limits.token_bound)
    if not ids:
        raise reject("prompt_token_ids", prompt, "at least one token id")
    if limits.max_model_len is not None and len(ids) >= limits.max_model_len:
        # A prompt of exactly max_model_len leaves no room for a token and kills the engine.
        words = (
            f"at most {limits.max_model_len - 1} tokens (max_model_len {limits.max_model_len}, less one to generate)"
        )
        raise reject("len(prompt_token_ids)", len(ids), words)
    return ids


def _priority(priority: int, limits: Limits) -> int:
    if priority == 0 and type(priority) is int:
        return 0
    number = whole("priority", priority, -(2**63), 2**63 - 1, "a signed 64-bit integer")
    if number and limits.priority_position is None:
        # 0.20 and 0.21 differ in the position of this field, and neither says which it is.
        words = "0, because this engine does not tell its version (name it: VllmProtocol(version=...))"
        raise reject("priority", priority, words)
    return number
