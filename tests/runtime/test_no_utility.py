"""An engine without utility calls: nothing is ever asked of its ranks, and a silent one is judged by time alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import trio
import trio.testing

from lockstep_trio import FaultKind, RankFailed, RequestRejected, open_group
from lockstep_trio.engines.protocol import Frame, RankEndpoints, RankInfo
from lockstep_trio.engines.vllm import VllmHandshake, VllmProtocol, VllmSession
from lockstep_trio.testing.rank_model import Add, Drop
from lockstep_trio.testing.simulated import SimulatedGroup
from runtime.kit import ask, rest


class MuteSession:
    """vLLM's, but for its utility calls."""

    fence_method = None

    def __init__(self, session: VllmSession) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def encode_utility(self, call_id: int, method: str, args: Sequence[object]) -> tuple[Frame, ...]:
        raise RequestRejected("method", method, "left alone")

    def is_refusal(self, raw: object) -> bool:
        return True


class MuteProtocol:
    def identity(self, rank: int) -> bytes:
        return VllmProtocol().identity(rank)

    def handshake(self, endpoints: Sequence[RankEndpoints]) -> VllmHandshake:
        return VllmProtocol().handshake(endpoints)

    def session(self, infos: Sequence[RankInfo], *, lockstep: bool | None) -> Any:
        return MuteSession(VllmProtocol(vocab_size=256).session(infos, lockstep=lockstep))


async def test_a_silent_rank_with_work_is_lost_after_both_times_unasked_and_the_others_go_on(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    sim = SimulatedGroup(2, lockstep=False)
    sim.start()
    limits = {"stall_timeout": 10.0, "probe_timeout": 4.0}
    async with open_group(sim.link, ranks=2, protocol=MuteProtocol(), **limits) as group:  # type: ignore[arg-type]
        await trio.sleep(1000)  # idle, it may be as silent as it likes
        begun = trio.current_time()
        frozen = await group.submit(ask(5, rank=1))
        with caplog.at_level(logging.WARNING, "lockstep_trio"), pytest.raises(RankFailed) as caught:
            await frozen.receive()
        assert trio.current_time() - begun == pytest.approx(14.0)
        assert caught.value.fault.kind is FaultKind.STALLED
        assert "cannot be asked" in caught.value.fault.detail
        assert "probing" not in caplog.text
        sim.deliver(1)
        assert [type(each) for each in sim.ranks[1].log] == [Add, Drop]
        async with await group.submit(ask(1)) as stream:
            assert stream.rank == 0
            sim.deliver(0)
            sim.poll(0)
            sim.step_alone(0)
            assert (await stream.receive()).finished
        sim.deliver(0)
        assert [type(each) for each in sim.ranks[0].log] == [Add]


async def test_aborts_bring_no_fence_and_a_refusal_no_question(nursery: trio.Nursery) -> None:
    sim = SimulatedGroup(1, lockstep=False)
    sim.start()
    async with open_group(sim.link, ranks=1, protocol=MuteProtocol()) as group:  # type: ignore[arg-type]
        await (await group.submit(ask(5))).aclose()
        refused = await group.submit(ask(5))
        sim.deliver(0)
        wire_id = next(each.wire_id for each in reversed(sim.ranks[0].log) if isinstance(each, Add))
        sim.ports[0].send(sim.ranks[0].message(outputs=[[wire_id, [], None, None, None, 2]]))
        assert (await refused.receive()).finished
        await refused.aclose()
        await rest()
        with trio.fail_after(5):
            await group.drain()  # no proof is awaited of anything
    sim.deliver(0)
    assert [type(each) for each in sim.ranks[0].log] == [Add, Drop, Add]


async def test_a_utility_call_is_refused_before_anything_is_sent(nursery: trio.Nursery) -> None:
    sim = SimulatedGroup(2, lockstep=False)
    sim.start()
    async with open_group(sim.link, ranks=2, protocol=MuteProtocol()) as group:  # type: ignore[arg-type]
        with pytest.raises(RequestRejected) as caught:
            await group.call_utility("is_sleeping")
        assert caught.value.field == "method"
        assert not any(driver._calls for driver in group._coordinator.drivers)
    assert [sim.deliver(rank) for rank in (0, 1)] == [0, 0]


async def test_a_lockstep_group_without_utility_calls_is_refused(nursery: trio.Nursery) -> None:
    sim = SimulatedGroup(2, lockstep=True)
    sim.start()
    with pytest.raises(ValueError, match="fences"):
        async with open_group(sim.link, ranks=2, protocol=MuteProtocol()):  # type: ignore[arg-type]
            pass
    assert sim.link.closed
