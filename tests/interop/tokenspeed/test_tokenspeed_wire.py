"""What we send, read by TokenSpeed's own classes field by field; what they write, read by ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interop.judge import Refused
from interop.tokenspeed.environment import VERSION
from interop.tokenspeed.judge import VOCABULARY, TokenSpeedJudge
from lockstep_trio import (
    FinishReason,
    RequestRejected,
    TokenSpeedOutput,
    TokenSpeedProtocol,
    TokenSpeedRequest,
    TokenSpeedSampling,
)
from lockstep_trio.engines.protocol import Batch, LoadReport, RankEndpoints, RankInfo
from lockstep_trio.engines.tokenspeed import TokenSpeedSession

pytestmark = pytest.mark.tokenspeed

CONTEXT = 512
SESSION: TokenSpeedSession = TokenSpeedProtocol(vocab_size=VOCABULARY, output_logprobs=True).session(
    [RankInfo(0, VERSION, max_model_len=CONTEXT)]
)

UNTOUCHED: dict[str, Any] = {
    "http_worker_ipc": None,
    "input_text": None,
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
    "input_embeds": None,
    "session_params": None,
    "custom_logit_processor": None,
    "return_hidden_states": False,
    "created_time": 0.0,
    "bootstrap_host": None,
    "bootstrap_port": None,
    "bootstrap_room": None,
    "input_multi_ids": None,
    "input_extra_infos": None,
    "input_ids_unpadded": None,
    "multimodal_inputs": None,
    "validation_error": None,
    "data_parallel_rank": None,
}
"""Fields of the engine's request that we never set: what it must read there. The rank is told by the socket."""

UNTOUCHED_SAMPLING: dict[str, Any] = {
    "stop": None,
    "stop_strs": [],
    "stop_str_max_len": 0,
    "min_new_tokens": 0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "thinking_budget": None,
    "custom_params": None,
    "logprobs": None,
    "is_normalized": True,
}
OFF = 1 << 30
"""What the engine makes of ``top_k`` -1."""


def read(judge: TokenSpeedJudge, request: TokenSpeedRequest, wire_id: str = "w#1") -> dict[str, Any]:
    [value] = judge.decode("request", [bytes(frame) for frame in SESSION.encode_add(request, wire_id)])
    assert isinstance(value, dict)
    return value


def as_read(params: TokenSpeedSampling) -> dict[str, Any]:
    """The sampling that the engine must have for these, but for a seed that it makes up."""
    expected = {**UNTOUCHED_SAMPLING, **attrs.asdict(params)}
    expected["stop_token_ids"] = sorted(set(params.stop_token_ids)) or None
    expected["logit_bias"] = {str(token): bias for token, bias in (params.logit_bias or {}).items()} or None
    if params.temperature < 1e-6:
        expected |= {"temperature": 1.0, "top_k": 1}
    if expected["top_k"] == 1:
        expected["seed"] = 0  # the engine's own rule from 0.1.1 on; normalised by us it would not apply
    if expected["top_k"] == -1:
        expected["top_k"] = OFF
    return expected


def difference(read: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    absent = object()
    pairs = {name: (read.get(name, absent), value) for name, value in expected.items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


token = st.integers(0, VOCABULARY - 1)
WHATEVER: dict[str, st.SearchStrategy[Any]] = {
    "max_new_tokens": st.none() | st.integers(1, 2**31 - 1),
    "stop_token_ids": st.lists(token, max_size=5),
    "temperature": st.sampled_from([0.0, 1e-7, 1e-6, 1.0, 2]) | st.floats(0, 1e300),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.sampled_from([-1, 1, 127]) | st.integers(1, 127),
    "min_p": st.floats(0, 1),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.integers(-2, 2),
    "repetition_penalty": st.floats(0, 2, exclude_min=True),
    "ignore_eos": st.booleans(),
    "stream_interval": st.none() | st.integers(1, 1000),
    "logit_bias": st.none() | st.dictionaries(token, st.floats(-100, 100), max_size=4),
    "seed": st.none() | st.integers(0, 2**63 - 1),
}
CONSTRAINTS = st.sampled_from([{}, {"json_schema": "{}"}, {"regex": "a+"}, {"ebnf": "root"}, {"structural_tag": "{}"}])


@st.composite
def requests(draw: st.DrawFn) -> TokenSpeedRequest:
    fields = draw(st.fixed_dictionaries({}, optional=WHATEVER))
    return TokenSpeedRequest(
        draw(st.lists(token, min_size=1, max_size=30)),
        TokenSpeedSampling(**fields, **draw(CONSTRAINTS)),
        stream=draw(st.booleans()),
        return_logprob=draw(st.booleans()),
    )


@given(requests())
@settings(max_examples=500)
def test_what_is_admitted_reaches_the_engine_field_by_field_and_is_not_marked_for_an_abort(
    judge: TokenSpeedJudge, request_: TokenSpeedRequest
) -> None:
    value = read(judge, request_)
    sampling = value.pop("sampling_params")
    expected = as_read(request_.sampling)
    if expected["seed"] is None:
        expected["seed"] = sampling["seed"]
        assert isinstance(sampling["seed"], int)
    assert difference(sampling, expected) == {}
    assert sampling.keys() == expected.keys()
    told = {
        **UNTOUCHED,
        "rid": "w#1",
        "input_ids": list(request_.prompt_token_ids),
        "stream": request_.stream,
        "return_logprob": request_.return_logprob,
        # It resolves -1, "output only", to the last token of the prompt.
        "logprob_start_len": len(request_.prompt_token_ids) - 1 if request_.return_logprob else -1,
    }
    assert difference(value, told) == {}
    assert value.keys() == told.keys()


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([-(2**63), 2**63 - 1, 2**63, 2**31 - 1, 2**31, 128, 127, -1, 0, 1]),
    st.floats(),
    st.floats(-2, 2),
    st.lists(st.integers(-1, 256), max_size=4),
    st.dictionaries(st.integers(-1, 256), st.floats(-101, 101), max_size=3),
    st.text(max_size=3),
)
"""For every field of the sampling parameters, right or wrong."""


@given(
    st.dictionaries(st.sampled_from([field.name for field in attrs.fields(TokenSpeedSampling)]), anything, max_size=5)
)
@settings(max_examples=1000)
def test_whatever_is_not_refused_here_is_neither_dropped_nor_aborted_by_the_engine(
    judge: TokenSpeedJudge, fields: dict[str, Any]
) -> None:
    request = TokenSpeedRequest([1, 2, 3], TokenSpeedSampling(**fields))
    try:
        SESSION.encode_add(request, "w#1")
    except RequestRejected:
        return
    assert read(judge, request)["validation_error"] is None


# What a naive client would send, by what the engine does: the reason for a rule here.
def naive(sampling: list[Any] | None = None, **fields: Any) -> list[bytes]:
    request: dict[str, Any] = {"tag": "TokenizedGenerateReqInput", "rid": "w", "worker": None, "text": None}
    request |= {"input_ids": [1, 2, 3], "sampling": [5] if sampling is None else sampling, **fields}
    return [b"\x00", msgpack.packb(list(request.values()))]


SILENT = {
    "another tag": naive(tag="GenerateReqInput"),
    "less than six elements": [b"\x00", msgpack.packb(["TokenizedGenerateReqInput", "w", None, None, [1]])],
    "an id that is no text": naive(rid=7),
    "no id": naive(rid=None),
    "integer keys in logit_bias": naive([5, *[None] * 2, 1.0, 1.0, -1, *[0.0] * 3, 1.0, 0, *[None] * 4, False, True,
                                         True, False, None, None, None, {3: 1.0}]),
    "a temperature that is text": naive([5, None, None, "1"]),
    "no sampling": [b"\x00", msgpack.packb(["TokenizedGenerateReqInput", "w", None, None, [1], None])],
}  # fmt: skip
ABORTED = {
    "top_k of 128": naive([5, None, None, 1.0, 1.0, 128]),
    "top_p of 0": naive([5, None, None, 1.0, 0.0]),
    "top logprobs": naive(return_logprob=True, start=-1, top=2),
    "prompt logprobs": naive(return_logprob=True, start=0),
    "two constraints": naive([5, None, None, 1.0, 1.0, -1, 0.0, 0.0, 0.0, 1.0, 0, "{}", "a"]),
}
TAKEN = {  # and what becomes of these is not the wire's: the scheduler's loop raises, or the model computes nonsense
    "no prompt": naive(input_ids=None),
    "an empty prompt": naive(input_ids=[]),
    "a prompt beyond the vocabulary": naive(input_ids=[VOCABULARY]),
    "a temperature that is not a number": naive([5, None, None, float("nan")]),
    "a negative temperature": naive([5, None, None, -1.0]),
    "an interval of nought": naive([5, *[None] * 2, 1.0, 1.0, -1, *[0.0] * 3, 1.0, 0, *[None] * 4, False, True,
                                    True, False, None, None, 0]),
}  # fmt: skip


@pytest.mark.parametrize("frames", SILENT.values(), ids=SILENT)
def test_the_engine_says_nothing_to_these(judge: TokenSpeedJudge, frames: list[bytes]) -> None:
    with pytest.raises(Refused, match="Dropped"):
        judge.decode("request", frames)


@pytest.mark.parametrize("frames", ABORTED.values(), ids=ABORTED)
def test_the_engine_aborts_these(judge: TokenSpeedJudge, frames: list[bytes]) -> None:
    [value] = judge.decode("request", frames)
    assert value["validation_error"]


@pytest.mark.parametrize("frames", TAKEN.values(), ids=TAKEN)
def test_the_engines_wire_lets_these_through(judge: TokenSpeedJudge, frames: list[bytes]) -> None:
    [value] = judge.decode("request", frames)
    assert value["validation_error"] is None


def test_an_abort_is_one_for_each_of_its_ids(judge: TokenSpeedJudge) -> None:
    frames = [bytes(frame) for frame in SESSION.encode_abort(["a#1", "b#2"])]
    assert [value["rid"] for value in judge.decode("request", frames)] == ["a#1", "b#2"]


def test_the_engines_conversation_and_ours_are_of_one_mind(judge: TokenSpeedJudge) -> None:
    handshake = TokenSpeedProtocol().handshake(
        [RankEndpoints(f"ipc:///in{rank}", f"ipc:///out{rank}") for rank in (0, 1)]
    )
    for rank in (0, 1):
        status = {"local": True, "headless": True}
        init = handshake.receive(rank.to_bytes(2, "little"), judge.encode("status", {"status": "HELLO", **status}))
        assert init is not None
        addresses = judge.decode("init", init.frames)["addresses"]
        assert (addresses["inputs"], addresses["outputs"]) == ([f"ipc:///in{rank}"], [f"ipc:///out{rank}"])
        handshake.receive(rank.to_bytes(2, "little"), judge.encode("status", {"status": "READY", **status}))
        told = {"max_model_len": CONTEXT, "prefix_granularity": 64, "vllm_version": f"tokenspeed-{VERSION}"}
        told |= {"data_parallel_size": 2, "data_parallel_rank": rank, "kv_cache_size_tokens": 100_000}
        handshake.registered(rank, judge.encode("registration", told))
    assert handshake.complete
    for info in handshake.infos():
        assert (info.version, info.max_model_len, info.data_parallel_size, info.block_size) == (VERSION, CONTEXT, 2, 64)
    assert not TokenSpeedProtocol().session(handshake.infos()).lockstep


# -- what they write -----------------------------------------------------------------------------------------------

counts = st.integers(0, 2**31)
rows = st.lists(
    st.fixed_dictionaries(
        {
            "output_ids": st.lists(token, max_size=5),
            "finished_reasons": st.sampled_from(["", "stop", "length", "abort", "bored"]),
            "prompt_tokens": counts,
            "completion_tokens": counts,
            "cached_tokens": counts,
            "logprobs": st.booleans(),
        }
    ),
    max_size=6,
)
REASONS = {"": None, "stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@given(rows, st.tuples(counts, counts, st.integers(0, 50), st.integers(0, 100)), st.integers(0, 65_535), st.booleans())
@settings(max_examples=300)
def test_what_the_engine_writes_is_read_as_it_meant_it(
    judge: TokenSpeedJudge, made: list[dict[str, Any]], load: tuple[int, int, int, int], index: int, slim: bool
) -> None:
    """Through its sending socket, which makes the slim array itself, or as that array."""
    value: dict[str, Any] = {name: [row[name] for row in made] for name in made[0] if name != "logprobs"} if made else {
        name: [] for name in ("output_ids", "finished_reasons", "prompt_tokens", "completion_tokens", "cached_tokens")
    }  # fmt: skip
    value["rids"] = [f"w#{number}" for number in range(len(made))]
    probable = [row["output_ids"] if row["logprobs"] else [] for row in made]
    value |= {
        "output_token_logprobs_idx": probable,
        "output_token_logprobs_val": [[-0.5] * len(ids) for ids in probable],
    }
    if slim:
        names = ("num_running", "num_waiting", "kv_active_pages", "kv_total_pages")
        frames = judge.encode("slim", {**value, "engine_index": index, **dict(zip(names, load, strict=True))})
    else:
        reasons = [reason and {"type": reason} for reason in value["finished_reasons"]]
        frames = judge.encode("outputs", {**value, "finished_reasons": reasons, "engine_index": index, "load": load})
    batch = SESSION.decode(frames)
    assert (batch.unreadable, batch.nameless) == ((), 0)
    outputs = [(wire_id, last, SESSION.merge("mine", 3, [raw])) for wire_id, last, raw in batch.outputs]
    assert [wire_id for wire_id, _, _ in outputs] == value["rids"]
    for row, ids, (_, last, output) in zip(made, probable, outputs, strict=True):
        reason = REASONS.get(row["finished_reasons"], FinishReason.ERROR)
        assert last is (reason is not None)
        assert attrs.evolve(output, raw=()) == TokenSpeedOutput(
            "mine",
            3,
            tuple(row["output_ids"]),
            reason,
            row["prompt_tokens"],
            row["completion_tokens"],
            row["cached_tokens"],
            (-0.5,) * len(ids),
            tuple(ids),
        )
    running, waiting, active, total = load
    if total == 0 or active > total:
        assert batch.load is None
        assert bool(batch.damage) == (active > total)
    else:
        assert batch.load == LoadReport(waiting, max(0, running - waiting), active / total, while_idle=False)


def test_the_judge_speaks_for_the_release_that_these_tests_are_about(judge: TokenSpeedJudge) -> None:
    assert judge.version() == VERSION
    assert SESSION.decode([b"ENGINE_CORE_DEAD"]) == Batch(dead=True)
