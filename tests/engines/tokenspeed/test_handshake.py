"""What is TokenSpeed's own in the conversation; the rest of it is tested with vLLM's."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from lockstep_trio.engines.protocol import RankEndpoints, RankInfo
from lockstep_trio.engines.tokenspeed import TokenSpeedHandshake, TokenSpeedProtocol
from lockstep_trio.errors import HandshakeError

STATUS = {"local": True, "headless": True, "parallel_config_hash": None}
REGISTRATION = {"max_model_len": 512, "vllm_version": "tokenspeed-0.1.1", "data_parallel_size": 2, "dtype": "bfloat16"}


def come_up(ranks: int = 1, **told: Any) -> TokenSpeedHandshake:
    handshake = TokenSpeedProtocol().handshake([RankEndpoints(f"in{rank}", f"out{rank}") for rank in range(ranks)])
    for rank in range(ranks):
        identity = TokenSpeedProtocol().identity(rank)
        reply = handshake.receive(identity, [msgpack.packb({"status": "HELLO", **STATUS})])
        assert reply is not None
        [init] = reply.frames
        assert msgpack.unpackb(init)["addresses"] == {"inputs": [f"in{rank}"], "outputs": [f"out{rank}"]}
        assert handshake.receive(identity, [msgpack.packb({"status": "READY", **STATUS})]) is None
        handshake.registered(rank, [msgpack.packb({**REGISTRATION, **told})])
    assert handshake.complete
    return handshake


def info(**told: Any) -> RankInfo:
    (found,) = come_up(**told).infos()
    return found


def test_the_registration_tells_version_context_size_and_blocks() -> None:
    found = info(prefix_granularity=64)
    assert (found.version, found.max_model_len, found.data_parallel_size, found.block_size) == ("0.1.1", 512, 2, 64)
    assert found.raw["dtype"] == "bfloat16"


@pytest.mark.parametrize("key", ["block_size", "prefix_granularity"])
def test_blocks_are_read_by_either_name(key: str) -> None:
    assert info(**{key: 64}).block_size == 64


def test_the_new_name_wins_and_nought_is_not_told() -> None:
    assert info(block_size=16, prefix_granularity=64).block_size == 64
    assert info(block_size=16, prefix_granularity=0).block_size == 16
    assert info(prefix_granularity=0).block_size is None
    assert info(max_model_len=0).max_model_len is None
    assert info(vllm_version="").version is None


def test_nothing_is_ever_asked() -> None:
    handshake = come_up(2)
    assert list(handshake.questions()) == []
    assert not handshake.answered(0, [b"\x90"])


def test_servers_that_were_started_one_by_one_are_each_data_parallel_rank_0() -> None:
    assert [each.rank for each in come_up(2, data_parallel_rank=0, data_parallel_size=1).infos()] == [0, 1]


def test_another_engine_is_told_by_its_version() -> None:
    with pytest.raises(HandshakeError, match=r"no TokenSpeed engine.*0\.32\.0"):
        info(vllm_version="0.32.0")


@pytest.mark.parametrize(
    ("key", "value"), [("max_model_len", "512"), ("prefix_granularity", 1.5), ("vllm_version", 3)], ids=repr
)
def test_what_is_told_in_a_type_that_it_cannot_have_ends_the_handshake(key: str, value: Any) -> None:
    with pytest.raises(HandshakeError, match=key):
        info(**{key: value})


@pytest.mark.parametrize("frames", [[], [b""], [b"\x80"], [b"\x01"], [b"\xc1"], [b"\x80", b"\x80"]], ids=repr)
def test_a_registration_that_is_none_ends_the_handshake(frames: list[bytes]) -> None:
    handshake = TokenSpeedProtocol().handshake([RankEndpoints("in", "out")])
    handshake.receive(b"\0\0", [msgpack.packb({"status": "HELLO"})])
    with pytest.raises(HandshakeError, match="rank 0 registered with"):
        handshake.registered(0, frames)


def test_an_engine_that_was_started_by_another_client_is_told_so() -> None:
    handshake = TokenSpeedProtocol().handshake([RankEndpoints("in", "out")])
    with pytest.raises(HandshakeError, match="once in its life"):
        handshake.receive(b"\0\0", [msgpack.packb({"status": "READY", **STATUS})])
