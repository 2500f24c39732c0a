from __future__ import annotations

from typing import Any

import attrs
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_trio.engines.vllm.admission import admit, check_head
from lockstep_trio.engines.vllm.checks import Limits
from lockstep_trio.engines.vllm.encode import encode_add
from lockstep_trio.engines.vllm.request import EngineCoreRequest, SamplingParams
from lockstep_trio.errors import LockstepError, RequestRejected

LIMITS = Limits(vocab_size=256, max_logprobs=20, max_model_len=512, priority_position=13)


def sampled(**fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest([1, 2, 3], SamplingParams(**fields))


def test_a_good_request_is_admitted_with_its_prompt_uncopied() -> None:
    request = EngineCoreRequest([1, 2, 3], cache_salt="salt", priority=-4, arrival_time=5)
    admitted = admit(request, LIMITS)
    assert admitted.prompt is request.prompt_token_ids
    assert (admitted.sampling, admitted.cache_salt, admitted.priority) == ({"max_tokens": 16}, "salt", -4)
    assert type(admitted.arrival_time) is float


# What was seen to kill a real engine, vLLM 0.32.0, when sent as an otherwise normal ADD; most of it without a message.
POISONS = {
    "prompt longer than max_model_len": (EngineCoreRequest([1] * 600), "len(prompt_token_ids)"),
    "prompt of exactly max_model_len": (EngineCoreRequest([1] * 512), "len(prompt_token_ids)"),
    "empty prompt": (EngineCoreRequest([]), "prompt_token_ids"),
    "token id outside the vocabulary": (EngineCoreRequest([1, 256]), "prompt_token_ids[1]"),
    "negative token id": (EngineCoreRequest([1, -1]), "prompt_token_ids[1]"),
    "logprobs above the engine's limit": (sampled(logprobs=1000), "sampling.logprobs"),
    "allowed token outside the vocabulary": (sampled(allowed_token_ids=[256]), "sampling.allowed_token_ids[0]"),
    "bias for a token outside the vocabulary": (sampled(logit_bias={256: 1.0}), "sampling.logit_bias"),
    "temperature that is a string": (sampled(temperature="1"), "sampling.temperature"),
    "negative temperature": (sampled(temperature=-1.0), "sampling.temperature"),
    "temperature that is no number": (sampled(temperature=float("nan")), "sampling.temperature"),
    "top_p of 5": (sampled(top_p=5), "sampling.top_p"),
    "max_tokens of 0": (sampled(max_tokens=0), "sampling.max_tokens"),
    "no max_tokens": (sampled(max_tokens=None), "sampling.max_tokens"),
    "no sampling": (EngineCoreRequest([1], None), "sampling"),  # type: ignore[arg-type]
    "no prompt": (EngineCoreRequest(None), "prompt_token_ids"),  # type: ignore[arg-type]
    "prompt that is text": (EngineCoreRequest("hello"), "prompt_token_ids"),  # type: ignore[arg-type]
    "prompt that is bytes": (EngineCoreRequest(b"hello"), "prompt_token_ids"),
    "sampling that is a map": (EngineCoreRequest([1], {"n": 1}), "sampling"),  # type: ignore[arg-type]
    "arrival that is no number": (EngineCoreRequest([1], arrival_time=float("nan")), "arrival_time"),
    "salt that is no text": (EngineCoreRequest([1], cache_salt=5), "cache_salt"),  # type: ignore[arg-type]
    "salt that has no UTF-8": (EngineCoreRequest([1], cache_salt="\ud800"), "cache_salt"),
    "priority that is a float": (EngineCoreRequest([1], priority=1.0), "priority"),  # type: ignore[arg-type]
    "priority that is a bool": (EngineCoreRequest([1], priority=False), "priority"),
    "priority of 64 bits": (EngineCoreRequest([1], priority=2**63), "priority"),
}


@pytest.mark.parametrize(("request_", "field"), POISONS.values(), ids=POISONS)
def test_a_poison_is_refused_and_the_field_named(request_: EngineCoreRequest, field: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        admit(request_, LIMITS)
    assert caught.value.field == field
    assert isinstance(caught.value, LockstepError)
    assert isinstance(caught.value, ValueError)


def test_a_prompt_may_leave_room_for_one_token() -> None:
    assert len(admit(EngineCoreRequest([1] * 511), LIMITS).prompt) == 511


def test_a_long_prompt_is_not_part_of_the_error() -> None:
    with pytest.raises(RequestRejected, match=r"600.*at most 511 tokens") as caught:
        admit(EngineCoreRequest([1] * 600), LIMITS)
    assert caught.value.value == 600


def test_without_limits_only_the_wire_limits_hold() -> None:
    admit(EngineCoreRequest([2**31 - 1] * 5000), Limits())
    with pytest.raises(RequestRejected):
        admit(EngineCoreRequest([2**31]), Limits())


def test_a_priority_needs_a_known_version() -> None:
    assert admit(EngineCoreRequest([1], priority=0), Limits()).priority == 0
    with pytest.raises(RequestRejected, match="version"):
        admit(EngineCoreRequest([1], priority=1), Limits())


def test_the_head_is_the_callers_id_and_pin() -> None:
    assert check_head(EngineCoreRequest([1])) == (None, None)
    assert check_head(EngineCoreRequest([1], request_id="a", data_parallel_rank=3)) == ("a", 3)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"request_id": 5}, "request_id"),
        ({"request_id": "\udfff"}, "request_id"),
        ({"data_parallel_rank": -1}, "data_parallel_rank"),
        ({"data_parallel_rank": True}, "data_parallel_rank"),
        ({"data_parallel_rank": "1"}, "data_parallel_rank"),
    ],
)
def test_a_bad_id_or_pin_is_refused_before_anything_is_registered(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        check_head(EngineCoreRequest([1], **fields))
    assert caught.value.field == field


def test_only_requests_are_requests() -> None:
    with pytest.raises(RequestRejected):
        check_head([1, 2, 3])  # type: ignore[arg-type]


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 300)
    | st.floats()
    | st.floats(-3, 3)
    | st.text(st.characters(), max_size=3)
    | st.binary(max_size=3)
    | st.builds(object)
)
ANYTHING = (
    SCALARS
    | st.lists(SCALARS | st.lists(SCALARS, max_size=2), max_size=3)
    | st.dictionaries(st.integers(-2, 300) | st.text(max_size=2), SCALARS, max_size=3)
)


def some_of(kind: type) -> st.SearchStrategy[dict[str, object]]:
    """Any values for any of the fields of a class."""
    return st.dictionaries(st.sampled_from([field.name for field in attrs.fields(kind)]), ANYTHING, max_size=4)


@given(some_of(SamplingParams), some_of(EngineCoreRequest))
def test_whatever_is_given_is_refused_by_name_or_fit_to_send(sampling: dict[str, Any], fields: dict[str, Any]) -> None:
    request = EngineCoreRequest(**{"prompt_token_ids": [1, 2], "sampling": SamplingParams(**sampling), **fields})
    try:
        admitted = admit(request, LIMITS)
    except RequestRejected:
        return
    _, payload = encode_add("id", admitted, LIMITS.priority_position)
    array = msgpack.unpackb(payload, strict_map_key=False)
    assert all(type(token) is int and 0 <= token < 256 for token in array[1])
    assert type(array[3]["max_tokens"]) is int
    assert type(array[5]) is float


PLAIN_IDS = st.lists(st.integers(0, 255), max_size=5)
VALID = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2) | st.integers(0, 2),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 2**31 - 1),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0, exclude_min=True, allow_infinity=False),
        "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
        "max_tokens": st.integers(4, 2**31 - 512),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": PLAIN_IDS,
        "eos_token_id": st.none() | st.integers(0, 255),
        "ignore_eos": st.booleans(),
        "logprobs": st.none() | st.integers(0, 20),
        "prompt_logprobs": st.none() | st.integers(0, 20),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, 255), st.floats(-100, 100), max_size=5),
        "allowed_token_ids": st.none() | st.lists(st.integers(0, 255), min_size=1, max_size=300),
        "bad_words_token_ids": st.none() | st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=3), max_size=3),
    },
)


@given(VALID, st.lists(st.integers(0, 255), min_size=1, max_size=508))
def test_whatever_is_in_range_is_admitted_and_sent_as_given(sampling: dict[str, Any], prompt: list[int]) -> None:
    sent = admit(EngineCoreRequest(prompt, SamplingParams(**sampling)), LIMITS).sampling
    for name, value in sampling.items():
        if name in sent and name not in ("stop_token_ids", "allowed_token_ids"):
            assert sent[name] == value
