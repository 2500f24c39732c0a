from __future__ import annotations

from typing import Any

import msgpack
import pytest

from lockstep_trio.engines.protocol import RankInfo
from lockstep_trio.engines.tokenspeed import TokenSpeedProtocol, TokenSpeedRequest, TokenSpeedSampling

SESSION = TokenSpeedProtocol(vocab_size=256, output_logprobs=True).session([RankInfo(0)])


def array(request: TokenSpeedRequest) -> list[Any]:
    kind, payload = SESSION.encode_add(request, "w#1")
    assert kind == b"\x00"
    unpacked: list[Any] = msgpack.unpackb(payload)
    return unpacked


@pytest.mark.parametrize(
    ("stream", "logprobs", "tail"),
    [
        (True, False, [False, -1, 0, None, True]),
        (True, True, [True, -1, 0, None, True]),
        (False, True, [True]),
        (False, False, []),
    ],
)
def test_an_add_is_the_shortest_legal_prefix(stream: bool, logprobs: bool, tail: list[Any]) -> None:
    request = TokenSpeedRequest([1, 2, 3], stream=stream, return_logprob=logprobs)
    assert array(request) == ["TokenizedGenerateReqInput", "w#1", None, None, [1, 2, 3], [], *tail]


def test_the_sampling_is_an_array_cut_short_in_its_own_place() -> None:
    request = TokenSpeedRequest([1], TokenSpeedSampling(max_new_tokens=4, temperature=0.0), stream=False)
    assert array(request)[5] == [4, None, None, 0.0]


def test_the_rank_is_not_in_the_message_because_the_engine_would_not_look() -> None:
    pinned = TokenSpeedRequest([1], data_parallel_rank=1)
    assert array(pinned) == array(TokenSpeedRequest([1]))


def test_an_abort_is_an_array_of_ids_and_nothing_else() -> None:
    kind, payload = SESSION.encode_abort(["a#1", "b#2"])
    assert kind == b"\x01"
    assert msgpack.unpackb(payload) == ["a#1", "b#2"]
