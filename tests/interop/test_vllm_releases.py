"""Every layout there ever was, judged by the message classes of the release that has it. No engine runs for this."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interop.judge import Refused
from interop.release_judge import ReleaseJudge
from lockstep_trio import EngineCoreRequest, FinishReason, RequestRejected, SamplingParams, VllmProtocol
from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.engines.vllm import RepetitionDetection, StructuredOutputs, VllmSession
from lockstep_trio.engines.vllm.sampling import SINCE
from poison.valid import requests as valid_requests

pytestmark = pytest.mark.vllm


def session_of(version: str) -> VllmSession:
    info = RankInfo(0, data_parallel_size=1, max_model_len=512)
    return VllmProtocol(version=version, vocab_size=256).session([info])


def has(release: str, name: str) -> bool:
    """Whether a sampling parameter is for that release."""
    return name not in SINCE or tuple(map(int, release.split("."))) >= SINCE[name]


def same(mine: object, theirs: object) -> bool:
    return mine == theirs or (isinstance(mine, tuple) and list(mine) == theirs)


@given(valid_requests())
@settings(max_examples=40, deadline=None)
def test_what_is_valid_reaches_the_classes_of_that_release(
    release_judge: ReleaseJudge, release: str, drawn: EngineCoreRequest
) -> None:
    try:
        kind, *frames = session_of(release).encode_add(drawn, "a#1")
    except RequestRejected as refused:
        name = refused.field.removeprefix("sampling.")
        assert name in ("logprobs", "prompt_logprobs") or not has(release, name), refused
        return
    assert kind == b"\x00"
    value = release_judge.decode("add", [bytes(frame) for frame in frames])
    assert value["request_id"] == "a#1"
    assert value["prompt_token_ids"] == list(drawn.prompt_token_ids)
    assert (value["cache_salt"], value["priority"]) == (drawn.cache_salt, drawn.priority)
    assert value["arrival_time"] == drawn.arrival_time
    assert (value["lora_request"], value["data_parallel_rank"], value["client_index"]) == (None, None, 0)
    sampling = value["sampling_params"]
    names = ["presence_penalty", "repetition_penalty", "max_tokens", "min_tokens", "logprobs"]
    if drawn.sampling.temperature >= 0.01:  # below that the classes themselves make it greedy
        names += ["temperature", "min_p", "top_p"]
    for name in names:
        assert same(getattr(drawn.sampling, name), sampling[name]), name
    eos = drawn.sampling.eos_token_id
    if "eos_token_id" in value:
        assert value["eos_token_id"] == (None if drawn.sampling.ignore_eos else eos)
    elif eos is not None and not drawn.sampling.ignore_eos:
        assert sampling["_eos_token_id"] == eos


# A value for each sampling parameter that not all releases have, and for the one that takes any.
NEWER: list[tuple[str, dict[str, Any]]] = [
    ("extra_args", {"extra_args": {"kv_transfer_params": {"a": [1, None]}, "mine": "größer"}}),
    ("skip_reading_prefix_cache", {"skip_reading_prefix_cache": True}),
    ("skip_reading_prefix_cache", {"skip_reading_prefix_cache": False}),
    ("repetition_detection", {"repetition_detection": RepetitionDetection(max_pattern_size=3, min_count=2)}),
    ("thinking_token_budget", {"thinking_token_budget": 0}),
    ("logprob_token_ids", {"logprob_token_ids": [255, 0]}),
    ("routed_experts_prompt_start", {"routed_experts_prompt_start": 1}),
    ("trace_decode_token_ids", {"trace_decode_token_ids": [5, 5]}),
    ("watermarking", {"watermarking": True}),
    ("watermarking", {"watermarking": False}),
    ("prompt_logprob_token_ids", {"prompt_logprob_token_ids": [[5]]}),
    ("prompt_logprob_start", {"prompt_logprob_start": 0, "prompt_logprob_token_ids": [[5]]}),
]


@pytest.mark.parametrize(("name", "fields"), NEWER, ids=lambda value: repr(value)[:60])
def test_a_parameter_is_read_by_a_release_that_has_it_and_refused_for_all_others(
    release_judge: ReleaseJudge, release: str, name: str, fields: dict[str, Any]
) -> None:
    request = EngineCoreRequest([1, 2], SamplingParams(**fields))
    if not has(release, name):
        with pytest.raises(RequestRejected, match=r"sampling\..*left out") as refused:
            session_of(release).encode_add(request, "a")
        assert refused.value.field.removeprefix("sampling.") in fields
        plain = session_of(release).encode_add(EngineCoreRequest([1, 2]), "a")
        read = release_judge.decode("add", [bytes(plain[1])])["sampling_params"]
        assert name not in read or SINCE[name] in LATER_THAN_THEIR_NAMES
        return
    [_, payload] = session_of(release).encode_add(request, "a")
    read = release_judge.decode("add", [bytes(payload)])["sampling_params"][name]
    if name == "repetition_detection":
        assert read.pop("class") == "RepetitionDetectionParams"
        assert read == {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 2}
    elif name == "prompt_logprob_token_ids":
        assert read == str(fields[name])  # an array, of which this judge says no more
    else:
        assert read == fields[name]


LATER_THAN_THEIR_NAMES = {SINCE["logprob_token_ids"], SINCE["prompt_logprob_token_ids"]}
"""What a release has under a name, and not in a form that would do."""


def test_the_last_field_that_may_be_sent_is_where_that_release_has_it(
    release_judge: ReleaseJudge, release: str
) -> None:
    _, payload = session_of(release).encode_add(EngineCoreRequest([1, 2], priority=-7), "x")
    assert release_judge.decode("add", [bytes(payload)])["priority"] == -7


FORMS = [
    StructuredOutputs(json={"type": "object"}),
    StructuredOutputs(regex="a+"),
    StructuredOutputs(choice=["yes", "no"]),
    StructuredOutputs(grammar="root ::= 'a'"),
    StructuredOutputs(json_object=True),
    StructuredOutputs(structural_tag="{}"),
]


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_the_form_of_an_output_is_read_with_its_backend(
    release_judge: ReleaseJudge, release: str, form: StructuredOutputs
) -> None:
    protocol = VllmProtocol(version=release, structured_outputs="guidance", trust_grammars=True)
    session = protocol.session([RankInfo(0, data_parallel_size=1, max_model_len=512)])
    params = SamplingParams(structured_outputs=form)
    [_, payload] = session.encode_add(EngineCoreRequest([1], params), "a")
    sampling = release_judge.decode("add", [bytes(payload)])["sampling_params"]
    read = sampling.get("structured_outputs") or sampling["guided_decoding"]
    assert read.get("_backend", read.get("backend")) == "guidance"
    name = next(each for each in ("regex", "grammar", "json_object", "structural_tag", "choice", "json") if read[each])
    given = getattr(form, name)
    assert read[name] == (json.dumps(given) if name == "json" else given)


def test_another_layout_is_refused_so_this_test_could_fail(release_judge: ReleaseJudge, release: str) -> None:
    other = "0.33.0" if tuple(map(int, release.split("."))) < (0, 17, 0) else "0.16.0"
    _, payload = session_of(other).encode_add(EngineCoreRequest([1, 2], SamplingParams(eos_token_id=3)), "x")
    with pytest.raises(Refused):
        release_judge.decode("add", [bytes(payload)])


ROWS = st.fixed_dictionaries(
    {
        "request_id": st.text(max_size=5),
        "new_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=4),
        "finish_reason": st.sampled_from([None, 0, 1, 2]),
        "stop_reason": st.none() | st.integers(0, 9) | st.text(max_size=3),
        "num_cached_tokens": st.integers(0, 99),
    }
)


@given(st.lists(ROWS, max_size=3), st.none() | st.integers(0, 2**40), st.booleans())
@settings(max_examples=40, deadline=None)
def test_what_that_release_says_is_read(
    release_judge: ReleaseJudge, release: str, rows: list[dict[str, Any]], wave: int | None, utility: bool
) -> None:
    session = session_of(release)
    batch = session.decode(
        release_judge.encode("outputs", {"outputs": rows, "wave_complete": wave, "utility": utility})
    )
    assert not batch.damage
    assert (batch.wave_done, batch.utility is not None) == (wave, utility)
    assert len(batch.outputs) == len(rows)
    for row, (wire_id, last, raw) in zip(rows, batch.outputs, strict=True):
        output = session.merge("mine", 0, [raw])
        assert wire_id == row["request_id"]
        assert list(output.token_ids) == row["new_token_ids"]
        assert last is (row["finish_reason"] is not None)
        reason = row["finish_reason"]
        assert output.finish_reason is (None if reason is None else [*FinishReason][reason])
        assert output.stop_reason == (None if reason is None else row["stop_reason"])
        if tuple(map(int, release.split("."))) < (0, 20, 0):
            assert output.cached_tokens == row["num_cached_tokens"]
