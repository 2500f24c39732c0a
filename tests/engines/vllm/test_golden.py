"""What vLLM's own classes wrote (tests/data/wire/vllm/README.md): how we read it, and what we send instead."""

from __future__ import annotations

import json
from pathlib import Path

import msgpack
import pytest

from lockstep_trio.engines.protocol import Batch, LoadReport, RankEndpoints, RankInfo, UtilityReply
from lockstep_trio.engines.vllm import (
    EngineCoreRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
    VllmProtocol,
    VllmSession,
)

DATA = Path(__file__).parents[2] / "data" / "wire" / "vllm"
GOLDEN: dict[str, dict[str, list[str]]] = {
    path.parent.name: json.loads(path.read_text())["frames"] for path in sorted(DATA.glob("*/golden.json"))
}


class Golden:
    def __init__(self, version: str) -> None:
        self.version = version
        self.session: VllmSession = VllmProtocol(vocab_size=256).session([RankInfo(0, version=version)])

    def frames(self, name: str) -> list[bytes]:
        return [bytes.fromhex(frame) for frame in GOLDEN[self.version][name]]

    def batch(self, name: str) -> Batch:
        return self.session.decode(self.frames(name))

    def outputs(self, name: str) -> list[RequestOutput]:
        return [self.session.merge(wire_id, 0, [raw]) for wire_id, _, raw in self.batch(name).outputs]


@pytest.fixture(params=GOLDEN)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def test_there_are_golden_frames() -> None:
    assert GOLDEN


def test_a_step_with_two_outputs_and_the_load(golden: Golden) -> None:
    batch = golden.batch("a step with two outputs")
    assert [(wire_id, last) for wire_id, last, _ in batch.outputs] == [("wire-1", False), ("wire-2", True)]
    assert batch.load == LoadReport(waiting=2, running=3, kv_usage=0.25)
    assert (batch.wave_done, batch.wave_asked, batch.utility, batch.damage) == (None, None, None, ())
    first, second = golden.outputs("a step with two outputs")
    assert (first.token_ids, first.cached_tokens, first.finish_reason) == ((24,), 4, None)
    assert (second.token_ids, second.cached_tokens, second.finish_reason) == ((125, 7), None, FinishReason.STOP)
    assert second.stop_reason == 7


@pytest.mark.parametrize("reason", [reason for reason in FinishReason if reason is not FinishReason.STOP])
def test_every_end_is_seen_for_what_it_is(golden: Golden, reason: FinishReason) -> None:
    (output,) = golden.outputs(f"the end by {reason.value}")
    assert output.finish_reason is reason
    assert output.stop_reason == ("repetition_detected" if reason is FinishReason.REPETITION else None)


@pytest.mark.parametrize("name", ["few logprobs, in line", "many logprobs, in frames of their own"])
def test_logprobs_do_not_get_in_the_way_of_tokens(golden: Golden, name: str) -> None:
    assert golden.batch(name).damage == ()
    assert golden.outputs(name)[0].token_ids == (3,)


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("stats alone", Batch(load=LoadReport(waiting=2, running=3, kv_usage=0.25))),
        ("wave 0 is complete", Batch(wave_done=0)),
        ("wave 3 is asked for", Batch(wave_asked=3)),
        ("an answer", Batch(utility=UtilityReply(78, None, False))),
        ("an answer with a list", Batch(utility=UtilityReply(77, None, ("generate",)))),
        ("an answer of nothing", Batch(utility=UtilityReply(76, None, None))),
        ("a failed call", Batch(utility=UtilityReply(75, "Call to x method failed: no", None))),
        ("the notice of death", Batch(dead=True)),
    ],
)
def test_the_other_messages_are_what_they_are(golden: Golden, name: str, batch: Batch) -> None:
    assert golden.batch(name) == batch


def test_the_handshake_takes_the_engines_own_messages(golden: Golden) -> None:
    handshake = VllmProtocol().handshake([RankEndpoints("in", "out")] * 2)
    assert handshake.receive(b"\1\0", golden.frames("a HELLO")) is not None
    handshake.registered(1, golden.frames("a registration"))
    assert handshake.receive(b"\1\0", golden.frames("a READY")) is None
    assert handshake.stages == {0: "not heard of yet", 1: "up"}


def test_the_registration_tells_what_is_needed(golden: Golden) -> None:
    handshake = VllmProtocol().handshake([RankEndpoints("in", "out")])
    handshake.receive(b"\0\0", golden.frames("a HELLO"))
    handshake.receive(b"\0\0", golden.frames("a READY"))
    told = msgpack.unpackb(golden.frames("a registration")[0])
    handshake.registered(0, [msgpack.packb({**told, "data_parallel_rank": 0})])
    (info,) = handshake.infos()
    assert (info.version, info.data_parallel_size, info.max_model_len) == (golden.version, 2, 512)


# What our ADD holds in place of each of theirs; the engine fills what is left out with the same defaults.
ADDS = {
    "an ADD with the defaults": EngineCoreRequest([1, 2, 3], arrival_time=1.5),
    "an ADD with an end of sequence": EngineCoreRequest(
        [1, 2, 3],
        SamplingParams(temperature=0.0, max_tokens=5, min_tokens=2, stop_token_ids=[7], eos_token_id=2),
        arrival_time=1.5,
    ),
    "an ADD that ignores it": EngineCoreRequest(
        [1, 2, 3],
        SamplingParams(ignore_eos=True, seed=5, logit_bias={1: 2.5}, allowed_token_ids=[1, 2], eos_token_id=2),
        cache_salt="salt",
        arrival_time=1.5,
    ),
    "an ADD with a priority": EngineCoreRequest([1, 2, 3], priority=-7, arrival_time=1.5),
}
COMPUTED = {"stop", "stop_token_ids", "bad_words", "skip_reading_prefix_cache", "max_tokens"}
"""Keys that the engine fills in while it decodes, so that it makes no difference who sends them."""


@pytest.mark.parametrize(("name", "request_"), ADDS.items(), ids=ADDS)
def test_our_add_says_what_theirs_does(golden: Golden, name: str, request_: EngineCoreRequest) -> None:
    theirs = msgpack.unpackb(golden.frames(name)[0], strict_map_key=False)
    ours = msgpack.unpackb(golden.session.encode_add(request_, "wire-1")[1], strict_map_key=False)
    sent, expected = ours.pop(3), theirs.pop(3)
    assert ours == theirs[: len(ours)]
    for each in (sent, expected):
        each["_all_stop_token_ids"] = sorted(each.get("_all_stop_token_ids", []))
    different = {key for key in {*sent, *expected} if sent.get(key) != expected.get(key)}
    assert different <= COMPUTED


def test_the_other_requests_are_the_same_bytes(golden: Golden) -> None:
    session = golden.session
    assert session.encode_abort(["wire-1", "wire-2"])[1] == golden.frames("an ABORT")[0]
    assert session.encode_start(3, None)[1] == golden.frames("a START")[0]
    assert session.encode_utility(78, "is_sleeping", ())[1] == golden.frames("a UTILITY call")[0]
