"""Requests that are in order, as a Hypothesis strategy: every field that admission allows, up to the ends of its range.

They fit engines of the size that the catalogue is written for. What matters for an engine is mostly what several
fields mean together, so the values are small in number and near each other: a stop token that is also the only one
allowed, a bad word that is biased towards, a repetition of the prompt that is punished beyond what a float holds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from lockstep_trio import EngineCoreRequest, SamplingParams
from lockstep_trio.engines.vllm import RepetitionDetection
from lockstep_trio.engines.vllm.together import NOT_WITH_TRACE
from poison.catalogue import INT32, MAX_LOGPROBS, MAX_MODEL_LEN, VOCABULARY

FLOAT_MAX, TINY = sys.float_info.max, 5e-324
JUST_UNDER_1 = 1.0 - 2**-53

tokens = st.sampled_from([0, 1, 2, 3, VOCABULARY - 1]) | st.integers(0, VOCABULARY - 1)
whole_vocabulary = st.just(list(range(VOCABULARY)))
all_but_one = tokens.map(lambda token: [other for other in range(VOCABULARY) if other != token])
most_tokens = whole_vocabulary | all_but_one


def reals(low: float, high: float, *edges: float) -> st.SearchStrategy[float]:
    return st.sampled_from([low, high, *edges]) | st.floats(low, high)


penalties = reals(-2.0, 2.0, 0.0, -0.0, TINY, -TINY)
biases = reals(-100.0, 100.0, 0.0, -0.0, TINY)
plain = st.none() | st.booleans() | st.sampled_from([-(2**63), 2**64 - 1, 0.5, "größer", b"\0", [], {}, [[{"a": 1}]]])
logprobs = st.none() | st.sampled_from([0, 1, MAX_LOGPROBS]) | st.integers(0, MAX_LOGPROBS)
fields: dict[str, st.SearchStrategy[Any]] = {
    "temperature": reals(0.0, 2.0, -0.0, TINY, 1e-6, 1e-5, 1e-2) | st.integers(0, 2),
    "top_p": reals(TINY, 1.0, 1e-45, 1e-8, JUST_UNDER_1) | st.just(1),
    "top_k": st.sampled_from([-1, 0, 1, VOCABULARY - 1, VOCABULARY, VOCABULARY + 1, INT32]) | st.integers(-1, INT32),
    "min_p": reals(0.0, 1.0, -0.0, TINY, JUST_UNDER_1),
    "presence_penalty": penalties,
    "frequency_penalty": penalties,
    "repetition_penalty": reals(TINY, FLOAT_MAX, 1e-45, 1e-38, 0.5, 1.0, 2.0, 3.4e38, 1e39),
    "seed": st.none() | st.sampled_from([-(2**63), -1, 0, 1, 2**32, 2**63 - 1]) | st.integers(-(2**63), 2**63 - 1),
    "eos_token_id": st.none() | tokens,
    "ignore_eos": st.booleans(),
    "logprobs": logprobs,
    "prompt_logprobs": logprobs,
    "logit_bias": (
        st.none()
        | st.dictionaries(tokens, biases, max_size=5)
        | st.builds(dict.fromkeys, most_tokens, biases)
        | st.just({})
    ),
    "allowed_token_ids": st.none() | st.lists(tokens, min_size=1, max_size=4) | most_tokens,
    "bad_words_token_ids": (
        st.none()
        | st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4)
        | st.lists(tokens, min_size=1, max_size=128, unique=True).map(lambda words: [[word] for word in words])
        | tokens.map(lambda token: [[token] * 1024])
    ),
    "n": st.just(1),
    "repetition_detection": st.none()
    | st.builds(
        # Never seen in as few tokens as these requests make: how a request ends is known beforehand.
        RepetitionDetection,
        max_pattern_size=st.sampled_from([3, 4, 100, INT32]),
        min_pattern_size=st.sampled_from([1, 3]),
        min_count=st.sampled_from([9, 1000, INT32]),
    ),
    "thinking_token_budget": st.none() | st.sampled_from([0, 1, INT32]),
    "skip_reading_prefix_cache": st.sampled_from([None, True, False]),
    "watermarking": st.sampled_from([None, True, False]),
    "extra_args": st.none()
    | st.dictionaries(st.sampled_from(["", "a", "größer"]), plain, max_size=2)
    | st.just(
        # Without a connector there is nobody to read them.
        {"kv_transfer_params": {"do_remote_decode": True, "remote_port": 1}, "ec_transfer_params": None}
    ),
}
"""Each sampling field by itself, but for those that limit each other."""


@st.composite
def samplings(draw: st.DrawFn, prompt_length: int, most_generated: int) -> SamplingParams:
    """Sampling parameters for a prompt of that length; up to so many tokens unless it ends with the context."""
    room = MAX_MODEL_LEN - prompt_length
    most = draw(st.integers(1, most_generated) | st.just(most_generated))
    if room <= most_generated:
        most = draw(st.just(most) | st.sampled_from([room, room + 1, 2**30, INT32 - prompt_length]))
    fewest = draw(st.sampled_from([0, 0, 1, min(most, room)]) | st.integers(0, min(most, room)))
    stop = draw(st.just([]) | st.lists(tokens, max_size=4) | (most_tokens if not fewest else st.nothing()))
    given = draw(st.fixed_dictionaries({}, optional=fields))
    given |= draw(st.just({}) | st.just({}) | companions(given, prompt_length))
    if given.get("prompt_logprobs") is not None or "prompt_logprob_token_ids" in given:
        given["skip_reading_prefix_cache"] = given.get("skip_reading_prefix_cache") or None  # False is refused
    return SamplingParams(max_tokens=most, min_tokens=fewest, stop_token_ids=stop, **given)


@st.composite
def companions(draw: st.DrawFn, given: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
    """Fields that depend on the prompt, or on those that there are."""
    more: dict[str, Any] = {"routed_experts_prompt_start": draw(st.sampled_from([0, prompt_length - 1]))}
    if given.get("logprobs") is None:
        more["logprob_token_ids"] = draw(st.none() | st.lists(tokens, min_size=1, max_size=4))
    if 1 < prompt_length <= 8 and draw(st.booleans()):
        start = draw(st.none() | st.integers(0, prompt_length - 2))
        rows = prompt_length - 1 - (start or 0)
        scored = st.lists(tokens | st.just(-1), min_size=1, max_size=3)
        more["prompt_logprob_token_ids"] = draw(st.lists(scored, min_size=rows, max_size=rows))
        more["prompt_logprob_start"] = start
    elif not any(given.get(name) is not None for name in NOT_WITH_TRACE):
        room = MAX_MODEL_LEN - prompt_length
        more["trace_decode_token_ids"] = draw(st.none() | st.lists(tokens, min_size=1, max_size=min(4, room)))
    return more


@st.composite
def requests(draw: st.DrawFn, most_generated: int = 8) -> EngineCoreRequest:
    """Whole requests, for any rank; they make at most ``most_generated`` tokens each."""
    longest = MAX_MODEL_LEN - 1
    length = draw(st.integers(1, 8) | st.sampled_from([1, longest - 1, longest]) | st.integers(1, longest))
    first, step = draw(tokens), draw(st.sampled_from([0, 1, 7]))  # 511 draws would be most of what is drawn
    return EngineCoreRequest(
        [(first + step * at) % VOCABULARY for at in range(length)],
        draw(samplings(length, most_generated)),
        data_parallel_rank=draw(st.sampled_from([None, 0, 1])),
        priority=draw(st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)])),
        cache_salt=draw(st.none() | st.sampled_from(["salt", "größer", "\x00", "\U0001f9c2" * 50])),
        arrival_time=draw(reals(-FLOAT_MAX, FLOAT_MAX, 0.0, -0.0, 1.0) | st.just(0)),
    )
