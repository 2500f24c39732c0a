"""What we send, read by vLLM's own classes field by field; what they write, read by ours. No engine runs for this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interop.environment import DEFAULT_VERSION
from interop.judge import Judge, Refused
from lockstep_trio import EngineCoreRequest, FinishReason, RequestOutput, RequestRejected, SamplingParams, VllmProtocol
from lockstep_trio.engines.protocol import Batch, LoadReport, RankEndpoints, RankInfo, UtilityReply
from lockstep_trio.engines.vllm import RepetitionDetection, VllmSession
from poison import naive
from poison.catalogue import PARTS, POISONS, Harm
from poison.valid import requests as valid_requests

pytestmark = pytest.mark.vllm

MAX_MODEL_LEN = 512
INFOS = [
    RankInfo(rank, DEFAULT_VERSION, data_parallel_size=2, config_hash="same", max_model_len=MAX_MODEL_LEN)
    for rank in (0, 1)
]
SESSION: VllmSession = VllmProtocol(vocab_size=256).session(INFOS)
ADD, ABORT, START_DP_WAVE, UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"

UNTOUCHED = {
    "mm_features": None,
    "pooling_params": None,
    "lora_request": None,
    "prompt_embeds": None,
    "prompt_is_token_ids": None,
    "client_index": 0,
    "current_wave": 0,
    "trace_headers": None,
    "resumable": False,
    "external_req_id": None,
    "reasoning_ended": None,
    "abort_immediately": False,
    "data_parallel_rank": None,
}
"""Fields of the engine's request that we never set: what it must read there. The rank is told by the socket."""

PRESENT: dict[str, Any] = {
    "structured_outputs": None,
    "stop": [],
    "bad_words": [],
    "stream_interval": None,
    "_watermarking_skipped": False,
}
"""Some of the engine's sampling fields that have no counterpart here, likewise."""


def read(judge: Judge, kind: str, type_: bytes, message: tuple[bytes | memoryview, ...]) -> Any:
    """Our message as the engine reads it."""
    first, *frames = message
    assert first == type_
    return judge.decode(kind, [bytes(frame) for frame in frames])


def sampling_as_read(params: SamplingParams) -> dict[str, Any]:
    """The fields that the engine must have for these parameters, under its own names."""
    expected = {**PRESENT, **attrs.asdict(params)}
    eos = expected.pop("eos_token_id")
    expected["_eos_token_id"] = None if params.ignore_eos else eos
    expected["stop_token_ids"] = list(params.stop_token_ids)
    expected["_all_stop_token_ids"] = sorted({*params.stop_token_ids, *([] if eos is None else [eos])})
    expected["_bad_words_token_ids"] = expected.pop("bad_words_token_ids")
    if params.logit_bias is not None:  # the judge's answer is JSON, whose keys are strings
        expected["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.skip_reading_prefix_cache is None:
        asked = (params.prompt_logprobs, params.prompt_logprob_token_ids)
        expected["skip_reading_prefix_cache"] = asked != (None, None)
    return expected


def difference(read: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    absent = object()
    pairs = {name: (read.get(name, absent), value) for name, value in expected.items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


EVERYTHING = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=-1.5,
    frequency_penalty=1.5,
    repetition_penalty=1.1,
    seed=-(2**63),
    max_tokens=100,
    min_tokens=5,
    stop_token_ids=[7, 9],
    eos_token_id=2,
    ignore_eos=False,
    logprobs=5,
    prompt_logprobs=0,
    logit_bias={3: -100.0, 250: 2.5},
    allowed_token_ids=[1, 2, 3, 250],
    bad_words_token_ids=[[4], [5, 6]],
    prompt_logprob_token_ids=[[1, 255, -1], [2, 0, 3]],
    repetition_detection=RepetitionDetection(max_pattern_size=9, min_pattern_size=2, min_count=3),
    thinking_token_budget=50,
    skip_reading_prefix_cache=True,
    watermarking=False,
    routed_experts_prompt_start=2,
    extra_args={"kv_transfer_params": {"remote_block_ids": [1, 2]}, "mine": [None, {"a": 0.5}]},
)

SAMPLINGS = {
    "the defaults": SamplingParams(),
    "greedy": SamplingParams(temperature=0.0),
    "everything": EVERYTHING,
    **{
        f"{field.name} alone": SamplingParams(**{field.name: value})
        for field in attrs.fields(SamplingParams)
        if (value := getattr(EVERYTHING, field.name)) != field.default
    },
    "scores of given tokens": SamplingParams(logprob_token_ids=[5, 0, 255]),
    "scores of the prompt from the second token on": SamplingParams(
        prompt_logprob_token_ids=[[7]], prompt_logprob_start=1
    ),
    "a long table": SamplingParams(prompt_logprob_token_ids=[[*range(20)], [*range(236, 256)]]),
    "the cache is read": SamplingParams(skip_reading_prefix_cache=False),
    "a watermark": SamplingParams(watermarking=True),
    "a trace": SamplingParams(trace_decode_token_ids=[5, 5, 255], ignore_eos=True),
    "extra arguments, but none": SamplingParams(extra_args={}),
    "an end of sequence that is ignored": SamplingParams(eos_token_id=2, ignore_eos=True, stop_token_ids=[9]),
}


def test_the_judge_is_the_release_that_the_tests_are_written_for(judge: Judge) -> None:
    assert judge.version() == DEFAULT_VERSION


def test_every_field_is_sent_at_least_once() -> None:
    sent = [attrs.asdict(params, recurse=False) for params in SAMPLINGS.values()]
    unsent = [name for name, value in sent[0].items() if all(each[name] == value for each in sent)]
    assert unsent == ["structured_outputs", "n"]  # the one is tried with engines, the other cannot be anything else


@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_an_add_says_to_the_engine_what_the_caller_meant(judge: Judge, params: SamplingParams) -> None:
    request = EngineCoreRequest([1, 2, 255], params, arrival_time=12.5, data_parallel_rank=1)
    value = read(judge, "add", ADD, SESSION.encode_add(request, "mine#1f"))
    sampling = value.pop("sampling_params")
    told = {"request_id": "mine#1f", "prompt_token_ids": [1, 2, 255], "arrival_time": 12.5}
    assert difference(value, {**UNTOUCHED, **told, "priority": 0, "cache_salt": None}) == {}
    assert difference(sampling, sampling_as_read(params)) == {}


def test_an_add_with_all_that_is_not_sampling(judge: Judge) -> None:
    prompt = [number % 256 for number in range(MAX_MODEL_LEN - 1)]
    request = EngineCoreRequest(prompt, priority=-(2**63), cache_salt="größer", arrival_time=-1.0)
    value = read(judge, "add", ADD, SESSION.encode_add(request, "x" * 256))
    told = {"request_id": "x" * 256, "prompt_token_ids": prompt, "arrival_time": -1.0}
    assert difference(value, {**UNTOUCHED, **told, "priority": -(2**63), "cache_salt": "größer"}) == {}


def test_an_abort_is_a_list_of_ids(judge: Judge) -> None:
    assert read(judge, "abort", ABORT, SESSION.encode_abort(("a#1", "b#2"))) == ["a#1", "b#2"]


@pytest.mark.parametrize("exclude", [None, 0, 1])
def test_a_start_is_a_wave_and_whom_to_leave_out(judge: Judge, exclude: int | None) -> None:
    assert read(judge, "start_wave", START_DP_WAVE, SESSION.encode_start(0, exclude)) == [0, exclude]


def test_a_utility_call_is_client_number_method_and_arguments(judge: Judge) -> None:
    frames = SESSION.encode_utility(2**63, "sleep", (1, "wait", None, [1.5, {"a": b"\x00"}]))
    assert read(judge, "utility", UTILITY, frames)[:3] == [0, 2**63, "sleep"]
    frames = SESSION.encode_utility(7, "pause_scheduler", ("keep", True))
    assert read(judge, "utility", UTILITY, frames) == [0, 7, "pause_scheduler", ["keep", True]]


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-(2**63), 2**63 - 1, 2**63, 2**31 - 1, 2**31, 255, 256, -1, 0, 1]),
    st.floats(),
    st.floats(-2, 2),
    st.sampled_from([0.0, -0.0, 5e-324, 1e-5, 1.0, 1.0000000000000002, 2.0, -2.0]),
    st.lists(st.integers(-1, 256), max_size=4),
    st.dictionaries(st.integers(-1, 256), st.floats(-101, 101), max_size=3),
    st.lists(st.lists(st.integers(-1, 256), max_size=3), max_size=3),
    st.text(max_size=3),
)
"""For every field of the sampling parameters, right or wrong."""


@given(st.dictionaries(st.sampled_from([field.name for field in attrs.fields(SamplingParams)]), anything, max_size=5))
@settings(max_examples=500)
def test_whatever_is_not_refused_here_is_not_refused_by_the_engine(judge: Judge, fields: dict[str, Any]) -> None:
    try:
        frames = SESSION.encode_add(EngineCoreRequest([1, 2, 3], SamplingParams(**fields)), "a#1")
    except RequestRejected:
        return
    read(judge, "add", ADD, frames)


@given(valid_requests())
@settings(max_examples=300)
def test_what_is_valid_reaches_the_engines_own_classes(judge: Judge, request_: EngineCoreRequest) -> None:
    value = read(judge, "add", ADD, SESSION.encode_add(request_, "a#1"))
    told = {"prompt_token_ids": list(request_.prompt_token_ids), "priority": request_.priority}
    assert difference(value, {**told, "cache_salt": request_.cache_salt, "arrival_time": request_.arrival_time}) == {}


@pytest.mark.parametrize("part", PARTS)
def test_the_decoder_refuses_those_poisons_that_are_said_to_make_an_engine_deaf(judge: Judge, part: str) -> None:
    for poison in POISONS:
        if poison.part != part:
            continue
        if poison.harm is Harm.UNSENDABLE:
            if isinstance(poison.request, EngineCoreRequest) and part != "data_parallel_rank":
                with pytest.raises((TypeError, ValueError, OverflowError)):
                    naive.add(poison.request)
            continue
        try:
            judge.decode("add", [naive.add(poison.request)])
        except Refused:
            deaf = True
        else:
            deaf = False
        assert deaf is (poison.harm is Harm.DEAF), poison.name


def test_the_judge_refuses_what_would_kill_an_engine(judge: Judge) -> None:
    with pytest.raises(Refused, match="temperature"):
        judge.decode("add", [msgpack.packb(["a", [1], None, {"temperature": -1.0}, None, 0.0, None, None, None])])


def test_the_engines_init_and_our_registration_are_of_one_mind(judge: Judge) -> None:
    endpoints = [RankEndpoints(f"ipc:///in{rank}", f"ipc:///out{rank}") for rank in (0, 1)]
    handshake = VllmProtocol().handshake(endpoints)
    for rank in (0, 1):
        identity = rank.to_bytes(2, "little")
        init = handshake.receive(identity, [msgpack.packb({"status": "HELLO", "local": True, "headless": True})])
        assert init is not None
        assert judge.decode("init", init.frames) == {
            "addresses": {
                "inputs": [f"ipc:///in{rank}"],
                "outputs": [f"ipc:///out{rank}"],
                "coordinator_input": None,
                "coordinator_output": None,
                "frontend_stats_publish_address": None,
            },
            "parallel_config": {},
        }
        ready = {"status": "READY", "local": True, "headless": True, "parallel_config_hash": "same"}
        assert handshake.receive(identity, [msgpack.packb(ready)]) is None
        handshake.registered(rank, judge.encode("registration", REGISTRATION | {"data_parallel_rank": rank}))
    assert handshake.complete
    assert [attrs.evolve(info, raw={}) for info in handshake.infos()] == INFOS


REGISTRATION = {
    "max_model_len": MAX_MODEL_LEN,
    "num_gpu_blocks": 8192,
    "block_size": 128,
    "dp_stats_address": None,
    "dtype": "float32",
    "vllm_version": DEFAULT_VERSION,
    "world_size": 1,
    "data_parallel_size": 2,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "instance_id": "abcde",
    "supports_lora": False,
    "max_loras": 0,
}

STATS = {"num_running_reqs": 3, "num_waiting_reqs": 2, "kv_cache_usage": 0.25}
IDLE_STATS = {"num_running_reqs": 0, "num_waiting_reqs": 0, "kv_cache_usage": 0.0}

# EngineCoreOutputs by name, and what we make of it (but for its outputs: see below).
WRITTEN: dict[str, tuple[dict[str, Any], Batch]] = {
    "nothing": ({}, Batch()),
    "stats alone": ({"scheduler_stats": STATS}, Batch(load=LoadReport(waiting=2, running=3, kv_usage=0.25))),
    "stats of an idle rank": ({"scheduler_stats": IDLE_STATS}, Batch(load=LoadReport(0, 0, 0.0))),
    "wave 0 is complete": ({"wave_complete": 0}, Batch(wave_done=0)),
    "a late wave is complete": ({"engine_index": 1, "wave_complete": 2**40}, Batch(wave_done=2**40)),
    "wave 0 is asked for": ({"start_wave": 0}, Batch(wave_asked=0)),
    "an answer": (
        {"utility_output": {"call_id": 7, "result": {"result": False}}},
        Batch(utility=UtilityReply(7, None, False)),
    ),
    "a list for an answer": (
        {"utility_output": {"call_id": 7, "result": {"result": ["generate"]}}},
        Batch(utility=UtilityReply(7, None, ("generate",))),
    ),
    "no answer to speak of": (
        {"utility_output": {"call_id": 7, "result": {"result": None}}},
        Batch(utility=UtilityReply(7, None, None)),
    ),
    "a refusal": (
        {"utility_output": {"call_id": 7, "failure_message": "no such method"}},
        Batch(utility=UtilityReply(7, "no such method", None)),
    ),
    "everything at once": (
        {"scheduler_stats": STATS, "utility_output": {"call_id": 1, "failure_message": "x"}, "wave_complete": 3},
        Batch(utility=UtilityReply(1, "x", None), wave_done=3, load=LoadReport(2, 3, 0.25)),
    ),
}


@pytest.mark.parametrize(("fields", "expected"), WRITTEN.values(), ids=WRITTEN.keys())
def test_what_the_engine_writes_is_read_as_it_meant_it(judge: Judge, fields: dict[str, Any], expected: Batch) -> None:
    assert SESSION.decode(judge.encode("outputs", fields)) == expected


# EngineCoreOutput by name, and what the caller gets.
OUTPUTS: dict[str, tuple[dict[str, Any], RequestOutput]] = {
    "a token": ({"new_token_ids": [24]}, RequestOutput("mine", 0, (24,))),
    "a first token after a cached prefix": (
        {"new_token_ids": [24], "prefill_stats": {"num_prompt_tokens": 9, "num_cached_tokens": 4}},
        RequestOutput("mine", 0, (24,)),
    ),
    "a first token with a trace": (
        {"new_token_ids": [24], "trace_headers": {"traceparent": "00-1"}, "prefill_stats": {"num_cached_tokens": 0}},
        RequestOutput("mine", 0, (24,)),
    ),
    "the end at a stop token": (
        {"new_token_ids": [5, 7], "finish_reason": 0, "stop_reason": 7},
        RequestOutput("mine", 0, (5, 7), FinishReason.STOP, 7),
    ),
    "the end at the end of sequence": (
        {"new_token_ids": [2], "finish_reason": 0},
        RequestOutput("mine", 0, (2,), FinishReason.STOP),
    ),
    "the end by length": (
        {"new_token_ids": [3], "finish_reason": 1},
        RequestOutput("mine", 0, (3,), FinishReason.LENGTH),
    ),
    "the end by abort": ({"new_token_ids": [], "finish_reason": 2}, RequestOutput("mine", 0, (), FinishReason.ABORT)),
    "the end by error": ({"new_token_ids": [], "finish_reason": 3}, RequestOutput("mine", 0, (), FinishReason.ERROR)),
    "the end by repetition": (
        {"new_token_ids": [1], "finish_reason": 4, "stop_reason": "repetition_detected"},
        RequestOutput("mine", 0, (1,), FinishReason.REPETITION, "repetition_detected"),
    ),
}


@pytest.mark.parametrize(("fields", "expected"), OUTPUTS.values(), ids=OUTPUTS.keys())
def test_an_output_reaches_the_caller_as_the_engine_meant_it(
    judge: Judge, fields: dict[str, Any], expected: RequestOutput
) -> None:
    batch = SESSION.decode(judge.encode("outputs", {"outputs": [{"request_id": "mine#1", **fields}]}))
    [(wire_id, last, raw)] = batch.outputs
    assert batch.damage == ()
    assert wire_id == "mine#1"
    assert last is expected.finished
    assert attrs.evolve(SESSION.merge("mine", 0, [raw]), raw=()) == expected


def test_the_outputs_of_several_requests_keep_their_order(judge: Judge) -> None:
    outputs = [{"request_id": name, "new_token_ids": [number]} for number, name in enumerate("cab")]
    batch = SESSION.decode(judge.encode("outputs", {"outputs": outputs, "scheduler_stats": STATS}))
    assert [(wire_id, SESSION.merge("x", 0, [raw]).token_ids) for wire_id, _, raw in batch.outputs] == [
        ("c", (0,)),
        ("a", (1,)),
        ("b", (2,)),
    ]
    assert batch.load == LoadReport(2, 3, 0.25)
