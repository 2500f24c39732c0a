"""What each fault costs and how soon it is noticed, with ranks that are processes. Times are figures, not promises."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal

import pytest
import trio
import zmq

from lockstep_trio import (
    EngineCoreRequest,
    EngineLost,
    FaultKind,
    FinishReason,
    GroupClosed,
    GroupFailed,
    HandshakeError,
    LockstepError,
    Overloaded,
    RankFailed,
    RequestRejected,
    SamplingParams,
    StreamOverflow,
    UtilityFailed,
    WireError,
    open_group,
    open_zmq_link,
)
from lockstep_trio.core import GroupPhase, RankPhase
from lockstep_trio.engines.vllm.handshake import VllmHandshake
from lockstep_trio.link import zmq_link
from lockstep_trio.testing.engine_rank import DEAD, EngineRank, tokens_of
from lockstep_trio.testing.faults import Faults, inject
from lockstep_trio.testing.mock_ranks import MockRanks, open_mock_ranks
from over_zmq import driven
from over_zmq.driven import PROTOCOL, Requests, Stream, ask, collect, until

pytestmark = pytest.mark.trio

Figure = Callable[[str, float, str], None]

NOTICED = 5.0
"""Seconds: ten times the aim for the loss of a rank."""
LONG = 100_000
"""Tokens of a request that does not end by itself in a test."""


def serve(count: int, **given: Any) -> AbstractAsyncContextManager[tuple[Requests, MockRanks]]:
    """With steps slow enough for something to happen in between, and requests that do not end by themselves."""
    return driven.serve(count, **{"step_time": 0.002, "max_model_len": 2 * LONG, "send_hwm": 1000, **given})


def phase(group: Requests, rank: int) -> RankPhase:
    return group.statistics().state.ranks[rank].phase


async def fails(use: Callable[[], Awaitable[object]], *kinds: FaultKind, rank: int) -> EngineLost:
    """It raises, within the limit, because that rank was lost in one of these ways."""
    with trio.fail_after(NOTICED), pytest.raises(EngineLost) as caught:
        await use()
    assert (caught.value.rank, caught.value.fault.kind in kinds) == (rank, True), caught.value
    return caught.value


async def all_fail(streams: Sequence[Stream], *kinds: FaultKind, rank: int) -> float:
    """Each stream raises for that reason, all at the same time. Returns the seconds until the last one did."""
    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(lambda stream: fails(lambda: collect(stream), *kinds, rank=rank), stream)
    return time.perf_counter() - began


GONE = (FaultKind.DISCONNECTED, FaultKind.UNREACHABLE)


# -- SIGKILL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_the_death_of_one_of_three_parked_ranks_wakes_who_waits_for_it_and_fails_later_submits_at_once(
    transport: Literal["ipc", "tcp"], figure: Figure
) -> None:
    async with serve(3, transport=transport) as (group, mocks):
        assert len(await collect(await group.submit(ask(3)))) == 3
        await group.wait_parked()
        killed = time.perf_counter()
        mocks.kill(1)
        with trio.fail_after(NOTICED):
            fault = await group.wait_failed()
        figure(f"killed while idle, noticed ({transport})", time.perf_counter() - killed, "s")
        assert (fault.rank, fault.kind) == (1, FaultKind.DISCONNECTED)
        for rank in range(3):
            await fails(lambda rank=rank: group.submit(ask(1, rank)), FaultKind.DISCONNECTED, rank=1)


async def test_what_was_readable_before_the_death_of_a_rank_is_read_before_its_streams_fail(figure: Figure) -> None:
    async with serve(3) as (group, mocks):
        streams = [await group.submit(ask(LONG, rank, prompt=rank)) for rank in (0, 1, 2)]
        for stream in streams:
            await stream.receive()
        await trio.sleep(0.05)  # for the outputs to gather; how many do is of no importance
        killed = time.perf_counter()
        mocks.kill(1)
        with trio.fail_after(NOTICED):
            await group.wait_failed()
        figure("killed in mid-stream, noticed", time.perf_counter() - killed, "s")
        for rank, stream in enumerate(streams):
            late = await stream.receive()
            assert late.token_ids
            assert set(late.token_ids) <= set(tokens_of(rank, 2000))
            await fails(stream.receive, FaultKind.DISCONNECTED, rank=1)


@pytest.mark.parametrize("lockstep", [True, False])
async def test_a_request_whose_rank_dies_between_its_add_and_its_first_token_fails(
    lockstep: bool, figure: Figure
) -> None:
    async with serve(3, lockstep=lockstep) as (group, mocks):
        mocks.freeze(1)  # so that the ADD lies there unread
        streams = [await group.submit(ask(5, rank)) for rank in (1, 1)]
        killed = time.perf_counter()
        mocks.kill(1)
        await all_fail(streams, *GONE, rank=1)
        figure(
            f"killed before the first token, {'lockstep' if lockstep else 'alone'}", time.perf_counter() - killed, "s"
        )
        if not lockstep:
            assert len(await collect(await group.submit(ask(5)))) == 5


async def test_a_rank_that_dies_while_it_loads_ends_the_handshake_by_name(
    monkeypatch: pytest.MonkeyPatch, figure: Figure
) -> None:
    said_hello = trio.Event()
    receive = VllmHandshake.receive

    def note(self: VllmHandshake, identity: bytes, frames: Sequence[bytes]) -> Any:
        answer = receive(self, identity, frames)
        if identity == PROTOCOL.identity(2):
            said_hello.set()
        return answer

    monkeypatch.setattr(VllmHandshake, "receive", note)
    link = open_zmq_link(None, identities=[PROTOCOL.identity(rank) for rank in range(3)])
    with trio.fail_after(60):
        async with (
            open_mock_ranks(link.handshake_endpoint, ranks=3, load_time=[0.0, 0.0, 600.0]) as mocks,
            trio.open_nursery() as nursery,
        ):
            killed = []

            async def kill() -> None:
                await said_hello.wait()
                await trio.testing.wait_all_tasks_blocked()
                killed.append(time.perf_counter())
                mocks.kill(2)

            nursery.start_soon(kill)
            with pytest.raises(HandshakeError, match="rank 2") as caught:
                async with open_group(link, ranks=3, protocol=PROTOCOL):
                    pass
            figure("killed during the handshake, noticed and all closed", time.perf_counter() - killed[0], "s")
    assert set(caught.value.stages) == {0, 1, 2}


@pytest.mark.parametrize("lockstep", [True, False])
async def test_with_a_thousand_streams_open_each_of_those_concerned_is_told_of_a_death_and_no_other(
    lockstep: bool, figure: Figure
) -> None:
    async with serve(3, lockstep=lockstep, step_time=0.1, guard=120) as (group, mocks):
        ranks = [number % 3 for number in range(1000)]
        streams = [await group.submit(ask(LONG if lockstep or rank == 1 else 20, rank)) for rank in ranks]
        await streams[1].receive()
        concerned = [stream for stream in streams if lockstep or stream.rank == 1]
        mocks.kill(1)
        took = await all_fail(concerned, FaultKind.DISCONNECTED, rank=1)
        figure(f"{len(concerned)} of 1,000 streams told of a death", took, "s")
        for stream in streams:
            if stream not in concerned:
                with trio.fail_after(30):
                    assert await collect(stream) == tokens_of(7, 20)
        assert group.statistics().state.in_flight == 0
        assert not group._coordinator._buffers


# -- other deaths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lockstep", [True, False])
async def test_a_rank_that_says_that_it_dies_is_lost_for_that_reason_behind_its_last_outputs(lockstep: bool) -> None:
    async with serve(2, lockstep=lockstep) as (group, _):
        await inject(group, Faults(dies_after=3, last_words=True), ranks=[1])
        stream = await group.submit(ask(LONG, 1, prompt=5))
        read: list[int] = []
        with trio.fail_after(NOTICED), pytest.raises(EngineLost) as caught:
            async for output in stream:
                read += output.token_ids
        assert (caught.value.rank, caught.value.fault.kind) == (1, FaultKind.DIED)
        assert read == tokens_of(5, 3)


async def test_an_independent_rank_that_vanishes_takes_its_own_streams_along_and_no_others() -> None:
    async with serve(2, lockstep=False) as (group, _):
        kept = [await group.submit(ask(100, 0, prompt=number)) for number in range(5)]
        await inject(group, Faults(dies_after=2), ranks=[1])
        lost = [await group.submit(ask(LONG, 1)) for _ in range(5)]
        await all_fail(lost, *GONE, rank=1)
        for number, stream in enumerate(kept):
            assert await collect(stream) == tokens_of(number, 100)
        assert group.fault is None
        assert phase(group, 1) is RankPhase.LOST


async def test_a_rank_that_dies_while_the_group_is_being_closed_ends_the_wait(figure: Figure) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery, serve(2, close_grace=50.0) as (group, mocks):
            stream = await group.submit(ask(LONG, 0))
            await stream.receive()
            mocks.freeze(0)  # so that it cannot let go of the request
            killed: list[float] = []

            async def kill() -> None:
                await until(lambda: group.statistics().state.phase is GroupPhase.CLOSING)
                await trio.testing.wait_all_tasks_blocked()
                killed.append(time.perf_counter())
                mocks.kill(0)

            nursery.start_soon(kill)
        # The mock ranks' own end is in this time too.
        figure("killed while the group was closing: closed", time.perf_counter() - killed[0], "s")
        assert time.perf_counter() - killed[0] < 10 * NOTICED
        assert group.statistics().state.phase is GroupPhase.FAILED
        with pytest.raises(LockstepError):
            await collect(stream)


# -- silence -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lockstep", [True, False])
async def test_a_frozen_rank_with_work_stalls_and_the_error_says_so(lockstep: bool, figure: Figure) -> None:
    async with serve(2, lockstep=lockstep, stall_timeout=1.0, probe_timeout=1.0) as (group, mocks):
        stream = await group.submit(ask(LONG, 0))
        await stream.receive()
        other = await group.submit(ask(LONG, 1))
        await other.receive()
        frozen = time.perf_counter()
        mocks.freeze(0)
        with trio.fail_after(20), pytest.raises(EngineLost) as caught:
            await collect(stream)
        figure(
            f"frozen, {'lockstep' if lockstep else 'alone'}: given up after 1 + 1", time.perf_counter() - frozen, "s"
        )
        assert caught.value.fault.kind is FaultKind.STALLED
        if lockstep:  # where everybody waits for everybody, who began it cannot be seen
            assert isinstance(caught.value, GroupFailed)
            await fails(lambda: collect(other), FaultKind.STALLED, rank=caught.value.rank)
        else:
            assert caught.value.rank == 0
            assert (await other.receive()).token_ids
            await other.aclose()
            assert len(await collect(await group.submit(ask(5)))) == 5


@pytest.mark.parametrize("lockstep", [True, False])
async def test_a_rank_that_is_frozen_while_it_has_no_work_is_not_missed_and_serves_afterwards(lockstep: bool) -> None:
    async with serve(2, lockstep=lockstep, stall_timeout=0.7, probe_timeout=1.3) as (group, mocks):
        assert len(await collect(await group.submit(ask(3, 0)))) == 3
        await group.wait_parked()
        mocks.freeze(0)
        await trio.sleep(3.0)  # half as long again as a rank with work would be given
        assert group.fault is None
        mocks.thaw(0)
        assert await collect(await group.submit(ask(3, 0))) == tokens_of(7, 3)
        assert [phase(group, rank) for rank in (0, 1)] == [RankPhase.SERVING] * 2


async def test_a_step_that_takes_longer_than_the_stall_timeout_is_not_a_death() -> None:
    async with serve(2, stall_timeout=1.0, probe_timeout=2.0) as (group, _):
        await inject(group, Faults(slow_steps=1, slow_step=1.5), ranks=[1])
        streams = [await group.submit(ask(20, rank)) for rank in (0, 1)]
        for stream in streams:
            assert await collect(stream) == tokens_of(7, 20)
        assert group.fault is None


async def test_a_rank_that_answers_no_calls_goes_on_serving_requests() -> None:
    async with serve(2, lockstep=False) as (group, _):
        await inject(group, Faults(deaf=True), ranks=[0])
        with pytest.raises(trio.TooSlowError):
            await group.call_utility("is_sleeping", ranks=[0], timeout=0.2)
        assert await collect(await group.submit(ask(50, 0))) == tokens_of(7, 50)
        await inject(group, Faults(), ranks=[0])
        assert await group.call_utility("is_sleeping", ranks=[0]) == {0: False}


# -- a rank that stops reading -----------------------------------------------------------------------------------------

MEGABYTE = [2**30] * 199_000
"""Five bytes each on the wire."""


async def flood(group: Requests, count: int, prompt: Sequence[int]) -> tuple[list[Stream], int]:
    """So many large requests for rank 0. Returns the streams of those taken, and how many were not."""
    taken: list[Stream] = []
    for _ in range(count):
        request = EngineCoreRequest(prompt, SamplingParams(max_tokens=1), data_parallel_rank=0)
        try:
            taken.append(await group.submit(request))
        except Overloaded as error:
            assert (error.limit_name, error.rank) == ("outbox_limit", 0)
    return taken, count - len(taken)


async def work_elsewhere(group: Requests, count: int) -> float:
    """Requests for rank 1, one after the other. Returns the longest that one took to be submitted, seconds."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        stream = await group.submit(ask(2, 1))
        took.append(time.perf_counter() - began)
        with trio.fail_after(NOTICED):
            assert await collect(stream) == tokens_of(7, 2)
    return max(took)


@pytest.mark.slow
async def test_a_rank_that_stops_reading_holds_up_nobody_else_and_loses_nothing_if_it_reads_on(figure: Figure) -> None:
    limits: dict[str, Any] = {"outbox_limit": 64 * 2**20, "send_timeout": 60.0, "stall_timeout": None}
    async with serve(2, lockstep=False, send_hwm=5, guard=180, **limits) as (group, mocks):
        mocks.freeze(0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work_elsewhere, group, 100)
            taken, refused = await flood(group, 200, MEGABYTE)
        assert taken
        assert refused  # its outbox is full
        assert group.statistics().ranks[0].outbox_bytes <= 64 * 2**20
        figure("submits elsewhere while a rank does not read, longest", await work_elsewhere(group, 100), "s")
        mocks.thaw(0)
        for stream in taken:
            with trio.fail_after(60):
                assert await collect(stream) == tokens_of(2**30, 1)
        counts = (await group.call_utility("mock_counts"))[0]
        assert isinstance(counts, dict)
        assert counts["Add"] == len(taken) == group.statistics().ranks[0].counts.adds


@pytest.mark.slow
async def test_a_rank_that_does_not_read_on_in_time_is_lost_as_a_whole_and_alone(figure: Figure) -> None:
    limits: dict[str, Any] = {"outbox_limit": 2**20, "send_timeout": 2.0, "stall_timeout": None}
    async with serve(2, lockstep=False, send_hwm=2, **limits) as (group, mocks):
        mocks.freeze(0)
        frozen = time.perf_counter()
        taken, refused = await flood(group, 20, MEGABYTE[:40_000])
        assert taken
        assert refused
        await all_fail(taken, FaultKind.SEND_TIMEOUT, rank=0)
        figure("a rank that does not read: given up after send_timeout=2", time.perf_counter() - frozen, "s")
        assert group.statistics().ranks[0].outbox_bytes == 0
        assert await collect(await group.submit(ask(3))) == tokens_of(7, 3)


async def test_a_rank_that_does_not_read_for_a_while_catches_up() -> None:
    async with serve(2, lockstep=False) as (group, _):
        await inject(group, Faults(unread=0.5), ranks=[0])
        began = time.perf_counter()
        streams = [await group.submit(ask(3, 0)) for _ in range(20)]
        for stream in streams:
            assert await collect(stream) == tokens_of(7, 3)
        assert time.perf_counter() - began > 0.2


# -- a rank that is late -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lockstep", [True, False])
async def test_messages_that_come_late_and_unevenly_change_nothing_but_the_time(lockstep: bool) -> None:
    async with serve(2, lockstep=lockstep) as (group, _):
        await inject(group, Faults(delay=0.1, jitter=0.2))
        for _ in range(3):
            began = time.perf_counter()
            streams = [await group.submit(ask(20, rank)) for rank in (0, 1)]
            for stream in streams:
                assert await collect(stream) == tokens_of(7, 20)
            assert time.perf_counter() - began > 0.1
        await group.wait_parked()


# -- messages that cannot be read --------------------------------------------------------------------------------------


async def test_an_output_that_cannot_be_read_ends_its_own_request_alone() -> None:
    async with serve(2, step_time=0.01) as (group, _):
        first = await group.submit(ask(LONG, 0, prompt=1))
        await first.receive()
        second = await group.submit(ask(50, 0, prompt=2))
        await inject(group, Faults(damaged_outputs=1), ranks=[0])  # the first of a message
        with trio.fail_after(NOTICED), pytest.raises(WireError):
            await collect(first)
        assert await collect(second) == tokens_of(2, 50)
        await group.wait_parked()
        assert group.fault is None


async def test_after_a_message_that_cannot_be_read_no_stream_of_its_rank_goes_on_as_if_nothing_was_lost() -> None:
    """It may have held tokens, or the last output, of any of them: a clean end would be a lie, and no end a hang."""
    async with serve(2, lockstep=False, step_time=0.005) as (group, _):
        concerned = [await group.submit(ask(200, 0, prompt=prompt)) for prompt in range(5)]
        others = [await group.submit(ask(200, 1, prompt=prompt)) for prompt in range(5)]
        for stream in concerned:
            await stream.receive()
        await inject(group, Faults(torn=1), ranks=[0])
        for stream in concerned:
            with trio.fail_after(NOTICED), pytest.raises(WireError):
                await collect(stream)
        for prompt, stream in enumerate(others):
            assert await collect(stream) == tokens_of(prompt, 200)
        assert await collect(await group.submit(ask(3, 0))) == tokens_of(7, 3)


async def test_a_final_output_in_a_message_that_cannot_be_read_leaves_nobody_waiting() -> None:
    async with serve(1, lockstep=False) as (group, _):
        await inject(group, Faults(torn=1))
        stream = await group.submit(ask(1))
        with trio.fail_after(NOTICED), pytest.raises(WireError):
            await collect(stream)
        assert await collect(await group.submit(ask(3))) == tokens_of(7, 3)


@pytest.mark.parametrize("fault", [Faults(torn=1), Faults(junk=[b"\xc1"])], ids=["torn", "junk"])
async def test_a_message_of_a_lockstep_rank_that_cannot_be_read_fails_the_group_with_the_versions(
    fault: Faults, figure: Figure
) -> None:
    async with serve(2) as (group, _):
        streams = [await group.submit(ask(LONG, rank)) for rank in (0, 1)]
        for stream in streams:
            await stream.receive()
        began = time.perf_counter()
        await inject(group, fault, ranks=[1])
        await all_fail(streams, FaultKind.UNDECODABLE, rank=1)
        figure("an unreadable message in lockstep, noticed", time.perf_counter() - began, "s")
        assert "0.32.0" in str(group.fault)


async def test_an_independent_rank_of_which_nothing_can_be_read_is_lost_and_the_error_shows_the_versions() -> None:
    async with serve(2, lockstep=False) as (group, _):
        await inject(group, Faults(torn=10**9), ranks=[0])
        with trio.fail_after(30):
            while phase(group, 0) is not RankPhase.LOST:
                with pytest.raises((WireError, RankFailed)):
                    await collect(await group.submit(ask(20, 0)))
        error = await fails(lambda: group.submit(ask(1, 0)), FaultKind.UNDECODABLE, rank=0)
        assert "0.32.0" in str(error)
        assert await collect(await group.submit(ask(3))) == tokens_of(7, 3)


async def test_a_load_report_that_makes_no_sense_costs_nothing() -> None:
    async with serve(2) as (group, _):
        await inject(group, Faults(damaged_stats=50))
        assert await collect(await group.submit(ask(60))) == tokens_of(7, 60)
        await group.wait_parked()
        assert sum(each.damaged for each in group.statistics().ranks) >= 50


# -- strangers ---------------------------------------------------------------------------------------------------------


async def test_a_second_engine_with_the_name_of_a_live_one_is_not_heard_and_its_going_is_nobodys_death() -> None:
    async with serve(2, step_time=0.005) as (group, _):
        link = group._coordinator.drivers[1]._link
        assert isinstance(link, zmq_link.ZmqRankLink)
        stream = await group.submit(ask(100, 1))
        twin = EngineRank(1, size=2)
        with zmq.Context() as context:
            requests, outputs = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
            requests.set(zmq.ROUTING_ID, twin.identity)
            requests.connect(link.input_endpoint)
            outputs.connect(link.output_endpoint)
            requests.send(twin.registration())
            for lie in ([DEAD], twin.message(wave_done=0), twin.message(wave_asked=7), [b"\xc1"]):
                outputs.send_multipart(lie)
            await until(lambda: group.statistics().ranks[1].dropped >= 4)
            context.destroy(linger=0)
        assert await collect(stream) == tokens_of(7, 100)
        await group.wait_parked()
        assert group.fault is None
        assert await collect(await group.submit(ask(3, 1))) == tokens_of(7, 3)


# -- readers -----------------------------------------------------------------------------------------------------------


async def test_a_reader_that_never_reads_loses_its_own_request_while_ten_others_finish() -> None:
    async with serve(2, unread_limit=500, step_time=0.001) as (group, _):
        sleeper = await group.submit(ask(LONG, 0))
        others = [await group.submit(ask(400, prompt=prompt)) for prompt in range(10)]  # too short to overflow
        read: dict[int, list[int]] = {}

        async def follow(prompt: int, stream: Stream) -> None:
            read[prompt] = await collect(stream)

        async with trio.open_nursery() as nursery:
            for prompt, stream in enumerate(others):
                nursery.start_soon(follow, prompt, stream)
        assert read == {prompt: tokens_of(prompt, 400) for prompt in range(10)}
        await group.wait_parked()  # so the sleeper's was aborted on the engine too
        await sleeper.receive()
        with pytest.raises(StreamOverflow, match="500"):
            await sleeper.receive()
        told = await group.call_utility("mock_state")
        assert all(isinstance(state, dict) and state["held"] == () for state in told.values())


# -- ranks that shut down ----------------------------------------------------------------------------------------------


async def test_a_rank_that_refuses_new_work_finishes_what_it_has_and_is_not_asked_again() -> None:
    async with serve(2, lockstep=False, step_time=0.005) as (group, _):
        old = await group.submit(ask(60, 0))
        await old.receive()
        await inject(group, Faults(refuse=True), ranks=[0])
        async with await group.submit(ask(5, 0)) as refused:
            output = await refused.receive()
            assert output.finish_reason is FinishReason.ABORT
            assert output.token_ids == ()
        with pytest.raises(UtilityFailed, match="shutting down"):
            await group.call_utility("is_sleeping", ranks=[0])
        await until(lambda: phase(group, 0) is RankPhase.DRAINING)
        for _ in range(6):
            async with await group.submit(ask(2)) as stream:
                assert stream.rank == 1
        with pytest.raises(RequestRejected):
            await group.submit(ask(1, 0))
        assert (await collect(old))[-1] == tokens_of(7, 60)[-1]
        await inject(group, Faults(refuse=True), ranks=[1])
        with pytest.raises(UtilityFailed):
            await group.call_utility("is_sleeping", ranks=[1])
        await until(lambda: phase(group, 1) is RankPhase.DRAINING)
        with pytest.raises(GroupClosed):
            await group.submit(ask(1))
