"""Engines of every kind of wire, over real ZeroMQ: they are asked what they do not tell, wake and stream."""

from __future__ import annotations

import pytest
import trio

from lockstep_trio import HandshakeError, VllmProtocol, open_group
from lockstep_trio.testing.engine_rank import tokens_of
from lockstep_trio.testing.rank_model import Sync
from lockstep_trio.testing.zmq_ranks import ZmqRanks
from over_zmq.driven import ask, bind, serve

PROTOCOL = VllmProtocol(vocab_size=256, max_model_len=4096)
EVERY_32 = Sync(every=32, first=False)
"""Up to 0.29."""


@pytest.mark.trio
@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("version", ["0.10.0", "0.10.1", "0.10.2", "0.16.0", "0.19.1", "0.20.2", "0.21.0", "0.33.0"])
async def test_ranks_of_any_release_come_up_wake_stream_and_park(version: str, lockstep: bool) -> None:
    async with serve(2, version=version, lockstep=lockstep, protocol=PROTOCOL, sync=EVERY_32) as (group, _):
        assert group.lockstep is lockstep
        for rank in (0, 1):
            async with await group.submit(ask(3, rank)) as stream:
                assert [token async for output in stream for token in output.token_ids] == tokens_of(7, 3)
        await group.wait_parked()
        assert {each.counts.starts for each in group.statistics().ranks} <= ({1, 2} if lockstep else {0})
        assert await group.call_utility("is_sleeping") == {0: False, 1: False}


@pytest.mark.trio
async def test_a_rank_that_never_answers_ends_the_wait_by_its_limit_and_stage() -> None:
    link = bind(1)
    async with trio.open_nursery() as nursery:
        with ZmqRanks(link.handshake_endpoint, 1, version="0.19.1") as ranks:
            nursery.start_soon(ranks.come_up)  # and never run
            with pytest.raises(HandshakeError, match="answered") as caught:
                async with open_group(link, ranks=1, protocol=PROTOCOL, register_timeout=0.3):
                    pass
    assert caught.value.limit_name == "register_timeout"
    assert "being asked" in caught.value.stages[0]
