"""Encode a request as a client does that does not look at it, to learn what an engine makes of it."""

from __future__ import annotations

from typing import Any

import attrs
import msgpack

from lockstep_trio import EngineCoreRequest, SamplingParams

COMPUTED = {"eos_token_id": "_eos_token_id", "bad_words_token_ids": "_bad_words_token_ids"}
"""Fields that the engine knows under another name."""


def add(request: EngineCoreRequest) -> bytes:
    """The payload of an ADD; whatever MessagePack refuses is an error of msgpack's."""
    params: Any = request.sampling
    if isinstance(params, SamplingParams):
        given = ((field, getattr(params, field.name)) for field in attrs.fields(SamplingParams))
        params = {COMPUTED.get(field.name, field.name): value for field, value in given if value is not field.default}
    head = [request.request_id or "a#1", request.prompt_token_ids, None, params, None, request.arrival_time, None]
    tail = [request.cache_salt, None, None, None, 0, 0, request.priority]
    if request.trace_headers is not None:
        tail.append(request.trace_headers)
    payload: bytes = msgpack.packb([*head, *tail])
    return payload
