"""What TokenSpeed's own classes wrote (tests/data/wire/tokenspeed/README.md): how we read it, and what we send."""

from __future__ import annotations

import json
from pathlib import Path

import msgpack
import pytest

from lockstep_trio.engines.protocol import Batch, LoadReport, RankEndpoints, RankInfo
from lockstep_trio.engines.tokenspeed import (
    FinishReason,
    TokenSpeedOutput,
    TokenSpeedProtocol,
    TokenSpeedRequest,
    TokenSpeedSampling,
    TokenSpeedSession,
)

DATA = Path(__file__).parents[2] / "data" / "wire" / "tokenspeed"
GOLDEN: dict[str, dict[str, list[str]]] = {
    path.parent.name: json.loads(path.read_text())["frames"] for path in sorted(DATA.glob("*/golden.json"))
}
NEW, OLD = "0.1.1", "f4d8ec6e"
SESSION: TokenSpeedSession = TokenSpeedProtocol(vocab_size=256).session([RankInfo(0, version="0.1.1")])


def frames(name: str, version: str = NEW) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in GOLDEN[version][name]]


def outputs(name: str, version: str = NEW) -> list[TokenSpeedOutput]:
    return [SESSION.merge(wire_id, 0, [raw]) for wire_id, _, raw in SESSION.decode(frames(name, version)).outputs]


def test_there_are_golden_frames_of_both_versions() -> None:
    assert set(GOLDEN) == {NEW, OLD}


def test_a_step_with_two_outputs_and_the_load() -> None:
    batch = SESSION.decode(frames("a step with two outputs"))
    assert [(wire_id, last) for wire_id, last, _ in batch.outputs] == [("wire-1", False), ("wire-2", True)]
    assert batch.load == LoadReport(waiting=1, running=2, kv_usage=0.25, while_idle=False)
    assert batch.damage == ()
    first, second = outputs("a step with two outputs")
    assert (first.token_ids, first.prompt_tokens, first.completion_tokens, first.cached_tokens) == ((24,), 9, 1, 4)
    assert (second.token_ids, second.finish_reason, second.completion_tokens) == ((125, 7), FinishReason.STOP, 5)


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.ABORT])
def test_every_end_is_seen_for_what_it_is(reason: FinishReason) -> None:
    (output,) = outputs(f"the end by {reason.value}")
    assert output.finish_reason is reason


def test_logprobs_come_with_their_tokens() -> None:
    (output,) = outputs("logprobs")
    assert output.logprobs == (-0.5, -0.25)
    assert output.logprob_token_ids == output.token_ids == (10, 11)


def test_the_older_engines_step_is_read_without_a_load() -> None:
    batch = SESSION.decode(frames("a step with logprobs", OLD))
    assert batch.load is None
    (output,) = outputs("a step with logprobs", OLD)
    assert (output.token_ids, output.logprobs) == ((10, 11), (-0.5, -0.25))
    assert (output.finish_reason, output.cached_tokens) == (FinishReason.LENGTH, 1)


def test_a_load_that_the_engine_has_not_looked_at_is_none_and_one_of_an_idle_rank_is_what_it_was() -> None:
    assert SESSION.decode(frames("before the load was looked at")).load is None
    load = SESSION.decode(frames("an idle rank's load")).load
    assert load == LoadReport(waiting=0, running=1, kv_usage=0.0, while_idle=False)


def test_the_notice_of_death() -> None:
    assert SESSION.decode(frames("the notice of death")) == Batch(dead=True)


@pytest.mark.parametrize("version", GOLDEN)
def test_the_handshake_takes_the_engines_own_messages(version: str) -> None:
    handshake = TokenSpeedProtocol().handshake([RankEndpoints("in", "out")])
    assert handshake.receive(b"\0\0", frames("a HELLO", version)) is not None
    assert handshake.receive(b"\0\0", frames("a READY", version)) is None
    handshake.registered(0, frames("a registration of defaults", version))
    assert handshake.complete
    (info,) = handshake.infos()
    assert (info.version, info.max_model_len, info.block_size, info.data_parallel_size) == (None, None, None, 1)


def test_the_registration_tells_what_is_needed() -> None:
    handshake = TokenSpeedProtocol().handshake([RankEndpoints("in", "out")])
    handshake.receive(b"\0\0", frames("a HELLO"))
    handshake.receive(b"\0\0", frames("a READY"))
    handshake.registered(0, frames("a registration"))
    (info,) = handshake.infos()
    assert (info.version, info.max_model_len, info.block_size, info.data_parallel_size) == ("0.1.1", 512, 64, 2)


@pytest.mark.parametrize("stream", [True, False])
def test_our_add_is_theirs_cut_short(stream: bool) -> None:
    name = "an ADD with the defaults" + ("" if stream else ", not streamed")
    theirs = msgpack.unpackb(frames(name)[0])
    request = TokenSpeedRequest([1, 2, 3], TokenSpeedSampling(max_new_tokens=16), stream=stream)
    ours = msgpack.unpackb(SESSION.encode_add(request, "wire-1")[1])
    assert len(ours) == (11 if stream else 6)
    assert ours.pop(5) == theirs.pop(5)[:1]  # theirs is normalised, ours is left to the engine
    assert ours == theirs[: len(ours)]


@pytest.mark.parametrize("version", GOLDEN)
def test_an_abort_is_the_same_bytes(version: str) -> None:
    ids = msgpack.unpackb(frames("an ABORT", version)[0])
    assert SESSION.encode_abort(ids) == (b"\x01", *frames("an ABORT", version))
