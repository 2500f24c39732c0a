from __future__ import annotations

import array
from typing import Any

import pytest

from lockstep_trio.engines.protocol import RequestHead
from lockstep_trio.engines.tokenspeed import TokenSpeedRequest, TokenSpeedSampling
from lockstep_trio.engines.tokenspeed.admission import Limits, admit, check_head
from lockstep_trio.engines.vllm import EngineCoreRequest
from lockstep_trio.errors import RequestRejected

LIMITS = Limits(vocab_size=256, context=16, output_logprobs=True)


def refused(request: Any, limits: Limits = LIMITS) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        admit(request, limits)
    return caught.value


def test_a_request_is_put_into_the_wires_types() -> None:
    admitted = admit(TokenSpeedRequest(array.array("i", [1, 2]), stream=False, return_logprob=True), LIMITS)
    assert admitted.prompt == [1, 2]
    assert (admitted.sampling, admitted.stream, admitted.return_logprob) == ([], False, True)


@pytest.mark.parametrize("prompt", [[], (), None, "abc", 5, [256], [-1], [1.5], [True], [None], [[1]]], ids=repr)
def test_a_prompt_that_is_none_or_empty_or_no_token_ids_is_refused(prompt: Any) -> None:
    assert refused(TokenSpeedRequest(prompt)).field.startswith("prompt_token_ids")


def test_a_prompt_must_leave_the_room_that_the_engine_takes_for_granted() -> None:
    admit(TokenSpeedRequest([1] * 14), LIMITS)
    error = refused(TokenSpeedRequest([1] * 15))
    assert (error.field, error.value) == ("len(prompt_token_ids)", 15)
    assert "14 tokens (max_model_len 16, less 2 to generate)" in error.limit


def test_without_a_context_or_a_vocabulary_only_the_types_limit_a_prompt() -> None:
    admit(TokenSpeedRequest([2**31 - 1] * 100_000), Limits())
    assert refused(TokenSpeedRequest([2**31]), Limits()).field == "prompt_token_ids[0]"


def test_a_vocabulary_bounds_the_ids_of_the_sampling_too() -> None:
    for sampling in (TokenSpeedSampling(stop_token_ids=[256]), TokenSpeedSampling(logit_bias={256: 1.0})):
        assert refused(TokenSpeedRequest([1], sampling)).field.startswith("sampling.")


def test_logprobs_are_refused_unless_the_engines_were_said_to_give_them() -> None:
    request = TokenSpeedRequest([1], return_logprob=True)
    admit(request, LIMITS)
    error = refused(request, Limits())
    assert error.field == "return_logprob"
    assert "output_logprobs=True" in error.limit


@pytest.mark.parametrize("field", ["stream", "return_logprob"])
@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_flags_are_flags(field: str, value: Any) -> None:
    assert refused(TokenSpeedRequest([1], **{field: value})).field == field


def test_the_sampling_is_of_this_engine() -> None:
    assert refused(TokenSpeedRequest([1], {"top_p": 1})).field == "sampling"  # type: ignore[arg-type]


def test_the_head_is_checked_too() -> None:
    assert check_head(TokenSpeedRequest([1], request_id="x", data_parallel_rank=3)) == RequestHead("x", 3)
    assert check_head(TokenSpeedRequest([1])) == RequestHead(None, None)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (EngineCoreRequest([1]), "request"),
        (TokenSpeedRequest([1], request_id=""), "request_id"),
        (TokenSpeedRequest([1], request_id="x" * 257), "request_id"),
        (TokenSpeedRequest([1], request_id=5), "request_id"),  # type: ignore[arg-type]
        (TokenSpeedRequest([1], request_id="\ud800"), "request_id"),
        (TokenSpeedRequest([1], data_parallel_rank=-1), "data_parallel_rank"),
        (TokenSpeedRequest([1], data_parallel_rank=True), "data_parallel_rank"),
        (TokenSpeedRequest([1], data_parallel_rank=65_536), "data_parallel_rank"),
    ],
    ids=repr,
)
def test_a_head_that_cannot_be_is_refused(request_: Any, field: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        check_head(request_)
    assert caught.value.field == field
