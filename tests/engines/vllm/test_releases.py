"""Each release from the first hello to the last token, with a model rank that speaks that release's wire."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from lockstep_trio import EngineCoreRequest, FinishReason, RequestRejected, SamplingParams, VllmProtocol
from lockstep_trio.engines.protocol import RankEndpoints
from lockstep_trio.engines.vllm.handshake import VllmHandshake
from lockstep_trio.engines.vllm.protocol import VllmSession
from lockstep_trio.errors import HandshakeError
from lockstep_trio.testing.engine_rank import EngineRank, tokens_of

RELEASES = [
    *("0.10.0", "0.10.1", "0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.13.0", "0.14.0", "0.14.1", "0.15.1"),
    *("0.16.0", "0.17.0", "0.17.1", "0.18.1", "0.19.1", "0.20.0", "0.20.1", "0.20.2", "0.21.0", "0.22.1", "0.23.0"),
    *("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def meet(ranks: list[EngineRank], protocol: VllmProtocol) -> VllmSession:
    """The conversation up to the session. Ranks are asked, and answer, as if they were there."""
    handshake = protocol.handshake([RankEndpoints("in", "out") for _ in ranks])
    for rank in ranks:
        assert handshake.receive(rank.identity, [rank.hello()]) is not None
        handshake.receive(rank.identity, [rank.ready()])
        handshake.registered(rank.index, [rank.registration()])
    answer(ranks, handshake)
    assert handshake.complete
    return protocol.session(handshake.infos())


def answer(ranks: list[EngineRank], handshake: VllmHandshake) -> None:
    for index, message in handshake.questions():
        assert not handshake.complete
        assert "being asked" in handshake.stages[index]
        ranks[index].receive([bytes(frame) for frame in message])
        ranks[index].poll()
    for rank in ranks:
        while rank.sent:
            assert handshake.answered(rank.index, rank.sent.popleft())


def group(version: str, size: int) -> list[EngineRank]:
    return [EngineRank(index, size=size, version=version) for index in range(size)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("version", RELEASES)
def test_a_release_is_known_for_what_it_is_and_streams(version: str, size: int) -> None:
    ranks = group(version, size)
    session = meet(ranks, VllmProtocol(vocab_size=256, max_model_len=512))
    assert session.lockstep is (size > 1)
    versions = session.limits.versions
    assert versions.oldest <= numbers(version) <= versions.newest
    request = EngineCoreRequest([7], SamplingParams(max_tokens=2, eos_token_id=3), cache_salt="s", arrival_time=5)
    ranks[0].receive([bytes(frame) for frame in session.encode_add(request, "a")])
    for rank in ranks:
        rank.poll()
        if size > 1:
            rank.model.running = True
    raws: list[Any] = []
    for _ in range(2):
        ranks[0].step()
        batch = session.decode(ranks[0].sent.popleft())
        assert not batch.damage
        raws += [raw for _, _, raw in batch.outputs]
        ranks[0].poll()
    output = session.merge("a", 0, raws)
    assert list(output.token_ids) == tokens_of(7, 2)
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("version", RELEASES)
def test_a_pinned_release_is_not_asked_for_its_version(version: str) -> None:
    ranks = group(version, 1)
    session = meet(ranks, VllmProtocol(version=version, vocab_size=256, max_model_len=512))
    assert str(session.limits.versions) == version
    assert ranks[0].counts["Call"] == (numbers(version) < (0, 20))
    session.encode_add(EngineCoreRequest([7], priority=5), "a")


@pytest.mark.parametrize(
    ("version", "size", "known"),
    [
        ("0.10.0", 1, True),
        ("0.10.1", 1, True),
        ("0.10.2", 1, False),
        ("0.11.0", 2, False),
        ("0.16.0", 1, False),
        ("0.16.0", 2, True),  # READY has a hash, so it is 0.11.1 or later
        ("0.17.0", 1, True),
        ("0.19.1", 1, True),
        ("0.20.2", 1, True),
        ("0.21.0", 1, True),
        ("0.22.1", 1, True),
        ("0.33.0", 1, True),
    ],
)
def test_a_priority_is_refused_exactly_where_its_place_is_not_certain(version: str, size: int, known: bool) -> None:
    session = meet(group(version, size), VllmProtocol(vocab_size=256, max_model_len=512))
    request = EngineCoreRequest([7], priority=5)
    if known:
        payload = msgpack.unpackb(session.encode_add(request, "a")[1])
        assert payload[-1] == 5
    else:
        with pytest.raises(RequestRejected, match=r"0\.10\.2 to 0\.16.*VllmProtocol") as caught:
            session.encode_add(request, "a")
        assert (caught.value.field, caught.value.value) == ("priority", 5)


@pytest.mark.parametrize(("version", "taken"), [("0.10.0", False), ("0.10.1", False), ("0.10.2", True)])
def test_all_logprobs_are_refused_where_the_engine_would_die_of_them(version: str, taken: bool) -> None:
    session = meet(group(version, 1), VllmProtocol(vocab_size=10, max_model_len=512))
    request = EngineCoreRequest([7], SamplingParams(logprobs=-1))
    if taken:
        session.encode_add(request, "a")
    else:
        with pytest.raises(RequestRejected, match="logprobs"):
            session.encode_add(request, "a")


def test_the_eos_is_where_the_release_reads_it() -> None:
    request = EngineCoreRequest([7], SamplingParams(eos_token_id=3))
    for version, place in (("0.10.1", 7), ("0.16.0", 5)):
        session = VllmProtocol(version=version).session(meet_infos(version))
        assert msgpack.unpackb(session.encode_add(request, "a")[1])[place] == 3
    session = VllmProtocol(version="0.17.0").session(meet_infos("0.17.0"))
    payload = msgpack.unpackb(session.encode_add(request, "a")[1])
    assert (type(payload[5]), payload[3]["_eos_token_id"]) == (float, 3)


def meet_infos(version: str) -> Any:
    ranks = group(version, 1)
    handshake = VllmProtocol(version=version).handshake([RankEndpoints("in", "out")])
    handshake.receive(ranks[0].identity, [ranks[0].hello()])
    handshake.receive(ranks[0].identity, [ranks[0].ready()])
    handshake.registered(0, [ranks[0].registration()])
    answer(ranks, handshake)
    return handshake.infos()


def test_ranks_of_different_releases_are_told_apart_by_what_they_have() -> None:
    ranks = [EngineRank(0, version="0.16.0"), EngineRank(1, version="0.17.0")]
    with pytest.raises(HandshakeError, match="methods"):
        meet(ranks, VllmProtocol())


def test_what_an_old_engine_cannot_tell_is_said_once() -> None:
    session = meet(group("0.16.0", 2), VllmProtocol())
    words = " ".join(session.cautions)
    for name in ("vocab_size", "max_model_len", "how many of them"):
        assert name in words
    assert meet(group("0.32.0", 2), VllmProtocol(vocab_size=5)).cautions == ()
    assert "0.11.1 to 0.16" in session.versions


def test_a_rank_that_is_restarted_while_it_is_asked_is_asked_again() -> None:
    [rank] = group("0.19.1", 1)
    handshake = VllmProtocol().handshake([RankEndpoints("in", "out")])
    for _ in range(2):
        handshake.receive(rank.identity, [rank.hello()])
        assert handshake.questions() == []
        handshake.registered(0, [rank.registration()])
        assert handshake.questions() == []
        handshake.receive(rank.identity, [rank.ready()])
        assert len(handshake.questions()) == 4
        assert not handshake.complete


@pytest.mark.parametrize("version", ["0.10", "0.9.2", "0.34.0"])
def test_a_version_that_settles_nothing_cannot_be_pinned(version: str) -> None:
    with pytest.raises(ValueError, match="version is "):
        VllmProtocol(version=version)


@pytest.mark.parametrize(("version", "most"), [("0.11.0", 1024), ("0.11.1", 5000)])
def test_logprobs_that_come_as_lists_are_few_enough_for_a_message_to_be_read(version: str, most: int) -> None:
    session = VllmProtocol(version=version, vocab_size=5000, max_logprobs=-1).session(meet_infos(version))
    session.encode_add(EngineCoreRequest([7], SamplingParams(logprobs=most)), "a")
    for logprobs in (most + 1, -1) if most < 5000 else (most + 1,):
        with pytest.raises(RequestRejected, match=f"from 0 to {most}"):
            session.encode_add(EngineCoreRequest([7], SamplingParams(prompt_logprobs=logprobs)), "a")


HEADERS = {"traceparent": "00-1-2-01", "empty": ""}


@pytest.mark.parametrize(
    ("version", "place"), [("0.10.1", None), ("0.10.2", 13), ("0.11.0", 14), ("0.17.0", 13), ("0.33.0", 14)]
)
def test_trace_headers_are_where_the_release_has_them(version: str, place: int | None) -> None:
    session = VllmProtocol(version=version, max_model_len=9).session(meet_infos(version))
    request = EngineCoreRequest([7], trace_headers=HEADERS)
    if place is None:
        with pytest.raises(RequestRejected, match=r"0\.10\.2 was the first"):
            session.encode_add(request, "a")
    else:
        payload = msgpack.unpackb(session.encode_add(request, "a")[1])
        assert (len(payload), payload[place]) == (place + 1, HEADERS)


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ([("a", "b")], "trace_headers"),
        ("a", "trace_headers"),
        ({str(at): "" for at in range(65)}, "trace_headers"),
        ({1: "b"}, "trace_headers"),
        ({"a": 1}, "trace_headers['a']"),
        ({"a": None}, "trace_headers['a']"),
        ({"a": "x" * 8193}, "trace_headers['a']"),
        ({"a": "\ud800"}, "trace_headers['a']"),
    ],
    ids=lambda value: f"{value!r:.30}",
)
def test_trace_headers_that_are_none_are_refused_by_name(headers: Any, field: str) -> None:
    session = VllmProtocol(version="0.33.0").session(meet_infos("0.33.0"))
    with pytest.raises(RequestRejected) as caught:
        session.encode_add(EngineCoreRequest([7], trace_headers=headers), "a")
    assert caught.value.field == field
