from __future__ import annotations

import attrs
import pytest

from lockstep_trio.engines.vllm import EngineCoreRequest, SamplingParams


def test_a_request_needs_only_a_prompt() -> None:
    request = EngineCoreRequest([1, 2, 3])
    assert request.sampling == SamplingParams()
    assert (request.request_id, request.data_parallel_rank, request.priority, request.cache_salt) == (
        None,
        None,
        0,
        None,
    )


def test_the_prompt_is_stored_as_given() -> None:
    prompt = [1, 2, 3]
    assert EngineCoreRequest(prompt).prompt_token_ids is prompt


def test_everything_but_prompt_and_sampling_is_given_by_name() -> None:
    with pytest.raises(TypeError):
        EngineCoreRequest([1], SamplingParams(), "id")  # type: ignore[call-arg]


@pytest.mark.parametrize("value", [EngineCoreRequest([1]), SamplingParams()], ids=lambda value: type(value).__name__)
def test_requests_are_frozen(value: EngineCoreRequest | SamplingParams) -> None:
    name = attrs.fields(type(value))[0].name
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(value, name, None)


def test_nothing_is_checked_before_submit() -> None:
    EngineCoreRequest([], SamplingParams(temperature=-1))


def test_the_defaults_of_sampling_are_the_engines_own() -> None:
    # vllm/sampling_params.py, 0.20 to 0.33
    defaults = attrs.asdict(SamplingParams())
    assert defaults == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "stop_token_ids": (),
        "eos_token_id": None,
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words_token_ids": None,
        "structured_outputs": None,
        "logprob_token_ids": None,
        "prompt_logprob_token_ids": None,
        "prompt_logprob_start": None,
        "repetition_detection": None,
        "thinking_token_budget": None,
        "skip_reading_prefix_cache": None,
        "watermarking": None,
        "routed_experts_prompt_start": 0,
        "trace_decode_token_ids": None,
        "extra_args": None,
        "n": 1,
    }
