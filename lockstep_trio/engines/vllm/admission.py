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
from collections.abc import Mapping, Sequence
from typing import Final, final

import attrs

from lockstep_trio.engines.common.admission import check_prompt, check_rank, check_request_id
from lockstep_trio.engines.protocol import Frame
from lockstep_trio.engines.vllm.checks import Limits, real, reject, text, whole
from lockstep_trio.engines.vllm.embeds import check_embeds
from lockstep_trio.engines.vllm.fields import need_field
from lockstep_trio.engines.vllm.frames import AuxFrames
from lockstep_trio.engines.vllm.lora import check_lora
from lockstep_trio.engines.vllm.multimodal import check_features
from lockstep_trio.engines.vllm.pooling import GENERATE, check_pooling
from lockstep_trio.engines.vllm.request import EngineCoreRequest, SamplingParams
from lockstep_trio.engines.vllm.sampling import check_sampling

MAX_HEADERS: Final = 64
MAX_HEADER_CHARS: Final = 8192
MAX_SESSION_CHARS: Final = 256


@final
@attrs.frozen
class Admitted:
    """A request in the wire's own types, nothing about it left to check."""

    fields: dict[str, object]
    """Every field that is not left at its default, by its name in ``EngineCoreRequest``; but for the id."""
    aux: Sequence[Frame] = ()
    """The arrays that its message carries behind it."""


def admit(request: EngineCoreRequest, limits: Limits) -> Admitted:
    """Check a request against everything that is known.

    Raises:
        RequestRejected: With the field, the value and the limit.
    """
    aux = AuxFrames()
    room = 1 if request.pooling is None else 0
    if request.prompt_embeds is None and request.prompt_is_token_ids is None:
        # A prompt of exactly max_model_len leaves no room for a token and kills the engine.
        prompt = check_prompt(request.prompt_token_ids, limits.token_bound, limits.max_model_len, room)
        length = len(prompt)
        fields: dict[str, object] = {"prompt_token_ids": prompt}
    else:
        length, fields = check_embeds(request, limits, room, aux)
    fields |= _task(request, length, limits)
    fields["arrival_time"] = real("arrival_time", request.arrival_time, -math.inf, math.inf, "a finite number")
    if (salt := text("cache_salt", request.cache_salt, None)) is not None:
        fields["cache_salt"] = salt
    if priority := _priority(request.priority, limits):
        fields["priority"] = priority
    if request.trace_headers is not None:
        fields["trace_headers"] = _headers(request.trace_headers, limits)
    if request.lora is not None:
        fields["lora_request"] = check_lora("lora", request.lora, limits)
    if request.mm_features != ():
        fields |= check_features("mm_features", request.mm_features, length, limits, aux)
    if request.session_id is not None:
        need_field("session_id", request.session_id, limits)
        fields["session_id"] = text("session_id", request.session_id, MAX_SESSION_CHARS)
    return Admitted(fields, aux.frames)


def _task(request: EngineCoreRequest, length: int, limits: Limits) -> dict[str, object]:
    """What to do with the prompt."""
    if request.pooling is not None:
        if request.sampling != SamplingParams():
            raise reject("sampling", request.sampling, "left at its default where pooling is given")
        return {"pooling_params": check_pooling("pooling", request.pooling, limits)}
    if GENERATE not in limits.tasks:
        raise reject("pooling", None, f"PoolingParams: the engines' tasks are {', '.join(limits.tasks) or 'none'}")
    if not isinstance(request.sampling, SamplingParams):
        raise reject("sampling", request.sampling, "SamplingParams")
    sampling = check_sampling(request.sampling, length, limits)
    fields: dict[str, object] = {"sampling_params": sampling}
    if "eos_token_id" in limits.layout and "_eos_token_id" in sampling:
        fields["eos_token_id"] = sampling["_eos_token_id"]  # up to 0.16 it is read from here
    return fields


def check_head(request: EngineCoreRequest) -> tuple[str | None, int | None]:
    """The caller's id and pinned rank, checked before anything is registered under them."""
    if not isinstance(request, EngineCoreRequest):
        raise reject("request", request, "an EngineCoreRequest")
    return check_request_id(request.request_id), check_rank(request.data_parallel_rank)


def _priority(priority: int, limits: Limits) -> int:
    if priority == 0 and type(priority) is int:
        return 0
    number = whole("priority", priority, -(2**63), 2**63 - 1, "a signed 64-bit integer")
    if number:
        need_field("priority", priority, limits)
    return number


def _headers(headers: object, limits: Limits) -> dict[str, str]:
    need_field("trace_headers", headers, limits)
    if not isinstance(headers, Mapping) or len(headers) > MAX_HEADERS:
        raise reject("trace_headers", headers, f"a mapping of at most {MAX_HEADERS} strings to strings, or None")
    return {_header("trace_headers", at): _header(f"trace_headers[{at!r}]", value) for at, value in headers.items()}


def _header(field: str, value: object) -> str:
    checked = "" if value == "" else text(field, value, MAX_HEADER_CHARS)
    if checked is None:
        raise reject(field, value, "a string")
    return checked
