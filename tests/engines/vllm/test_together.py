from __future__ import annotations

from typing import Any

import pytest

from lockstep_trio.engines.vllm import RepetitionDetection, StructuredOutputs
from lockstep_trio.engines.vllm.checks import Limits
from lockstep_trio.engines.vllm.request import SamplingParams
from lockstep_trio.engines.vllm.sampling import check_sampling
from lockstep_trio.engines.vllm.together import NOT_WITH_TRACE
from lockstep_trio.errors import RequestRejected

LIMITS = Limits(vocab_size=256, max_logprobs=20, max_model_len=512, structured_outputs="guidance")


def wire(prompt_length: int = 4, limits: Limits = LIMITS, **fields: Any) -> dict[str, object]:
    return check_sampling(SamplingParams(**fields), prompt_length, limits)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "ids to score beside the likeliest": ("logprobs", {"logprob_token_ids": [1], "logprobs": 1}),
    "a start of nothing": ("prompt_logprob_start", {"prompt_logprob_start": 0}),
    "a start behind the prompt": (
        "prompt_logprob_start",
        {"prompt_logprob_start": 3, "prompt_logprob_token_ids": [[1]]},
    ),
    "a row too few": ("prompt_logprob_token_ids", {"prompt_logprob_token_ids": [[1]] * 2}),
    "a row for the last token": ("prompt_logprob_token_ids", {"prompt_logprob_token_ids": [[1]] * 4}),
    "rows from the first on, not from the start": (
        "prompt_logprob_token_ids",
        {"prompt_logprob_token_ids": [[1]] * 3, "prompt_logprob_start": 1},
    ),
    "the cache, and a row for each token": (
        "skip_reading_prefix_cache",
        {"skip_reading_prefix_cache": False, "prompt_logprobs": 0},
    ),
    "the cache, and scores": (
        "skip_reading_prefix_cache",
        {"skip_reading_prefix_cache": False, "prompt_logprob_token_ids": [[1]] * 3},
    ),
    "experts from behind the prompt": ("routed_experts_prompt_start", {"routed_experts_prompt_start": 4}),
    "a trace beyond the context": ("trace_decode_token_ids", {"trace_decode_token_ids": [1] * 509}),
}


@pytest.mark.parametrize(("field", "fields"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_go_together_is_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestRejected) as caught:
        wire(**fields)
    assert caught.value.field == f"sampling.{field}"


def test_what_goes_together_is_sent() -> None:
    sent = wire(prompt_logprob_token_ids=[[1]], prompt_logprob_start=2, prompt_logprobs=1, logprobs=1)
    assert sent["prompt_logprob_start"] == 2
    assert wire(prompt_logprob_token_ids=[[1]] * 3, prompt_logprob_start=0)["prompt_logprob_start"] == 0
    wire(skip_reading_prefix_cache=True, prompt_logprobs=0)
    wire(skip_reading_prefix_cache=False, logprob_token_ids=[1])
    wire(routed_experts_prompt_start=3)
    wire(trace_decode_token_ids=[1] * 508, logprobs=1)
    wire(trace_decode_token_ids=[1] * 1000, limits=Limits())


def test_a_prompt_of_one_token_has_no_rows() -> None:
    with pytest.raises(RequestRejected, match="0 rows"):
        wire(1, prompt_logprob_token_ids=[[1]])


BESIDE_A_TRACE: dict[str, Any] = {
    "prompt_logprobs": 0,
    "prompt_logprob_token_ids": [[1]] * 3,
    "structured_outputs": StructuredOutputs(regex="a"),
    "repetition_detection": RepetitionDetection(max_pattern_size=1, min_count=2),
    "thinking_token_budget": 0,
    "bad_words_token_ids": [[1]],
}


@pytest.mark.parametrize("name", NOT_WITH_TRACE)
def test_a_trace_allows_nothing_else_to_say_what_comes(name: str) -> None:
    wire(**{name: BESIDE_A_TRACE[name]})
    with pytest.raises(RequestRejected, match=rf"trace_decode_token_ids.*{name}"):
        wire(trace_decode_token_ids=[1], **{name: BESIDE_A_TRACE[name]})
