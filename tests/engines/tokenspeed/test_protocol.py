from __future__ import annotations

from typing import Any

import pytest

from lockstep_trio.engines.protocol import (
    EngineProtocol,
    Handshake,
    Pause,
    RankEndpoints,
    RankInfo,
    Resume,
    Session,
    Sleep,
    WakeUp,
)
from lockstep_trio.engines.tokenspeed import TokenSpeedOutput, TokenSpeedProtocol, TokenSpeedRequest
from lockstep_trio.errors import HandshakeError, RequestRejected

INFOS = [RankInfo(rank, version="0.1.1", data_parallel_size=2, max_model_len=512) for rank in range(2)]


def longest_prompt(protocol: TokenSpeedProtocol, infos: list[RankInfo]) -> int:
    """Found by trying."""
    session = protocol.session(infos)
    for length in range(1, 1000):
        try:
            session.encode_add(TokenSpeedRequest([1] * length), "w")
        except RequestRejected:
            return length - 1
    raise AssertionError("no limit")


def test_the_protocol_keeps_the_contract() -> None:
    protocol: EngineProtocol[TokenSpeedRequest, TokenSpeedOutput] = TokenSpeedProtocol()
    handshake: Handshake = protocol.handshake([RankEndpoints("in", "out")])
    session: Session[TokenSpeedRequest, TokenSpeedOutput] = protocol.session(INFOS, lockstep=None)
    assert not handshake.complete
    assert session.fence_method is None


@pytest.mark.parametrize("size", [None, 1, 2, 7])
@pytest.mark.parametrize("lockstep", [None, False])
def test_there_are_no_waves_whatever_size_the_ranks_report(size: int | None, lockstep: bool | None) -> None:
    infos = [RankInfo(rank, version="0.1.1", data_parallel_size=size, config_hash="abc") for rank in range(2)]
    session = TokenSpeedProtocol().session(infos, lockstep=lockstep)
    assert not session.lockstep
    with pytest.raises(NotImplementedError, match="no waves"):
        session.encode_start(0, None)


def test_lockstep_is_refused_and_the_caller_told_what_to_do() -> None:
    with pytest.raises(HandshakeError, match="Leave lockstep out"):
        TokenSpeedProtocol().session(INFOS, lockstep=True)


def test_servers_of_several_sizes_make_one_group() -> None:
    infos = [RankInfo(rank, version="0.1.1", data_parallel_size=size) for rank, size in enumerate((2, 2, 1))]
    assert not TokenSpeedProtocol().session(infos).lockstep


@pytest.mark.parametrize(("field", "value"), [("version", "0.1.2"), ("version", None), ("max_model_len", 256)])
def test_ranks_that_disagree_end_the_handshake(field: str, value: Any) -> None:
    other: dict[str, Any] = {"version": "0.1.1", "max_model_len": 512, field: value}
    with pytest.raises(HandshakeError, match=field):
        TokenSpeedProtocol().session([INFOS[0], RankInfo(1, **other)])


@pytest.mark.parametrize("method", ["is_sleeping", "", None])
def test_a_utility_call_is_refused(method: Any) -> None:
    with pytest.raises(RequestRejected, match="no utility calls") as caught:
        TokenSpeedProtocol().session(INFOS).encode_utility(1, method, ())
    assert (caught.value.field, caught.value.value) == ("method", method)


@pytest.mark.parametrize("call", [Pause("wait", clear_cache=True), Resume(), Sleep(1, "abort"), WakeUp(None)], ids=repr)
def test_it_cannot_be_paused(call: Any) -> None:
    session = TokenSpeedProtocol().session(INFOS)
    with pytest.raises(RequestRejected, match="no utility calls"):
        session.encode_pause(call)
    assert session.pause_methods == frozenset()


def test_an_abort_is_never_taken_for_a_rank_that_shuts_down() -> None:
    assert not TokenSpeedProtocol().session(INFOS).is_refusal(((), "abort", 3, 0, 0, (), ()))


def test_the_least_that_is_known_of_the_context_limits_a_prompt() -> None:
    def told(**raw: Any) -> list[RankInfo]:
        return [RankInfo(0, version="0.1.1", max_model_len=512), RankInfo(1, "0.1.1", None, None, 512, raw)]

    assert longest_prompt(TokenSpeedProtocol(), told()) == 510
    assert longest_prompt(TokenSpeedProtocol(max_model_len=100), told()) == 98
    assert longest_prompt(TokenSpeedProtocol(max_model_len=1000), told()) == 510
    assert longest_prompt(TokenSpeedProtocol(), told(kv_cache_size_tokens=200)) == 198
    for unknown in (None, 0, -1, "200", True, 1.5):
        assert longest_prompt(TokenSpeedProtocol(), told(kv_cache_size_tokens=unknown)) == 510


def test_whoever_does_not_give_the_vocabulary_is_cautioned_once() -> None:
    assert len(TokenSpeedProtocol().session(INFOS).cautions) == 1
    assert TokenSpeedProtocol(vocab_size=256).session(INFOS).cautions == ()


def test_errors_about_the_wire_name_both_versions() -> None:
    assert TokenSpeedProtocol().session(INFOS).versions.startswith("the engine says it is TokenSpeed 0.1.1; 0.1.1")
    assert "tells no version" in TokenSpeedProtocol().session([RankInfo(0)]).versions


@pytest.mark.parametrize("fields", [{"vocab_size": 0}, {"vocab_size": 2**31 + 1}, {"max_model_len": 2}], ids=repr)
def test_settings_that_cannot_be_meant_are_refused_at_once(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))} is "):
        TokenSpeedProtocol(**fields)


def test_a_rank_beyond_two_bytes_has_no_identity() -> None:
    assert TokenSpeedProtocol().identity(258) == b"\x02\x01"
    with pytest.raises(HandshakeError, match="65536"):
        TokenSpeedProtocol().identity(65_536)
