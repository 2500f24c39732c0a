"""What a user of a group sees: streams, calls, statistics, and the news that it failed."""

from __future__ import annotations

import attrs
import pytest
import trio
import trio.testing

from lockstep_trio.engines.vllm import EngineCoreRequest, FinishReason, RequestOutput
from lockstep_trio.errors import FaultKind, GroupClosed, GroupFailed, RankFailed, RequestRejected, UtilityFailed
from lockstep_trio.testing.rank_model import Call
from runtime.kit import ask, cancelling, read, rest, rig, tokens, unsent

# -- submit ------------------------------------------------------------------------------------------------------


async def test_tokens_arrive_whole_and_in_order_and_the_last_output_says_why_it_is_the_last(
    nursery: trio.Nursery,
) -> None:
    async with rig(nursery=nursery) as r, await r.group.submit(ask(5, name="mine")) as stream:
        outputs: list[RequestOutput] = []
        while not outputs or not outputs[-1].finished:
            await r.move()
            outputs.append(await stream.receive())
        assert [token for output in outputs for token in output.token_ids] == tokens(5)
        assert len(outputs) == 5  # the reader kept up
        assert {output.request_id for output in outputs} == {"mine"}
        assert outputs[-1].finish_reason is FinishReason.LENGTH


async def test_a_request_without_a_name_is_given_one_of_its_own(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        streams = [await r.group.submit(ask(1)) for _ in range(3)]
        assert len({stream.request_id for stream in streams}) == 3
        for stream in streams:
            await stream.aclose()


async def test_a_request_that_would_hurt_the_engine_is_refused_before_anything_is_sent(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        with pytest.raises(RequestRejected, match="prompt_token_ids"):
            await r.group.submit(EngineCoreRequest([]))
        assert not unsent(r.sim, 0)
        assert not unsent(r.sim, 1)
        r.assert_nothing_left()


async def test_submit_checkpoints_on_the_short_way_too(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        first = await r.group.submit(ask(5))
        with trio.testing.assert_checkpoints():
            second = await r.group.submit(ask(5))
        await first.aclose()
        await second.aclose()


async def test_the_engines_own_abort_and_error_are_visible_endings(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery, lockstep=False) as r:
        for number, reason in ((2, FinishReason.ABORT), (3, FinishReason.ERROR)):
            async with await r.group.submit(ask(5, rank=0)) as stream:
                r.say(0, outputs=[[stream._buffer.wire_id, [], None, None, None, number]])
                (output,) = [output async for output in stream]
                assert output.finish_reason is reason


# -- calls -------------------------------------------------------------------------------------------------------


async def test_a_call_returns_what_each_rank_returned_without_waking_anybody(nursery: trio.Nursery) -> None:
    async with rig(3, nursery=nursery) as r:
        results: dict[int, object] = {}

        async def call() -> None:
            results.update(await r.group.call_utility("is_sleeping"))

        async with trio.open_nursery() as callers:
            callers.start_soon(call)
            await rest()
            await r.settle()
        assert results == {0: False, 1: False, 2: False}
        assert [r.kinds(rank) for rank in range(3)] == [["Call"]] * 3
        r.assert_nothing_left()


async def test_a_call_to_some_ranks_goes_to_them_alone_each_once(nursery: trio.Nursery) -> None:
    async with rig(3, nursery=nursery) as r:
        r.run(nursery)
        assert await r.group.call_utility("is_sleeping", ranks=[2, 0, 2]) == {2: False, 0: False}
        assert [len(r.sim.ranks[rank].log) for rank in range(3)] == [1, 0, 1]


async def test_a_call_to_no_rank_returns_nothing(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        assert await r.group.call_utility("is_sleeping", ranks=[], timeout=None) == {}


async def test_a_failure_on_the_engine_is_told_in_its_own_words_per_rank(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        r.run(nursery)
        with pytest.raises(UtilityFailed) as caught:
            await r.group.call_utility("dance")
        assert caught.value.method == "dance"
        assert set(caught.value.failures) == {0, 1}
        assert "has no attribute 'dance'" in caught.value.failures[0]
        assert await r.group.call_utility("is_sleeping") == {0: False, 1: False}


@pytest.mark.parametrize("ranks", [[-1], [0, 2]])
async def test_a_call_to_a_rank_that_is_not_in_the_group_is_refused(nursery: trio.Nursery, ranks: list[int]) -> None:
    async with rig(nursery=nursery) as r:
        with pytest.raises(RequestRejected, match="ranks of the group, 0 to 1"):
            await r.group.call_utility("is_sleeping", ranks=ranks)
        with pytest.raises(RequestRejected):
            await r.group.call_utility("is_sleeping", object())
        with pytest.raises(ValueError, match="non-negative"):
            await r.group.call_utility("is_sleeping", timeout=-1)
        assert r.kinds(0) == r.kinds(1) == []
        r.assert_nothing_left()


async def test_a_call_that_is_not_answered_in_time_says_so_and_its_late_reply_is_ignored(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async with rig(nursery=nursery) as r:
        begun = trio.current_time()
        with pytest.raises(trio.TooSlowError):
            await r.group.call_utility("is_sleeping", timeout=7)
        assert trio.current_time() - begun == pytest.approx(7)
        await r.settle()
        r.assert_nothing_left()
        assert r.kinds(0) == ["Call"]


async def test_replies_that_nobody_waits_for_change_nothing(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        for call_id in (-1, -2, 4711):
            r.say(0, utility=[call_id, None, [None, True]])
        await rest()
        r.assert_nothing_left()
        r.run(nursery)
        assert await r.group.call_utility("is_sleeping") == {0: False, 1: False}


async def test_a_cancelled_call_leaves_no_entry_and_its_reply_is_ignored(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        with cancelling(2) as scope:
            await r.group.call_utility("is_sleeping")
        assert scope.cancelled_caught
        assert not any(driver._calls for driver in r.coordinator.drivers)
        await r.settle()
        assert r.kinds(0) == r.kinds(1) == ["Call"]
        r.assert_nothing_left()


async def test_a_rank_that_is_lost_while_a_lockstep_group_is_asked_fails_the_call() -> None:
    async with rig() as r:
        async with trio.open_nursery() as callers:
            callers.start_soon(expect_loss, r.group.call_utility, GroupFailed, 1)
            await rest()
            r.sim.kill(1)
        assert not any(driver._calls for driver in r.coordinator.drivers)
        with pytest.raises(GroupFailed) as caught:
            await r.group.call_utility("is_sleeping")
        assert caught.value.rank == 1


async def expect_loss(call: object, error: type[GroupFailed | RankFailed], rank: int) -> None:
    with pytest.raises(error) as caught:
        await call("is_sleeping", timeout=None)  # type: ignore[operator]
    assert caught.value.rank == rank


async def test_a_lost_independent_rank_fails_the_call_at_once_although_another_has_not_answered_yet(
    nursery: trio.Nursery,
) -> None:
    async with rig(lockstep=False, nursery=nursery) as r:
        async with trio.open_nursery() as callers:
            callers.start_soon(expect_loss, r.group.call_utility, RankFailed, 1)
            await rest()
            r.sim.kill(1)  # rank 0 stays silent
        await expect_loss(r.group.call_utility, RankFailed, 1)
        r.run(nursery)
        assert await r.group.call_utility("is_sleeping", ranks=[0]) == {0: False}


async def test_a_call_after_a_loss_that_the_machine_has_not_heard_of_yet_names_the_group() -> None:
    async with rig() as r:
        r.coordinator.drivers[0].lose(FaultKind.STALLED, "just now")
        with pytest.raises(GroupFailed):
            await r.group.call_utility("is_sleeping")


async def test_calls_and_submits_after_the_block_are_refused_even_if_it_never_settled(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with rig(close_grace=1) as r:
        (await r.group.submit(ask(5))).close()
    assert not r.coordinator.settled.is_set()
    for _ in range(2):
        with pytest.raises(GroupClosed):
            await r.group.call_utility("is_sleeping", timeout=None)
        with pytest.raises(GroupClosed):
            await r.group.submit(ask(5))


async def test_a_call_that_is_pending_when_the_group_closes_is_told_so(nursery: trio.Nursery) -> None:
    async with rig() as r:

        async def call() -> None:
            with pytest.raises(GroupClosed):
                await r.group.call_utility("is_sleeping")

        nursery.start_soon(call)
        await rest()


# -- the rest ----------------------------------------------------------------------------------------------------


async def test_wait_failed_returns_the_cause_at_once_and_again() -> None:
    async with rig() as r:
        assert r.group.fault is None
        with cancelling(1) as scope:
            await r.group.wait_failed()
        assert scope.cancelled_caught
        faults = []

        async def wait() -> None:
            faults.append(await r.group.wait_failed())

        async with trio.open_nursery() as waiters:
            for _ in range(2):
                waiters.start_soon(wait)
            await rest()
            r.sim.kill(1)
        await wait()
        assert {(fault.rank, fault.kind) for fault in faults} == {(1, FaultKind.DISCONNECTED)}
        assert r.group.fault == faults[0]


async def test_wait_failed_of_independent_ranks_returns_when_none_is_left() -> None:
    async with rig(lockstep=False) as r:
        r.sim.kill(1)
        await rest()
        assert r.group.fault is None
        with cancelling(1) as scope:
            await r.group.wait_failed()
        assert scope.cancelled_caught
        r.sim.kill(0)
        assert (await r.group.wait_failed()).rank == 0
        with pytest.raises(GroupFailed):
            await r.group.submit(ask(1))


async def test_wait_parked_returns_once_the_wave_is_drained_and_at_once_when_nothing_runs(
    nursery: trio.Nursery,
) -> None:
    async with rig(nursery=nursery) as r:
        with trio.testing.assert_checkpoints():
            await r.group.wait_parked()
        parked: list[int] = []

        async def wait() -> None:
            await r.group.wait_parked()
            parked.append(len(r.kinds(0)))

        async with await r.group.submit(ask(2)) as stream:
            async with trio.open_nursery() as waiters:
                for _ in range(2):
                    waiters.start_soon(wait)
                await rest()
                with cancelling(2) as scope:
                    await r.group.wait_parked()
                assert scope.cancelled_caught
                while r.group.statistics().state.stepping:
                    assert not parked
                    await r.move()
            assert len(parked) == 2
            assert await read(stream) == tokens(2)


async def test_wait_parked_raises_when_the_group_fails() -> None:
    async with rig() as r, await r.group.submit(ask(5)):
        async with trio.open_nursery() as waiters:

            async def wait() -> None:
                with pytest.raises(GroupFailed):
                    await r.group.wait_parked()

            waiters.start_soon(wait)
            await rest()
            r.sim.kill(0)
        await wait()


async def test_wait_parked_never_outlives_a_group_that_did_not_settle(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    closed: list[GroupClosed] = []

    async def wait() -> None:
        with pytest.raises(GroupClosed) as caught:
            await r.group.wait_parked()
        closed.append(caught.value)

    async with rig(close_grace=1) as r:
        (await r.group.submit(ask(5))).close()
        nursery.start_soon(wait)
        await rest()
    await rest()
    await wait()
    assert len(closed) == 2


async def test_statistics_are_a_picture_of_the_moment(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        assert r.group.lockstep
        assert [info.rank for info in r.group.infos] == [0, 1]
        before = r.group.statistics()
        async with await r.group.submit(ask(2, rank=1)) as stream:
            after = r.group.statistics()
            assert (before.state.in_flight, after.state.in_flight) == (0, 1)
            assert [rank.counts.adds for rank in before.ranks] == [0, 0]
            assert [rank.counts.adds for rank in after.ranks] == [0, 1]
            assert [rank.counts.starts for rank in after.ranks] == [1, 1]
            assert after.state.stepping
            await r.settle()
            assert await read(stream) == tokens(2)
        final = r.group.statistics()
        assert [rank.counts.outputs for rank in final.ranks] == [0, 2]
        assert [rank.counts.dones for rank in final.ranks] == [1, 1]
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            final.state = before.state  # type: ignore[misc]
        assert Call not in map(type, r.sent(0))


# -- parking -----------------------------------------------------------------------------------------------------


async def test_waiting_for_the_park_ends_with_the_done_and_not_with_the_last_output(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        parked = trio.Event()

        async def wait() -> None:
            await r.group.wait_parked()
            parked.set()

        async with await r.group.submit(ask(1, rank=0)) as stream:
            nursery.start_soon(wait)
            r.sim.ports[0].outbound.hold()
            r.sim.ports[1].outbound.hold()
            await r.move()
            r.sim.ports[0].outbound.let(1)  # the output, without the DONE behind it
            assert await read(stream) == tokens(1)
            await rest()
            assert not parked.is_set()
            r.sim.ports[1].outbound.release()
            await rest()
            assert parked.is_set()
            r.sim.ports[0].outbound.release()


async def test_a_group_that_is_parked_is_not_waited_for(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        with trio.testing.assert_checkpoints():
            await r.group.wait_parked()


async def test_waiting_for_the_park_of_a_group_that_is_lost_raises(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r, await r.group.submit(ask(5, rank=0)):
        r.sim.kill(1)
        with pytest.raises(GroupFailed) as caught:
            await r.group.wait_parked()
        assert caught.value.rank == 1


async def test_statistics_show_the_latest_load_a_rank_has_told(nursery: trio.Nursery) -> None:
    async with rig(nursery=nursery) as r:
        for running in (3, 7):
            r.say(1, stats={"num_running_reqs": running, "num_waiting_reqs": 0, "kv_cache_usage": 0.5})
            await rest()
            assert r.group.statistics().state.ranks[1].load.running == running
