"""What leaves for the ranks, in which order, and what comes of what they say. The engines move only when told to."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio
import trio.testing

from lockstep_trio.core import Load, RankDraining, RankPhase
from lockstep_trio.engines.protocol import Batch, Frame, LoadReport
from lockstep_trio.engines.vllm import FinishReason
from lockstep_trio.errors import (
    FaultKind,
    GroupClosed,
    GroupFailed,
    Overloaded,
    RankFailed,
    RequestRejected,
    StreamOverflow,
    WireError,
)
from lockstep_trio.runtime.coordinator import Submission
from lockstep_trio.runtime.rank import DAMAGE_BUDGET
from lockstep_trio.testing.rank_model import Add, Call, Drop, StartWave
from runtime.kit import (
    NOT_STEP_1,
    Outcome,
    Stream,
    aborts_of,
    ask,
    cancelling,
    follow,
    read,
    rest,
    rig,
    tokens,
    unsent,
    waves_of,
)

ABORT = 2
"""The engine's number for ``FinishReason.ABORT``."""

# -- waking ------------------------------------------------------------------------------------------------------


async def test_the_first_submit_sends_its_add_and_then_wakes_everybody(nursery: trio.Nursery) -> None:
    async with rig(3, nursery=nursery) as r:
        stream = await r.group.submit(ask(1, rank=1))
        assert r.sent(1) == [Add(r.sent(1)[0].wire_id, 1), StartWave(0, None)]  # type: ignore[union-attr]
        assert r.sent(0) == r.sent(2) == [StartWave(0, None)]
        await stream.aclose()


async def test_submits_to_a_stepping_group_wake_nobody_and_take_the_short_way(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        first = await r.group.submit(ask(9, rank=0))
        second_is_there = False

        async def second() -> None:
            nonlocal second_is_there
            async with await r.group.submit(ask(9, rank=1)):
                second_is_there = True

        async with trio.open_nursery() as callers:
            callers.start_soon(second)
            await rest()
        assert second_is_there
        assert [waves_of(r.sim, rank) for rank in (0, 1) if r.sent(rank)] == [[0], [0]]
        await first.aclose()


async def test_a_drained_wave_is_followed_by_a_wake_with_the_next_number(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        for wave in range(3):
            async with await r.group.submit(ask(1, rank=wave % 2)) as stream:
                await r.settle()
                assert await read(stream) == tokens(1)
            assert waves_of(r.sim, 0) == waves_of(r.sim, 1) == list(range(wave + 1))
            assert r.group.statistics().ranks[1].counts.last_done == wave
        r.assert_nothing_left()


async def test_a_submit_that_overtakes_the_news_of_a_drain_is_woken_again(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        async with await r.group.submit(ask(1, rank=0)) as first:
            for rank in (0, 1):
                r.sim.deliver(rank)
                r.sim.ports[rank].outbound.hold()
                r.sim.poll(rank)
            r.sim.step()  # parked again, and nobody has heard of it
            async with await r.group.submit(ask(2, rank=1)) as second:
                assert waves_of(r.sim, 1) == [0]
                r.sim.deliver(1)
                r.sim.poll(1)  # alone in its collective
                for port in r.sim.ports:
                    port.outbound.release()
                await r.settle()
                assert await read(second) == tokens(2)
                assert waves_of(r.sim, 0) == [0, 1]
            assert await read(first) == tokens(1)


async def test_outputs_of_one_rank_are_heard_before_its_done_and_swapped_ones_are_not(nursery: trio.Nursery) -> None:
    for swapped, waves in ((False, [0]), (True, [0, 1])):
        async with rig(nursery=nursery) as r, await r.group.submit(ask(1, rank=0)) as stream:
            for rank in (0, 1):
                r.sim.deliver(rank)
                r.sim.ports[rank].outbound.hold()
                r.sim.poll(rank)
            r.sim.step()
            if swapped:
                r.sim.ports[0].outbound._frames.reverse()
            r.sim.ports[0].outbound.release()
            await rest()
            r.sim.deliver(0)
            assert waves_of(r.sim, 0) == waves
            r.sim.ports[1].outbound.release()
            await r.settle()
            assert await read(stream) == tokens(1)


async def test_a_rank_that_asks_for_a_wave_is_answered_once_and_everybody_is(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        r.say(1, wave_asked=3)
        r.say(1, wave_asked=3)
        await rest()
        assert r.sent(0) == r.sent(1) == [StartWave(3, None)]
        await r.settle()
        r.assert_nothing_left()


async def test_wave_messages_of_independent_ranks_are_ignored_and_logged(
    nursery: trio.Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(lockstep=False, nursery=nursery) as r:
        caplog.set_level(logging.WARNING, "lockstep_trio")
        caplog.clear()
        async with await r.group.submit(ask(2, rank=0)) as stream:
            r.say(1, wave_asked=4)
            r.say(0, wave_done=0)
            await r.settle()
            assert await read(stream) == tokens(2)
        state = r.group.statistics().state
        assert (state.clock, state.stepping, state.last_start) == (None, False, None)
        assert [r.kinds(rank) for rank in (0, 1)] == [["Add"], []]
    assert sorted(record.args[0] for record in caplog.records) == [0, 1]  # type: ignore[index, type-var]


# -- leaving -----------------------------------------------------------------------------------------------------


async def test_leaving_before_the_first_output_sends_abort_and_fence_and_leaving_after_it_no_fence(
    nursery: trio.Nursery,
) -> None:
    async with rig(nursery=nursery) as r:
        unproven = await r.group.submit(ask(50, rank=0))
        proven = await r.group.submit(ask(50, rank=1))
        r.sim.ports[0].outbound.hold()
        await r.move()
        await r.move()
        await unproven.aclose()
        await proven.aclose()
        await rest()
        assert r.kinds(0) == ["Add", "StartWave", "Drop", "Call"]
        assert r.kinds(1) == ["StartWave", "Add", "Drop"] or r.kinds(1) == ["Add", "StartWave", "Drop"]
        assert r.group.statistics().state.ranks[0].fence_pending
        r.sim.ports[0].outbound.release()
        await r.settle()
        r.assert_nothing_left()
        assert set(aborts_of(r.sim).values()) == {1}


async def test_a_finished_request_is_never_aborted(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        unread = await r.group.submit(ask(2))
        await r.settle()
        await unread.aclose()
        await r.settle()
        assert aborts_of(r.sim) == {unread._buffer.wire_id: 0}
        r.assert_nothing_left()


async def test_a_dropped_stream_is_aborted_on_the_engine(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        stream = await r.group.submit(ask(50))
        with pytest.warns(ResourceWarning, match="dropped without being closed"):
            del stream
        await r.settle()
        assert list(aborts_of(r.sim).values()) == [1]
        r.assert_nothing_left()


async def test_an_overflow_ends_that_stream_with_one_abort_and_the_others_go_on(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery, unread_limit=10, sync=NOT_STEP_1) as r:
        stalled = await r.group.submit(ask(500, rank=0, name="stalled"))
        outcome = Outcome()
        nursery.start_soon(follow, await r.group.submit(ask(100, rank=0)), outcome)
        await r.settle()
        assert (outcome.tokens, outcome.finished, outcome.error) == (tokens(100), True, None)
        merged = await stalled.receive()  # what came before is still there, and no more than that
        assert list(merged.token_ids) == tokens(500)[:11]
        with pytest.raises(StreamOverflow) as caught:
            await stalled.receive()
        assert (caught.value.request_id, caught.value.limit) == ("stalled", 10)
        await stalled.aclose()
        await r.settle()
        assert sorted(aborts_of(r.sim).values()) == [0, 1]
        r.assert_nothing_left()


async def test_what_arrives_for_a_request_that_was_left_is_counted_and_proves_it(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        stream = await r.group.submit(ask(5, rank=0))
        r.sim.ports[0].outbound.hold()
        await r.move()
        await r.move()  # the first output is under way
        await stream.aclose()
        await rest()
        assert r.group.statistics().state.ranks[0].unproven == 1
        r.sim.ports[0].outbound.let(1)
        await rest()
        assert r.group.statistics().state.ranks[0].unproven == 0
        assert r.group.statistics().ranks[0].counts.strays == 1
        r.sim.ports[0].outbound.release()
        await r.settle()
        r.assert_nothing_left()


async def test_a_rank_cannot_speak_for_another(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r, await r.group.submit(ask(3, rank=0)) as stream:
        r.say(1, outputs=[[stream._buffer.wire_id, [666], None, None, None, 1]])
        await r.settle()
        assert await read(stream) == tokens(3)
        assert r.group.statistics().ranks[1].counts.strays == 1


# -- ids ---------------------------------------------------------------------------------------------------------


async def test_a_callers_id_that_is_in_flight_is_refused_before_anything_is_sent(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r, await r.group.submit(ask(9, name="x")) as stream:
        before = [r.kinds(0), r.kinds(1)]
        with pytest.raises(RequestRejected, match="request_id is 'x'"):
            await r.group.submit(ask(9, name="x"))
        assert [r.kinds(0), r.kinds(1)] == before
        assert r.group.statistics().state.in_flight == 1
        assert stream.request_id == "x"


async def test_of_two_that_submit_one_id_at_the_same_moment_one_is_refused(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        ends: list[str] = []

        async def submit() -> None:
            try:
                async with await r.group.submit(ask(1, name="x")):
                    ends.append("admitted")
                    await trio.sleep_forever()
            except RequestRejected:
                ends.append("refused")

        async with trio.open_nursery() as callers:
            callers.start_soon(submit)
            callers.start_soon(submit)
            await rest()
            callers.cancel_scope.cancel()
        assert sorted(ends) == ["admitted", "refused"]


async def test_an_id_used_again_after_cancelling_is_another_one_on_the_wire(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        first = await r.group.submit(ask(5, rank=0, name="x"))
        r.sim.ports[0].outbound.hold()
        await r.move()
        await r.move()  # outputs of the first are under way
        await first.aclose()
        async with await r.group.submit(ask(2, rank=0, name="x")) as second:
            r.sim.ports[0].outbound.release()
            await r.settle()
            assert await read(second) == tokens(2)
        old, new = (message.wire_id for message in r.sent(0) if isinstance(message, Add))
        assert old != new
        assert aborts_of(r.sim) == {old: 1, new: 0}
        r.assert_nothing_left()


# -- admission ---------------------------------------------------------------------------------------------------


async def test_a_submit_that_is_cancelled_before_the_coordinators_turn_sends_nothing(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        with cancelling(2) as scope:  # its second checkpoint is the wait for the coordinator, which has it in hand
            await r.group.submit(ask(5, name="x"))
        assert scope.cancelled_caught
        await rest()
        assert r.kinds(0) == r.kinds(1) == []
        r.assert_nothing_left()
        async with await r.group.submit(ask(1, name="x")):  # the id is free
            pass


async def test_a_submit_that_was_admitted_returns_its_stream_although_it_is_cancelled(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        scope = trio.CancelScope()
        answer = r.coordinator._answer

        def answer_and_cancel(submission: Submission) -> None:
            answer(submission)
            scope.cancel()

        r.coordinator._answer = answer_and_cancel  # type: ignore[method-assign]
        with scope:
            stream = await r.group.submit(ask(5))
            await stream.aclose()
        assert scope.cancelled_caught
        await r.settle()
        assert list(aborts_of(r.sim).values()) == [1]
        r.assert_nothing_left()


async def test_a_submit_that_is_cancelled_between_its_add_and_its_wake_is_woken_and_aborted(
    nursery: trio.Nursery,
) -> None:
    async with rig(nursery=nursery) as r:
        queue = r.coordinator.drivers[0].queue

        def cancel_and_queue(frames: Sequence[Frame]) -> None:  # as a finalizer might, that runs in the middle
            scope.cancel()
            queue(frames)

        with trio.CancelScope() as scope:
            r.coordinator.drivers[0].queue = cancel_and_queue  # type: ignore[method-assign]
            await r.group.submit(ask(5, rank=0))
        assert scope.cancelled_caught
        await rest()
        assert r.kinds(0) == ["Add", "StartWave", "Drop", "Call"]
        await r.settle()
        r.assert_nothing_left()


async def test_full_links_delay_the_frames_and_not_the_submit_and_keep_their_order(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery, capacity=1) as r:
        streams = [await r.group.submit(ask(3, rank=0, name=str(n))) for n in range(4)]
        assert r.group.statistics().ranks[0].outbox_bytes > 0
        assert r.group.statistics().ranks[1].outbox_bytes == 0
        await rest()
        await r.settle()
        assert [await read(stream) for stream in streams] == [tokens(3)] * 4
        adds = [each.wire_id.partition("#")[0] for each in r.sent(0) if isinstance(each, Add)]
        assert adds == ["0", "1", "2", "3"]
        assert r.kinds(0)[:2] == ["Add", "StartWave"]
        await r.settle()
        r.assert_nothing_left()


async def test_beyond_the_bounds_submit_says_so_at_once_and_nothing_is_sent(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery, max_in_flight=2, outbox_limit=200, capacity=0) as r:
        streams = [await r.group.submit(ask(1, rank=0))]
        with pytest.raises(Overloaded) as caught:
            for _ in range(9):
                streams.append(await r.group.submit(ask(1, rank=0)))
        assert caught.value.limit_name in {"outbox_limit", "max_in_flight"}
        before = r.coordinator.counts[0].adds
        with pytest.raises(Overloaded):
            await r.group.submit(ask(1, rank=0))
        assert r.coordinator.counts[0].adds == before == len(streams)
        for stream in streams:
            await stream.aclose()
        for link in r.sim.link.ranks:
            link.capacity = None
            link.wake()
        await r.settle()
        r.assert_nothing_left()


async def test_streams_that_were_closed_make_room_at_once_for_as_many_others(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery, max_in_flight=3) as r:
        streams = [await r.group.submit(ask(50)) for _ in range(3)]
        with pytest.raises(Overloaded, match="max_in_flight=3"):
            await r.group.submit(ask(50))
        for stream in streams:
            stream.close()
        again = []

        async def submit() -> None:
            again.append(await r.group.submit(ask(50)))

        async with trio.open_nursery() as callers:  # all three before the coordinator has seen all three aborts
            for _ in range(3):
                callers.start_soon(submit)
        for stream in again:
            stream.close()
        await r.settle()
        r.assert_nothing_left()


async def test_a_pinned_rank_is_authoritative_and_refused_if_it_is_not_in_the_group(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        for _ in range(3):
            async with await r.group.submit(ask(5, rank=1)) as stream:
                assert stream.rank == 1
        with pytest.raises(RequestRejected, match="data_parallel_rank is 2"):
            await r.group.submit(ask(5, rank=2))


async def test_load_that_ranks_report_is_known_to_the_next_submit(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        r.say(0, stats={"num_running_reqs": 50, "num_waiting_reqs": 9, "kv_cache_usage": 0.9})
        await rest()
        streams = [await r.group.submit(ask(1)) for _ in range(5)]
        assert {stream.rank for stream in streams} == {1}
        for stream in streams:
            await stream.aclose()


async def test_a_draining_rank_gets_nothing_new(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        r.coordinator.post(RankDraining(0))
        await rest()
        streams = [await r.group.submit(ask(1)) for _ in range(3)]
        assert {stream.rank for stream in streams} == {1}
        with pytest.raises(RequestRejected, match="draining"):
            await r.group.submit(ask(1, rank=0))
        r.coordinator.post(RankDraining(1))
        await rest()
        with pytest.raises(GroupClosed, match="draining or lost"):
            await r.group.submit(ask(1))
        await r.settle()
        assert [await read(stream) for stream in streams] == [tokens(1)] * 3


# -- losses ------------------------------------------------------------------------------------------------------


async def test_a_wake_that_cannot_reach_one_rank_still_reaches_the_others_and_the_request_is_taken_back() -> None:
    async with rig(3) as r:
        r.sim.ports[1].connected = False  # and no disconnect was noticed yet
        with pytest.raises(GroupFailed) as caught:
            await r.group.submit(ask(5, rank=0))
        assert (caught.value.rank, caught.value.fault.kind) == (1, FaultKind.UNREACHABLE)
        assert r.kinds(0) == ["Add", "StartWave", "Drop"]
        assert r.kinds(2) == ["StartWave"]
        assert not r.coordinator._buffers
        assert r.group.statistics().state.in_flight == 0
        with pytest.raises(GroupFailed) as again:
            await r.group.submit(ask(5))
        assert again.value.fault == caught.value.fault


async def test_an_add_that_cannot_reach_an_independent_rank_fails_that_request_and_that_rank_alone() -> None:
    async with rig(lockstep=False) as r:
        r.sim.ports[1].connected = False
        with pytest.raises(RankFailed) as caught:
            await r.group.submit(ask(2, rank=1))
        assert (caught.value.rank, caught.value.fault.kind) == (1, FaultKind.UNREACHABLE)
        with pytest.raises(RankFailed):
            await r.group.submit(ask(2, rank=1))
        for _ in range(2):
            async with await r.group.submit(ask(2)) as stream:
                assert stream.rank == 0
                await r.settle()
                assert await read(stream) == tokens(2)


async def test_every_stream_of_a_lockstep_group_raises_when_one_rank_is_lost() -> None:
    async with rig(sync=NOT_STEP_1) as r:
        outcomes = [Outcome() for _ in range(4)]
        async with trio.open_nursery() as readers:
            for number, outcome in enumerate(outcomes):
                readers.start_soon(follow, await r.group.submit(ask(50, rank=number % 2)), outcome)
            for _ in range(4):
                await r.move()
            r.sim.kill(1)
        for outcome in outcomes:
            assert isinstance(outcome.error, GroupFailed)
            assert (outcome.error.rank, outcome.error.fault.kind) == (1, FaultKind.DISCONNECTED)
            assert outcome.tokens == tokens(50)[: len(outcome.tokens)]
            assert outcome.tokens
        assert r.kinds(0).count("Drop") == 1  # the survivor is told to let go
        assert r.group.statistics().state.in_flight == 0


async def test_a_final_output_that_came_before_the_loss_is_still_a_clean_end() -> None:
    async with rig() as r:
        stream = await r.group.submit(ask(1))
        for rank in (0, 1):
            r.sim.deliver(rank)
            r.sim.poll(rank)
        r.sim.step()
        r.sim.kill(stream.rank)
        await rest()
        assert await read(stream) == tokens(1)
        with pytest.raises(GroupFailed):
            await r.group.submit(ask(1))


async def test_a_final_output_that_came_before_a_send_found_nobody_is_still_a_clean_end() -> None:
    async with rig() as r:
        stream = await r.group.submit(ask(1, rank=0))
        for rank in (0, 1):
            r.sim.deliver(rank)
            r.sim.poll(rank)
        r.sim.step()
        r.sim.ports[0].connected = False  # all in one instant, the ranks' tasks have had no turn
        with pytest.raises(GroupFailed) as caught:
            await r.group.submit(ask(1, rank=0))
        assert caught.value.fault.kind is FaultKind.UNREACHABLE
        assert await read(stream) == tokens(1)


async def test_the_engines_own_notice_of_death_fails_the_group() -> None:
    async with rig() as r:
        stream = await r.group.submit(ask(5))
        r.sim.ports[0].send((b"ENGINE_CORE_DEAD",))
        with pytest.raises(GroupFailed) as caught:
            await stream.receive()
        assert (caught.value.rank, caught.value.fault.kind) == (0, FaultKind.DIED)


async def test_a_wave_that_cannot_be_read_fails_a_lockstep_group_at_once() -> None:
    async with rig() as r:
        stream = await r.group.submit(ask(5))
        r.say(1, wave_done=-1)
        with pytest.raises(GroupFailed) as caught:
            await stream.receive()
        assert (caught.value.rank, caught.value.fault.kind) == (1, FaultKind.UNDECODABLE)


async def test_independent_ranks_fail_alone(nursery: trio.Nursery) -> None:
    async with rig(3, lockstep=False, nursery=nursery) as r:
        outcomes = [Outcome() for _ in range(3)]
        async with trio.open_nursery() as readers:
            for rank, outcome in enumerate(outcomes):
                readers.start_soon(follow, await r.group.submit(ask(9, rank=rank)), outcome)
            await r.move()
            r.sim.kill(1)
            await r.settle()
        assert isinstance(outcomes[1].error, RankFailed)
        assert outcomes[1].error.rank == 1
        assert [outcome.tokens for outcome in (outcomes[0], outcomes[2])] == [tokens(9)] * 2
        assert r.group.fault is None
        streams = [await r.group.submit(ask(1)) for _ in range(4)]
        assert {stream.rank for stream in streams} == {0, 2}
        for stream in streams:
            await stream.aclose()


async def test_a_rank_that_stops_reading_fails_the_group_by_name_while_others_get_their_frames(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with rig(3, capacity=1, send_timeout=5.0) as r:
        streams = [await r.group.submit(ask(9, rank=2))]
        for rank in (0, 2):
            r.sim.deliver(rank)
        begun = trio.current_time()
        streams.append(await r.group.submit(ask(9, rank=1)))
        with pytest.raises(GroupFailed) as caught:
            await streams[0].receive()
        assert (caught.value.rank, caught.value.fault.kind) == (1, FaultKind.SEND_TIMEOUT)
        assert trio.current_time() - begun == pytest.approx(5)
        r.sim.deliver(2)
        await rest()
        assert r.kinds(2) == ["Add", "StartWave", "Drop"]
        for stream in streams:
            await stream.aclose()


async def test_a_loss_found_while_the_group_is_being_left_ends_the_wait() -> None:
    with trio.fail_after(60):
        async with rig(close_grace=1e9) as r:
            stream = await r.group.submit(ask(5, rank=0))

            async def kill() -> None:
                await rest()
                assert [type(each) for each in r.sent(0)] == [Add, StartWave, Drop, Call]
                r.sim.kill(1)

            trio.lowlevel.spawn_system_task(kill)
    with pytest.raises(GroupClosed):
        await stream.receive()
    assert unsent(r.sim, 1) == []


# -- what only a bug, or a broken engine, brings about ------------------------------------------------------------


async def test_a_fence_reply_that_cannot_be_read_fails_the_rank_instead_of_waking_it_for_ever(
    nursery: trio.Nursery,
) -> None:
    async with rig(nursery=nursery, close_grace=1) as r:
        (await r.group.submit(ask(3, rank=0))).close()
        await rest()
        r.say(0, utility=["not a call id"])
        await rest()
        assert r.group.fault is not None
        assert r.group.fault.kind is FaultKind.UNDECODABLE


async def test_an_answer_nobody_awaits_may_be_unreadable(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        r.say(0, utility=["not a call id"])
        await rest()
        assert r.group.fault is None
        assert r.group.statistics().ranks[0].damaged == 1


async def test_a_newer_load_is_not_undone_by_one_that_came_with_a_final_output(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery, lockstep=False) as r:
        streams = [await r.group.submit(ask(50, rank=0)) for _ in range(2)]
        wire_id = streams[0]._buffer.wire_id
        raw = (wire_id, (1,), None, None, None, 1)
        r.coordinator.batch_came(0, Batch(outputs=[(wire_id, True, raw)], load=LoadReport(9, 9, 0.5)))
        r.coordinator.batch_came(0, Batch(load=LoadReport(0, 1, 0.1)))
        r.group.statistics()  # before the coordinator had a turn
        await rest()
        assert r.group.statistics().state.ranks[0].load == Load(0, 1, 0.1)
        for stream in streams:
            await stream.aclose()


async def test_an_effect_that_raises_in_the_callers_task_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    async with rig(nursery=nursery, lockstep=False) as r:
        with monkeypatch.context() as patch:
            patch.setattr(r.coordinator.drivers[0], "queue", lambda frames: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                await r.group.submit(ask(3, rank=0))
        await rest()
        assert r.group.statistics().state.in_flight == 0
        assert not r.coordinator._callers
        r.sim.kill(1)
        await rest()
        assert r.coordinator.drivers[1].fault is not None
        assert r.group.statistics().state.ranks[1].phase is RankPhase.LOST


async def test_whoever_waits_when_the_block_is_left_is_told_whatever_else_goes_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[str] = []

    async def note(function: Callable[[], Awaitable[object]]) -> None:
        try:
            await function()
        except GroupClosed:
            ends.append("closed")

    async with trio.open_nursery() as outer:
        with pytest.raises((ZeroDivisionError, ExceptionGroup)):
            async with rig(close_grace=0) as r:
                outer.start_soon(note, r.group.wait_failed)
                await rest()
                for _ in range(3):
                    outer.start_soon(note, lambda: r.group.submit(ask(3)))
                await trio.lowlevel.checkpoint()
                monkeypatch.setattr(r.coordinator.machine.__class__, "handle", lambda *_: 1 // 0)
        await rest()
        assert ends.count("closed") == 4


# -- what cannot be read ---------------------------------------------------------------------------------------------


async def test_a_request_of_which_an_output_cannot_be_read_ends_alone_with_both_versions_and_is_aborted(
    nursery: trio.Nursery,
) -> None:
    async with rig(nursery=nursery) as r:
        spoilt, whole = [await r.group.submit(ask(3, rank=0)) for _ in range(2)]
        await r.move()
        wire_id = next(each for each, buffer in r.coordinator._buffers.items() if buffer is spoilt._buffer)
        r.say(0, outputs=[[wire_id, "not tokens"]])
        await rest()
        with pytest.raises(WireError, match=r"says it is vLLM 0\.32\.0; vLLM 0\.10 to 0\.33 is read here"):
            await read(spoilt)
        await r.settle()
        assert await read(whole) == tokens(3)
        assert aborts_of(r.sim)[wire_id] == 1
        assert sum(aborts_of(r.sim).values()) == 1
        assert r.group.statistics().ranks[0].damaged == 1
        r.assert_nothing_left()


@pytest.mark.parametrize("final", [False, True])
async def test_tokens_that_are_none_end_the_request_when_they_are_read(nursery: trio.Nursery, final: bool) -> None:
    async with rig(nursery=nursery) as r:
        stream = await r.group.submit(ask(3, rank=0))
        wire_id = next(iter(r.coordinator._buffers))
        r.say(0, outputs=[[wire_id, ["one"], None, None, None, 1 if final else None]])
        await rest()
        for _ in range(2):
            with pytest.raises(WireError, match="not all integers"):
                await stream.receive()
            await r.settle()
        assert list(aborts_of(r.sim).values()) == [0 if final else 1]


async def test_an_unreadable_output_of_a_request_that_nobody_awaits_is_a_stray(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        stream = await r.group.submit(ask(1, rank=0))
        wire_id = next(iter(r.coordinator._buffers))
        r.say(1, outputs=[[wire_id, "from the wrong rank"], ["of nobody", None]])
        await rest()
        assert r.group.statistics().ranks[1].counts.strays == 2
        await r.settle()
        assert await read(stream) == tokens(1)


async def test_outputs_without_a_name_end_every_request_of_their_rank_because_it_cannot_be_told_whose_they_were(
    nursery: trio.Nursery,
) -> None:
    async with rig(nursery=nursery) as r:
        concerned = [await r.group.submit(ask(2, rank=0)) for _ in range(2)]
        other = await r.group.submit(ask(2, rank=1))
        await r.move()
        r.say(0, outputs=[[7]])
        await rest()
        for stream in concerned:
            with pytest.raises(WireError, match=r"says it is vLLM 0\.32\.0"):
                await read(stream)
        await r.settle()
        assert await read(other) == tokens(2)
        assert sorted(aborts_of(r.sim).values()) == [0, 1, 1]
        async with await r.group.submit(ask(1, rank=0)) as stream:
            await r.settle()
            assert await read(stream) == tokens(1)
        r.assert_nothing_left()


async def test_outputs_without_a_name_fail_the_rank_once_there_are_too_many_in_a_row(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        for _ in range(DAMAGE_BUDGET + 1):
            assert r.group.fault is None
            stream = await r.group.submit(ask(1, rank=0))
            r.say(0, outputs=[[7]])
            await rest()
            with pytest.raises((WireError, GroupFailed)) as caught:
                await stream.receive()
        assert isinstance(caught.value, GroupFailed)
        assert caught.match(r"rank 0 undecodable.*says it is vLLM 0\.32\.0")


async def test_a_message_of_an_independent_rank_that_cannot_be_read_at_all_ends_its_requests_and_no_others(
    nursery: trio.Nursery,
) -> None:
    async with rig(lockstep=False, nursery=nursery) as r:
        concerned, other = [await r.group.submit(ask(2, rank=rank)) for rank in (0, 1)]
        r.sim.ports[0].send([b"\xc1"])
        with pytest.raises(WireError):
            await concerned.receive()
        await r.settle()
        assert await read(other) == tokens(2)


# -- shutting down ---------------------------------------------------------------------------------------------------


async def test_a_rank_that_refuses_a_request_is_asked_and_if_it_shuts_down_gets_nothing_new(
    nursery: trio.Nursery,
) -> None:
    async with rig(lockstep=False, nursery=nursery) as r:
        refused = await r.group.submit(ask(3, rank=0))
        wire_id = next(iter(r.coordinator._buffers))
        r.sim.ports[0].inbound.clear()
        r.say(0, outputs=[[wire_id, [], None, None, None, ABORT]])
        await rest()
        output = await refused.receive()
        assert output.finish_reason is FinishReason.ABORT
        (call,) = r.sent(0)
        assert isinstance(call, Call)
        r.say(0, utility=[call.call_id, "Server shutting down", None])
        await rest()
        assert r.group.statistics().state.ranks[0].phase is RankPhase.DRAINING
        streams = [await r.group.submit(ask(1)) for _ in range(3)]
        assert {stream.rank for stream in streams} == {1}
        await r.settle()


async def test_an_abort_by_the_engine_that_is_no_refusal_changes_nothing(nursery: trio.Nursery) -> None:
    async with rig(lockstep=False, nursery=nursery) as r:
        streams = []
        for output in ([[5], None, None, None, ABORT], [[], None, None, None, 3]):  # with a token; an error
            streams.append(await r.group.submit(ask(3, rank=0)))
            wire_id = next(iter(r.coordinator._buffers))
            r.sim.ports[0].inbound.clear()
            r.say(0, outputs=[[wire_id, *output]])
            await rest()
        assert r.sent(0) == []
        # And one that is answered well: aborted by a pause, say.
        streams.append(await r.group.submit(ask(3, rank=0)))
        wire_id = next(iter(r.coordinator._buffers))
        r.sim.ports[0].inbound.clear()
        r.say(0, outputs=[[wire_id, [], None, None, None, ABORT]])
        await r.settle()
        assert r.group.statistics().state.ranks[0].phase is RankPhase.SERVING


# -- draining --------------------------------------------------------------------------------------------------------


async def test_draining_takes_nothing_new_and_returns_when_everything_has_ended(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        stream = await r.group.submit(ask(3, rank=0))
        drained = trio.Event()

        async def drain() -> None:
            await r.group.drain()
            drained.set()

        nursery.start_soon(drain)
        await rest()
        with pytest.raises(GroupClosed):
            await r.group.submit(ask(1))
        await r.move()
        assert not drained.is_set()
        await r.settle()
        assert drained.is_set()
        assert await read(stream) == tokens(3)
        assert aborts_of(r.sim) == dict.fromkeys(aborts_of(r.sim), 0)
        r.assert_nothing_left()


async def test_a_drain_that_is_given_up_still_takes_nothing_new_and_leaving_aborts_the_rest(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async with rig(nursery=nursery) as r:
        stream = await r.group.submit(ask(3, rank=0))
        with trio.move_on_after(5) as scope:
            await r.group.drain()
        assert scope.cancelled_caught
        with pytest.raises(GroupClosed):
            await r.group.submit(ask(1))
    with pytest.raises(GroupClosed):
        await stream.receive()
    assert list(aborts_of(r.sim).values()) == [1]


async def test_a_group_that_is_lost_cannot_be_drained(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        async with await r.group.submit(ask(3, rank=0)):
            r.sim.kill(1)
            with pytest.raises(GroupFailed):
                await r.group.drain()


# -- what people are told --------------------------------------------------------------------------------------------


async def test_a_dump_has_a_line_for_the_group_and_one_per_rank(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        assert "no START yet" in r.group.dump()
        streams = [await r.group.submit(ask(5, rank=0, name=f"r{number}")) for number in range(10)]
        await r.move()
        streams.append(await r.group.submit(ask(5, rank=1, name="late")))
        group, first, second = r.group.dump().splitlines()
        assert "2 lockstep ranks, open; 11 requests in flight; clock 0, stepping; last START(0)" in group
        assert "rank 0 serving" in first
        assert "holds 10: r0#" in first
        assert "and 2 more" in first
        assert "nothing came back" not in first
        assert "1 ADDs" in second
        assert "1 unproven" in second
        assert "(nothing came back)" in second
        await r.settle()
        assert r.group.dump().count("holds nothing") == 2
        assert r.group.post_mortem is None


async def test_an_unknown_vocabulary_is_mentioned_once(nursery: trio.Nursery, caplog: pytest.LogCaptureFixture) -> None:
    async with rig(nursery=nursery) as r:
        for _ in range(3):
            await (await r.group.submit(ask(1))).aclose()
    assert [record.levelname for record in caplog.records if "vocab_size" in record.message] == ["WARNING"]


async def test_an_id_that_is_made_is_never_that_of_a_request_in_flight(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        named = [await r.group.submit(ask(1, name=f"request-{number}")) for number in range(2, 6)]
        made = await r.group.submit(ask(1))
        assert made.request_id not in {stream.request_id for stream in named}
        await made.aclose()
        for stream in named:
            await stream.aclose()


# -- last words ------------------------------------------------------------------------------------------------------


def output_of(stream: Stream, token_ids: list[int], finish: int | None = None) -> list[object]:
    return [stream._buffer.wire_id, token_ids, None, None, None, finish]


async def test_the_last_words_of_a_rank_that_refuses_requests_keep_their_order() -> None:
    async with rig(lockstep=False) as r:
        refused, served = [await r.group.submit(ask(5, rank=0)) for _ in range(2)]
        r.say(0, outputs=[output_of(refused, [], ABORT), output_of(served, [1])])
        r.say(0, outputs=[output_of(served, [2])])
        r.say(0, outputs=[output_of(served, [3], 1)])
        r.sim.kill(0)
        assert await read(served) == [1, 2, 3]
        assert r.group.statistics().ranks[0].counts.strays == 0


async def test_a_rank_may_refuse_any_number_of_requests_with_its_last_words() -> None:
    async with rig(lockstep=False) as r:
        streams = [await r.group.submit(ask(5, rank=0)) for _ in range(1000)]
        for stream in streams:
            r.say(0, outputs=[output_of(stream, [], ABORT)])
        r.sim.kill(0)
        for stream in streams:
            assert (await stream.receive()).finish_reason is FinishReason.ABORT


async def test_a_send_that_finds_nobody_tells_how_the_connection_was_lost_if_that_is_known() -> None:
    async with rig(lockstep=False) as r:
        r.sim.ports[0].disconnect("nothing came for an hour", silent=True)
        with pytest.raises(RankFailed, match="nothing came for an hour") as caught:
            async with await r.group.submit(ask(1, rank=0)) as stream:  # which may have overtaken the news
                await stream.receive()
        assert caught.value.fault.kind is FaultKind.UNRESPONSIVE


async def test_a_last_output_behind_one_that_cannot_be_read_is_no_clean_end() -> None:
    async with rig(lockstep=False) as r:
        stream = await r.group.submit(ask(5, rank=0))
        r.say(0, outputs=[[stream._buffer.wire_id, "not tokens"], output_of(stream, [1], 1)])
        with pytest.raises(WireError):
            await stream.receive()


async def test_the_loss_of_an_independent_rank_is_told_with_that_rank_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with rig(5, lockstep=False) as r:
        r.sim.kill(3)
        await rest()
        assert r.group.post_mortem is not None
        assert [line[:7] for line in r.group.post_mortem.splitlines()] == ["5 indep", "rank 3 "]
