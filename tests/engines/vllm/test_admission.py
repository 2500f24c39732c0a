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
from poison.catalogue import MAX_LOGPROBS, MAX_MODEL_LEN, POISONS, RANKS, VOCABULARY, Poison
from poison.valid import requests as valid_requests

LIMITS = Limits(VOCABULARY, MAX_LOGPROBS, MAX_MODEL_LEN)


def test_a_good_request_is_admitted_with_its_prompt_uncopied() -> None:
    request = EngineCoreRequest([1, 2, 3], cache_salt="salt", priority=-4, arrival_time=5)
    admitted = admit(request, LIMITS)
    fields = admitted.fields
    assert fields.pop("prompt_token_ids") is request.prompt_token_ids
    assert type(fields["arrival_time"]) is float
    sampling = {"max_tokens": 16}
    assert fields == {"sampling_params": sampling, "arrival_time": 5.0, "cache_salt": "salt", "priority": -4}
    assert not admitted.aux


# A rank that is not in the group is found out by the group.
HERE = [poison for poison in POISONS if (poison.field, poison.value) != ("data_parallel_rank", RANKS)]


@pytest.mark.parametrize("poison", HERE, ids=lambda poison: poison.name)
def test_a_poison_is_refused_by_field_value_and_limit(poison: Poison) -> None:
    with pytest.raises(RequestRejected) as caught:
        check_head(poison.request)
        admit(poison.request, LIMITS)
    assert caught.value.field == poison.field
    assert caught.value.value is poison.value or caught.value.value == poison.value
    assert caught.value.limit
    assert isinstance(caught.value, LockstepError)
    assert isinstance(caught.value, ValueError)


def test_a_prompt_may_leave_room_for_one_token() -> None:
    assert admit(EngineCoreRequest([1] * 511), LIMITS).fields["prompt_token_ids"] == [1] * 511


def test_a_long_prompt_is_not_part_of_the_error() -> None:
    with pytest.raises(RequestRejected, match=r"600.*at most 511 tokens") as caught:
        admit(EngineCoreRequest([1] * 600), LIMITS)
    assert caught.value.value == 600


def test_without_limits_only_the_wire_limits_hold() -> None:
    admit(EngineCoreRequest([2**31 - 1] * 5000), Limits())
    with pytest.raises(RequestRejected):
        admit(EngineCoreRequest([2**31]), Limits())


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
    _, payload = encode_add("id", admitted, LIMITS.layout)
    array = msgpack.unpackb(payload, strict_map_key=False)
    assert all(type(token) is int and 0 <= token < 256 for token in array[1])
    assert type(array[3]["max_tokens"]) is int
    assert type(array[5]) is float


@given(valid_requests())
def test_whatever_is_in_range_is_admitted_and_sent_as_given(request_: EngineCoreRequest) -> None:
    admitted = admit(request_, LIMITS)
    check_head(request_)
    assert admitted.fields["prompt_token_ids"] is request_.prompt_token_ids
    sent = admitted.fields["sampling_params"]
    assert isinstance(sent, dict)
    given_here = ["stop_token_ids", "allowed_token_ids", "eos_token_id", "bad_words_token_ids"]
    given_here += ["logprob_token_ids", "prompt_logprob_token_ids"]
    for name, value in attrs.asdict(request_.sampling).items():
        if name not in given_here:
            default = getattr(SamplingParams(), name)
            assert sent.get(name, default) == value
            assert (name in sent) is (value != default or name == "max_tokens")
