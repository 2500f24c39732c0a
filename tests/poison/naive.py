"""Encode a request as a client does that does not look at it, to learn what an engine makes of it."""

from __future__ import annotations

import array
import itertools
from typing import Any

import attrs
import msgpack

from lockstep_trio import EngineCoreRequest, SamplingParams
from lockstep_trio.engines.vllm import RepetitionDetection

COMPUTED = {"eos_token_id": "_eos_token_id", "bad_words_token_ids": "_bad_words_token_ids"}
"""Fields that the engine knows under another name."""


def plain(name: str, value: Any) -> Any:
    """A field of the sampling parameters, in the form that the engine has for it if it can have one at all."""
    if isinstance(value, RepetitionDetection):
        return attrs.asdict(value, recurse=False)
    if name == "prompt_logprob_token_ids" and isinstance(value, list):
        try:
            items = array.array("q", itertools.chain(*value))
        except (TypeError, OverflowError):
            return value
        width = len(items) // max(1, len(value))
        return ["<i8", [len(value), width], msgpack.ExtType(3, items.tobytes())]
    return value


def add(request: EngineCoreRequest) -> bytes:
    """The payload of an ADD; whatever MessagePack refuses is an error of msgpack's."""
    params: Any = request.sampling
    if isinstance(params, SamplingParams):
        given = ((field, getattr(params, field.name)) for field in attrs.fields(SamplingParams))
        params = {
            COMPUTED.get(field.name, field.name): plain(field.name, value)
            for field, value in given
            if value is not field.default
        }
    array: list[Any] = [request.request_id or "a#1", request.prompt_token_ids, request.mm_features or None, params]
    array += [request.pooling, request.arrival_time, request.lora, request.cache_salt, None]
    array += [request.prompt_embeds, request.prompt_is_token_ids, 0, 0, request.priority]
    if request.trace_headers is not None or request.session_id is not None:
        array += [request.trace_headers, False, None, None, None, False, request.session_id]
    payload: bytes = msgpack.packb(array)
    return payload
