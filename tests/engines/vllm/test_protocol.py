from __future__ import annotations

from typing import Any

import msgpack
import pytest

from lockstep_trio.engines.protocol import (
    Batch,
    EngineProtocol,
    Handshake,
    RankEndpoints,
    RankInfo,
    RequestHead,
    Session,
)
from lockstep_trio.engines.vllm import (
    EngineCoreRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
    VllmProtocol,
)
from lockstep_trio.errors import HandshakeError, RequestRejected, WireError

INFOS = [
    RankInfo(rank, version="0.32.0", data_parallel_size=2, config_hash="abc", max_model_len=512) for rank in range(2)
]


def independent(**fields: Any) -> list[RankInfo]:
    return [RankInfo(0, **{"version": "0.32.0", "data_parallel_size": 1, **fields})]


def test_the_protocol_keeps_the_contract() -> None:
    protocol: EngineProtocol[EngineCoreRequest, RequestOutput] = VllmProtocol()
    handshake: Handshake = protocol.handshake([RankEndpoints("in", "out")])
    session: Session[EngineCoreRequest, RequestOutput] = protocol.session(INFOS, lockstep=None)
    assert not handshake.complete
    assert session.lockstep


def test_a_conversation_from_hello_to_the_last_token() -> None:
    protocol = VllmProtocol(vocab_size=256)
    handshake = protocol.handshake([RankEndpoints("in", "out")])
    handshake.receive(protocol.identity(0), [msgpack.packb({"status": "HELLO"})])
    registration = {"vllm_version": "0.32.0+cpu", "data_parallel_size": 1, "max_model_len": 8}
    handshake.registered(0, [msgpack.packb(registration)])
    handshake.receive(protocol.identity(0), [msgpack.packb({"status": "READY"})])
    session = protocol.session(handshake.infos())
    assert not session.lockstep

    frames = session.encode_add(EngineCoreRequest([1, 2], SamplingParams(max_tokens=2)), "wire")
    assert msgpack.unpackb(frames[1])[:4] == ["wire", [1, 2], None, {"max_tokens": 2}]
    outputs = [["wire", [5]], ["wire", [6], None, None, None, 1]]
    batch = session.decode([msgpack.packb([0, outputs])])
    assert [each[:2] for each in batch.outputs] == [("wire", False), ("wire", True)]
    merged = session.merge("mine", 0, [raw for _, _, raw in batch.outputs])
    assert (merged.token_ids, merged.finish_reason) == ((5, 6), FinishReason.LENGTH)


def test_a_session_speaks_every_kind_of_message() -> None:
    session = VllmProtocol().session(INFOS)
    assert session.fence_method == "is_sleeping"
    assert session.encode_abort(["a"])[0] == b"\x01"
    assert session.encode_start(3, None)[0] == b"\x02"
    assert session.encode_utility(1, session.fence_method, ())[0] == b"\x03"
    assert session.decode([b"ENGINE_CORE_DEAD"]) == Batch(dead=True)
    with pytest.raises(WireError):
        session.decode([b""])


def test_the_head_of_a_request_is_checked_too() -> None:
    session = VllmProtocol().session(INFOS)
    assert session.head(EngineCoreRequest([1], request_id="x", data_parallel_rank=1)) == RequestHead("x", 1)
    with pytest.raises(RequestRejected):
        session.head(EngineCoreRequest([1], data_parallel_rank=-1))


def test_what_the_ranks_and_the_caller_told_limits_the_requests() -> None:
    session = VllmProtocol(vocab_size=10, max_logprobs=3).session(independent(max_model_len=5))
    session.encode_add(EngineCoreRequest([9] * 4, SamplingParams(logprobs=3)), "w")
    for request in (
        EngineCoreRequest([10]),
        EngineCoreRequest([1] * 5),
        EngineCoreRequest([1], SamplingParams(logprobs=4)),
    ):
        with pytest.raises(RequestRejected):
            session.encode_add(request, "w")


def test_a_seed_is_refused_where_it_could_kill() -> None:
    request = EngineCoreRequest([1], SamplingParams(seed=7))
    VllmProtocol().session(INFOS).encode_add(request, "w")
    session = VllmProtocol(seeds=False).session(INFOS)
    with pytest.raises(RequestRejected, match="seeds=False") as caught:
        session.encode_add(request, "w")
    assert (caught.value.field, caught.value.value) == ("sampling.seed", 7)
    session.encode_add(EngineCoreRequest([1]), "w")


def test_a_priority_goes_where_the_version_has_it() -> None:
    request = EngineCoreRequest([1], priority=7)
    for version, position in (("0.20.1", 12), ("0.21.0", 13), ("0.33.0", 13)):
        session = VllmProtocol(version=version).session(independent())
        array = msgpack.unpackb(session.encode_add(request, "w")[1])
        assert (len(array), array[position]) == (position + 1, 7)


def test_a_version_that_is_not_known_ends_the_handshake_unless_the_caller_insists() -> None:
    with pytest.raises(HandshakeError, match=r"0\.34\.0"):
        VllmProtocol().session(independent(version="0.34.0"))
    VllmProtocol(version="0.33").session(independent(version="0.34.0"))


def test_ranks_that_disagree_end_the_handshake() -> None:
    with pytest.raises(HandshakeError, match="version"):
        VllmProtocol().session([INFOS[0], RankInfo(1, version="0.31.0", data_parallel_size=2, config_hash="abc")])
    with pytest.raises(HandshakeError, match="2, but 1"):
        VllmProtocol().session(INFOS[:1], lockstep=False)


def test_the_caller_may_overrule_the_lockstep() -> None:
    assert VllmProtocol().session(INFOS).lockstep
    assert not VllmProtocol().session(INFOS, lockstep=False).lockstep


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_size": 0},
        {"vocab_size": -1},
        {"vocab_size": 2**31 + 1},
        {"max_logprobs": -2},
        {"version": "0.9.1"},
        {"max_model_len": 1},
        {"version": "new"},
    ],
    ids=repr,
)
def test_settings_that_cannot_be_meant_are_refused_at_once(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))} is "):
        VllmProtocol(**fields)
