from __future__ import annotations

from typing import Any

import attrs
import pytest

from lockstep_trio.engines.vllm import RepetitionDetection, StructuredOutputs
from lockstep_trio.engines.vllm.checks import Limits
from lockstep_trio.engines.vllm.request import SamplingParams
from lockstep_trio.engines.vllm.sampling import SINCE, check_sampling
from lockstep_trio.engines.vllm.version import Versions, parse_version
from lockstep_trio.errors import RequestRejected

INT32 = 2**31 - 1
NAN = float("nan")
INF = float("inf")
LIMITS = Limits(vocab_size=256, max_logprobs=20, max_model_len=512)


def wire(limits: Limits = LIMITS, prompt_length: int = 4, **fields: Any) -> dict[str, object]:
    return check_sampling(SamplingParams(**fields), prompt_length, limits)


def test_the_defaults_are_left_out_but_max_tokens() -> None:
    assert wire() == {"max_tokens": 16}


@pytest.mark.parametrize("field", attrs.fields(SamplingParams), ids=lambda field: field.name)
def test_a_default_that_is_spelled_out_is_left_out_too(field: Any) -> None:
    assert wire(**{field.name: field.default}) == {"max_tokens": 16}


ACCEPTED: list[tuple[str, Any, dict[str, object]]] = [
    ("temperature", 0, {"temperature": 0.0}),
    ("temperature", 2.0, {"temperature": 2.0}),
    ("top_p", 1, {}),
    ("top_p", 1e-9, {"top_p": 1e-9}),
    ("top_k", -1, {"top_k": -1}),
    ("top_k", INT32, {"top_k": INT32}),
    ("min_p", 1, {"min_p": 1.0}),
    ("presence_penalty", -2, {"presence_penalty": -2.0}),
    ("frequency_penalty", 2, {"frequency_penalty": 2.0}),
    ("repetition_penalty", 1.5, {"repetition_penalty": 1.5}),
    ("seed", -(2**63), {"seed": -(2**63)}),
    ("seed", 0, {"seed": 0}),
    ("max_tokens", 1, {"max_tokens": 1}),
    ("max_tokens", INT32 - 4, {"max_tokens": INT32 - 4}),
    ("min_tokens", 16, {"min_tokens": 16}),
    ("stop_token_ids", [5, 5, 6], {"stop_token_ids": [5, 6]}),
    ("stop_token_ids", [], {}),
    ("ignore_eos", True, {"ignore_eos": True}),
    ("logprobs", 0, {"logprobs": 0}),
    ("logprobs", 20, {"logprobs": 20}),
    ("prompt_logprobs", 20, {"prompt_logprobs": 20}),
    ("logit_bias", {255: -100, 0: 100.0}, {"logit_bias": {255: -100.0, 0: 100.0}}),
    ("logit_bias", {}, {"logit_bias": {}}),
    ("allowed_token_ids", range(256), {"allowed_token_ids": list(range(256))}),
    ("bad_words_token_ids", [[1], (2, 3)], {"_bad_words_token_ids": [[1], [2, 3]]}),
    ("bad_words_token_ids", [], {}),
    ("eos_token_id", 2, {"_eos_token_id": 2, "_all_stop_token_ids": [2]}),
    ("logprob_token_ids", (255, 0, 255), {"logprob_token_ids": [255, 0]}),
    ("logprob_token_ids", range(128), {"logprob_token_ids": list(range(128))}),
    ("thinking_token_budget", 0, {"thinking_token_budget": 0}),
    ("thinking_token_budget", INT32, {"thinking_token_budget": INT32}),
    ("skip_reading_prefix_cache", False, {"skip_reading_prefix_cache": False}),
    ("watermarking", False, {"watermarking": False}),
    ("watermarking", True, {"watermarking": True}),
    ("routed_experts_prompt_start", 3, {"routed_experts_prompt_start": 3}),
    ("trace_decode_token_ids", [5] * 508, {"trace_decode_token_ids": [5] * 508}),
    ("extra_args", {}, {"extra_args": {}}),
    ("extra_args", {"a": [None, {"b": 2**64 - 1}]}, {"extra_args": {"a": [None, {"b": 2**64 - 1}]}}),
    (
        "repetition_detection",
        RepetitionDetection(max_pattern_size=3, min_count=2),
        {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}},
    ),
]


@pytest.mark.parametrize(("name", "value", "expected"), ACCEPTED, ids=lambda value: f"{value!r:.40}")
def test_the_ends_of_every_range_are_accepted(name: str, value: Any, expected: dict[str, object]) -> None:
    assert wire(**{name: value}) == {"max_tokens": 16, **expected}


REFUSED: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, NAN, INF, "1", None, True],
    "top_p": [0, -0.1, 1.1, 5, NAN, "1", None],
    "top_k": [-2, 1.0, True, None, INT32 + 1],
    "min_p": [-0.1, 1.1, NAN, None],
    "presence_penalty": [-2.1, 2.1, NAN, None],
    "frequency_penalty": [-2.1, 2.1, NAN, None],
    "repetition_penalty": [0, -1, NAN, INF, 10**400, None],
    "seed": [2**63, -(2**63) - 1, 1.0, True, "1"],
    "max_tokens": [0, -1, None, 16.0, True, 2**31],
    "min_tokens": [-1, 17, None, 1.0, True],
    "stop_token_ids": [[256], [-1], [True], [1.0], "ab", 5, None],
    "eos_token_id": [256, -1, True, 2.0, [2]],
    "ignore_eos": [0, 1, None, "no"],
    "logprobs": [21, 1000, -1, -2, 1.0, True],
    "prompt_logprobs": [21, -1, -2, 1.0, True],
    "logit_bias": [{256: 1}, {-1: 1}, {"1": 1}, {1.0: 1}, {True: 1}, {1: 101}, {1: NAN}, {1: "x"}, [1], 5],
    "allowed_token_ids": [[], [256], [-1], [True], "ab", 5],
    "bad_words_token_ids": [[[]], [[1], []], [[256]], [[-1]], [1], [["a"]], "ab", 5, [[1]] * 129, [[1] * 1025]],
    "structured_outputs": [{"json": {}}, "json", True, StructuredOutputs(regex="a")],
    "logprob_token_ids": [[], [256], [-1], [True], "ab", 5, list(range(129))],
    "prompt_logprob_token_ids": [
        [],
        [[]],
        [[1]] * 2,
        [[1]] * 4,
        [[1], [256], [2]],
        [range(21)] * 3,
        [1, 2, 3],
        "abc",
        5,
    ],
    "prompt_logprob_start": [-1, 0, 1.0, True, INT32 + 1],
    "repetition_detection": [{"max_pattern_size": 2, "min_count": 2}, (2, 1, 2), 5, True],
    "thinking_token_budget": [-1, INT32 + 1, 1.0, True, "1"],
    "skip_reading_prefix_cache": [0, 1, "no"],
    "watermarking": [0, 1, "no"],
    "routed_experts_prompt_start": [-1, 4, 1.0, True, None],
    "trace_decode_token_ids": [[], [256], [-1], [True], "ab", 5, [5] * 509],
    "extra_args": [[], "ab", 5, True, [("a", 1)], {1: 2}, {"a": {1}}, {"a": object()}, {"kv_transfer_params": "a"}],
    "n": [0, 2, None, True, 1.0],
}


def test_every_field_has_values_that_are_refused() -> None:
    assert set(REFUSED) == {field.name for field in attrs.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in REFUSED.items() for value in values],
    ids=lambda value: f"{value!r:.40}",
)
def test_what_would_hurt_the_engine_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestRejected) as caught:
        wire(**{name: value})
    assert caught.value.field.partition("[")[0] == f"sampling.{name}"


def test_the_place_within_a_field_is_named() -> None:
    places: list[tuple[dict[str, Any], str]] = [
        ({"stop_token_ids": [1, 256]}, "sampling.stop_token_ids[1]"),
        ({"bad_words_token_ids": [[1], [2, 256]]}, "sampling.bad_words_token_ids[1][1]"),
        ({"logit_bias": {1: 0, 7: INF}}, "sampling.logit_bias[7]"),
        ({"logprob_token_ids": [1, 256]}, "sampling.logprob_token_ids[1]"),
        ({"trace_decode_token_ids": [1, 256]}, "sampling.trace_decode_token_ids[1]"),
        ({"extra_args": {"a": [1, {2}]}}, "sampling.extra_args['a'][1]"),
    ]
    for fields, where in places:
        with pytest.raises(RequestRejected) as caught:
            wire(**fields)
        assert caught.value.field == where


@pytest.mark.parametrize("name", ["allowed_token_ids", "logit_bias"])
def test_the_runners_tables_are_not_overfilled(name: str) -> None:
    big = Limits(vocab_size=5000)
    full, over = (dict.fromkeys(range(size), 1.0) for size in (1024, 1025))
    as_given: Any = dict if name == "logit_bias" else list
    wire(big, **{name: as_given(full)})
    with pytest.raises(RequestRejected, match="1024"):
        wire(big, **{name: as_given(over)})


def test_stop_tokens_are_many_only_without_min_tokens() -> None:
    many = list(range(128))
    assert wire(stop_token_ids=many, min_tokens=1)["stop_token_ids"] == many
    wire(stop_token_ids=[*many, 128])
    with pytest.raises(RequestRejected, match=r"stop_token_ids.*128"):
        wire(stop_token_ids=many, min_tokens=1, eos_token_id=200)


def test_the_end_of_sequence_is_spelled_as_the_engines_own_front_end_does() -> None:
    assert wire(eos_token_id=2, stop_token_ids=[7, 2]) == {
        "max_tokens": 16,
        "stop_token_ids": [7, 2],
        "_all_stop_token_ids": [7, 2],
        "_eos_token_id": 2,
    }


def test_ignoring_the_end_of_sequence_still_holds_it_back_for_min_tokens() -> None:
    assert wire(eos_token_id=2, ignore_eos=True, min_tokens=3) == {
        "max_tokens": 16,
        "min_tokens": 3,
        "ignore_eos": True,
        "_all_stop_token_ids": [2],
    }


def test_token_zero_can_be_the_end_of_sequence() -> None:
    assert wire(eos_token_id=0)["_eos_token_id"] == 0


def test_the_fewest_tokens_fit_the_context() -> None:
    assert wire(prompt_length=500, max_tokens=50, min_tokens=12)["min_tokens"] == 12
    wire(Limits(), prompt_length=500, max_tokens=50, min_tokens=50)
    with pytest.raises(RequestRejected, match=r"min_tokens.*512"):
        wire(prompt_length=500, max_tokens=50, min_tokens=13)


def test_prompt_and_output_together_fit_an_int32() -> None:
    with pytest.raises(RequestRejected, match="max_tokens"):
        wire(prompt_length=5, max_tokens=INT32 - 4)


@pytest.mark.parametrize(
    ("vocab_size", "max_logprobs", "most", "all_allowed"),
    [(256, 20, 20, False), (10, 20, 10, True), (None, 20, 20, False), (256, -1, 256, True), (None, -1, INT32, True)],
)
def test_logprobs_go_as_far_as_the_engine_and_the_vocabulary(
    vocab_size: int | None, max_logprobs: int, most: int, all_allowed: bool
) -> None:
    limits = Limits(vocab_size, max_logprobs)
    assert wire(limits, logprobs=most)["logprobs"] == most
    with pytest.raises(RequestRejected, match=r"sampling\.logprobs"):
        wire(limits, logprobs=most + 1)
    if all_allowed:
        assert wire(limits, logprobs=-1)["logprobs"] == -1
    else:
        with pytest.raises(RequestRejected):
            wire(limits, logprobs=-1)


def test_the_callers_lists_are_not_handed_on() -> None:
    stop = [1, 2]
    assert wire(stop_token_ids=stop)["stop_token_ids"] is not stop


# A value for each field that only some releases have; for a prompt of four tokens.
NEWER: dict[str, dict[str, Any]] = {
    "skip_reading_prefix_cache": {"skip_reading_prefix_cache": True},
    "repetition_detection": {"repetition_detection": RepetitionDetection(max_pattern_size=3, min_count=2)},
    "thinking_token_budget": {"thinking_token_budget": 5},
    "logprob_token_ids": {"logprob_token_ids": [5]},
    "routed_experts_prompt_start": {"routed_experts_prompt_start": 1},
    "trace_decode_token_ids": {"trace_decode_token_ids": [5]},
    "watermarking": {"watermarking": True},
    "prompt_logprob_token_ids": {"prompt_logprob_token_ids": [[5]] * 3},
    "prompt_logprob_start": {"prompt_logprob_start": 1, "prompt_logprob_token_ids": [[5]] * 2},
}


def test_every_newer_field_is_tried() -> None:
    assert NEWER.keys() == SINCE.keys()


@pytest.mark.parametrize("name", NEWER)
def test_a_newer_field_is_sent_to_engines_that_have_it_for_certain(name: str) -> None:
    exactly = Versions(SINCE[name], SINCE[name])
    assert name in wire(Limits(versions=exactly), **NEWER[name])


@pytest.mark.parametrize("name", NEWER)
def test_a_newer_field_is_refused_where_nobody_would_read_it(name: str) -> None:
    since = SINCE[name]
    first = r"\.".join(map(str, since))
    older = Versions((0, 10, 0), (since[0], since[1], since[2] - 1))
    with pytest.raises(RequestRejected, match=rf"{name}.*left out: vLLM 0\.10\.0 .*does not have it.*{first}"):
        wire(Limits(versions=older), **{name: NEWER[name][name]})
    with pytest.raises(RequestRejected, match=rf"{name}.*may be vLLM 0\.10\.0 .*{first} was the first.*version="):
        wire(Limits(versions=Versions((0, 10, 0), since)), **{name: NEWER[name][name]})


def test_extra_args_are_as_old_as_everything() -> None:
    oldest = parse_version("0.10.0")
    assert oldest is not None
    given = {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1, 2]}, "mine": (1, b"x")}
    assert wire(Limits(versions=oldest), extra_args=given)["extra_args"] == given
