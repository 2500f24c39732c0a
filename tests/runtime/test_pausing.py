"""Pausing and resuming a group: to all ranks at once, one call at a time, whoever goes away meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from lockstep_trio.core import PausePhase
from lockstep_trio.errors import (
    FaultKind,
    GroupClosed,
    GroupFailed,
    Overloaded,
    RankFailed,
    RequestRejected,
    UtilityFailed,
)
from lockstep_trio.testing.rank_model import Add, Call, Pause, Resume, StartWave
from runtime.kit import Outcome, Rig, ask, follow, read, rest, rig, tokens


class Doing:
    """A call that goes on in a task of its own, and how it ended."""

    def __init__(self, nursery: trio.Nursery, call: Callable[[], Awaitable[Any]]) -> None:
        self.over = False
        self.value: Any = None
        self.error: Exception | None = None
        self.scope = trio.CancelScope()
        nursery.start_soon(self._do, call)

    async def _do(self, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            with self.scope:
                self.value = await call()
        except Exception as error:  # noqa: BLE001  # looked at by the test
            self.error = error
        self.over = True


async def followed(r: Rig, nursery: trio.Nursery, steps: int, rank: int | None = None) -> Outcome:
    """The outcome of a request that is read by a task of its own."""
    outcome = Outcome()
    nursery.start_soon(follow, await r.group.submit(ask(steps, rank=rank)), outcome)
    return outcome


def answer(r: Rig, rank: int, failure: str | None = None, result: object = None) -> None:
    """A rank answers the last call that it was sent, and does nothing about it."""
    call = r.sent(rank)[-1]
    assert isinstance(call, Pause | Resume | Call)
    r.sim.ranks[rank].arrived.clear()
    r.say(rank, utility=[call.call_id, failure, None if failure else [None, result]])


LOCKSTEP = pytest.mark.parametrize("lockstep", [True, False])


@LOCKSTEP
async def test_a_pause_reaches_all_ranks_and_returns_when_all_have_paused(
    nursery: trio.Nursery, lockstep: bool
) -> None:
    async with rig(2, nursery=nursery, lockstep=lockstep) as r:
        paused = Doing(nursery, r.group.pause)
        await rest()
        assert [type(r.sent(rank)[-1]) for rank in (0, 1)] == [Pause, Pause]
        assert not paused.over
        await r.settle()
        assert paused.over
        assert r.group.statistics().state.pause is PausePhase.PAUSED
        resumed = Doing(nursery, r.group.resume)
        await r.settle()
        assert resumed.over
        assert [type(r.sent(rank)[-1]) for rank in (0, 1)] == [Resume, Resume]
        assert r.group.statistics().state.pause is PausePhase.WORKING


@LOCKSTEP
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_what_becomes_of_a_request_in_flight_is_up_to_the_mode(
    nursery: trio.Nursery, lockstep: bool, mode: Any
) -> None:
    async with rig(2, nursery=nursery, lockstep=lockstep) as r:
        reader = await followed(r, nursery, 4, rank=0)
        await r.move()
        await r.move()
        paused = Doing(nursery, lambda: r.group.pause(mode))
        await r.settle()
        assert paused.over
        assert reader.finished is (mode != "keep")
        assert len(reader.tokens) == (4 if mode == "wait" else 2)
        resumed = Doing(nursery, r.group.resume)
        await r.settle()
        assert resumed.over
        if mode != "abort":
            assert reader.tokens == tokens(4)
        assert reader.finished


async def test_a_submit_waits_for_the_resume_and_then_its_add_and_the_wake_leave(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        Doing(nursery, r.group.pause)
        await rest()
        submitted = Doing(nursery, lambda: r.group.submit(ask(1, rank=1)))
        await r.settle()
        assert not submitted.over
        assert not any(isinstance(each, Add | StartWave) for rank in (0, 1) for each in r.sent(rank))
        Doing(nursery, r.group.resume)
        await r.settle()
        assert submitted.over
        assert [type(each) for each in r.sent(1)][-2:] == [Add, StartWave]
        assert await read(submitted.value) == tokens(1)


async def test_a_submit_that_is_cancelled_while_it_waits_sends_nothing(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        Doing(nursery, r.group.pause)
        await r.settle()
        submitted = Doing(nursery, lambda: r.group.submit(ask(1)))
        await rest()
        submitted.scope.cancel()
        await rest()
        assert submitted.scope.cancelled_caught
        Doing(nursery, r.group.resume)
        await r.settle()
        assert not any(isinstance(each, Add) for rank in (0, 1) for each in r.sent(rank))
        r.assert_nothing_left()


async def test_submits_that_wait_count_against_the_bound(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery, max_in_flight=1) as r:
        Doing(nursery, r.group.pause)
        await r.settle()
        waiting = Doing(nursery, lambda: r.group.submit(ask(1)))
        await rest()
        with pytest.raises(Overloaded, match="max_in_flight"):
            await r.group.submit(ask(1))
        Doing(nursery, r.group.resume)
        await r.settle()
        assert await read(waiting.value) == tokens(1)


async def test_a_second_resume_and_a_second_pause_send_nothing(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        await r.group.resume()
        assert r.sent(0) == []
        first, second = Doing(nursery, r.group.pause), Doing(nursery, r.group.pause)
        await r.settle()
        assert first.over
        assert second.over
        assert r.kinds(0).count("Pause") == 1
        for _ in range(2):
            resumed = Doing(nursery, r.group.resume)
            await r.settle()
            assert resumed.over
        assert r.kinds(0).count("Resume") == 1


async def test_calls_take_turns_a_resume_leaves_only_once_all_have_paused(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        Doing(nursery, r.group.pause)
        await rest()
        resumed = Doing(nursery, r.group.resume)
        await rest()
        r.sim.deliver(0)
        r.sim.poll(0)
        await rest()
        assert "Resume" not in [*r.kinds(0), *r.kinds(1)]
        await r.settle()
        assert resumed.over
        assert r.kinds(1)[-2:] == ["Pause", "Resume"]


async def test_whoever_is_cancelled_while_the_ranks_pause_leaves_them_pausing(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        paused = Doing(nursery, r.group.pause)
        await rest()
        paused.scope.cancel()
        await rest()
        assert paused.scope.cancelled_caught
        await r.settle()
        assert r.group.statistics().state.pause is PausePhase.PAUSED


async def test_a_pause_whose_turn_has_not_come_is_cancelled_without_a_trace(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        Doing(nursery, r.group.pause)
        await rest()
        Doing(nursery, r.group.resume)
        await rest()
        late = Doing(nursery, r.group.pause)
        await rest()
        late.scope.cancel()
        await r.settle()
        assert r.group.statistics().state.pause is PausePhase.WORKING
        assert r.kinds(0).count("Pause") == 1


async def test_a_time_limit_ends_the_wait_and_not_the_pause(nursery: trio.Nursery, autojump_clock: object) -> None:
    async with rig(2, nursery=nursery) as r:
        with pytest.raises(trio.TooSlowError):
            await r.group.pause(timeout=1.0)
        await r.settle()
        assert r.group.statistics().state.pause is PausePhase.PAUSED


@pytest.mark.parametrize("method", ["pause_scheduler", "resume_scheduler", "sleep", "wake_up"])
async def test_their_raw_names_are_refused(nursery: trio.Nursery, method: str) -> None:
    async with rig(2, nursery=nursery) as r:
        with pytest.raises(RequestRejected, match=r"Group\.pause"):
            await r.group.call_utility(method)
        assert r.sent(0) == []


async def test_ranks_that_all_refuse_change_nothing(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        paused = Doing(nursery, r.group.pause)
        await rest()
        for rank in (0, 1):
            answer(r, rank, "no")
        await rest()
        for rank in (0, 1):
            answer(r, rank, result=False)  # whether it is paused
        await rest()
        assert isinstance(paused.error, UtilityFailed)
        assert r.group.statistics().state.pause is PausePhase.WORKING
        reader = await followed(r, nursery, 2)
        await r.settle()
        assert reader.tokens == tokens(2)


async def test_a_lockstep_group_of_which_some_refuse_is_lost(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        paused = Doing(nursery, r.group.pause)
        await rest()
        waiting = Doing(nursery, lambda: r.group.submit(ask(1)))
        await rest()
        answer(r, 0)
        answer(r, 1, "no")
        await rest()
        answer(r, 1, result=False)
        await rest()
        assert isinstance(paused.error, GroupFailed)
        assert (paused.error.fault.rank, paused.error.fault.kind) == (1, FaultKind.DISAGREED)
        assert isinstance(waiting.error, GroupFailed)


async def test_an_independent_rank_that_refuses_alone_is_lost_alone(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery, lockstep=False) as r:
        paused = Doing(nursery, r.group.pause)
        await rest()
        answer(r, 1, "no")
        await r.settle()
        assert paused.over
        assert paused.error is None
        Doing(nursery, r.group.resume)
        await r.settle()
        with pytest.raises(RankFailed, match="disagreed"):
            await r.group.submit(ask(1, rank=1))
        reader = await followed(r, nursery, 1, rank=0)
        await r.settle()
        assert reader.tokens == tokens(1)


async def test_the_loss_of_an_independent_rank_does_not_hold_up_the_pause(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery, lockstep=False) as r:
        paused = Doing(nursery, r.group.pause)
        await rest()
        r.sim.kill(1)
        await r.settle()
        assert paused.over
        assert paused.error is None


async def test_the_loss_of_a_lockstep_rank_ends_every_call_that_waits(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        calls = []
        for each in (r.group.pause, r.group.resume, r.group.pause):
            calls.append(Doing(nursery, each))
            await rest()
        waiting = Doing(nursery, lambda: r.group.submit(ask(1)))
        await rest()
        r.sim.kill(0)
        await rest()
        assert all(isinstance(each.error, GroupFailed) for each in (*calls, waiting))


async def test_leaving_the_block_ends_what_waits_for_a_paused_group(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        Doing(nursery, r.group.pause)
        await r.settle()
        waiting = Doing(nursery, lambda: r.group.submit(ask(1)))
        await rest()
    await rest()
    assert isinstance(waiting.error, GroupClosed)


async def test_draining_a_paused_group_ends_the_submits_that_wait(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        Doing(nursery, r.group.pause)
        await r.settle()
        waiting = Doing(nursery, lambda: r.group.submit(ask(1)))
        await rest()
        Doing(nursery, r.group.drain)
        await rest()
        assert isinstance(waiting.error, GroupClosed)


async def test_who_sleeps_is_woken_and_not_resumed(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        asleep = Doing(nursery, lambda: r.group.sleep(1))
        await r.settle()
        assert asleep.over
        with pytest.raises(RequestRejected, match="wake-up"):
            await r.group.resume()
        woken = Doing(nursery, r.group.wake_up)
        await r.settle()
        assert woken.value is True
        assert r.group.statistics().state.pause is PausePhase.WORKING
        assert await r.group.wake_up() is True


async def test_a_paused_group_may_be_put_to_sleep(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        for call in (r.group.pause, r.group.sleep, r.group.wake_up):
            done = Doing(nursery, call)
            await r.settle()
            assert done.over
        assert r.kinds(0) == ["Pause", "Pause", "Resume"]


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda group: group.pause("soon"), "mode"),
        (lambda group: group.pause(clear_cache=1), "clear_cache"),
        (lambda group: group.sleep(3), "level"),
        (lambda group: group.wake_up([]), "tags"),
        (lambda group: group.wake_up([5]), "tags[0]"),
    ],
)
async def test_what_is_out_of_range_is_refused_before_anything_is_sent(
    nursery: trio.Nursery, call: Callable[[Any], Awaitable[Any]], field: str
) -> None:
    async with rig(2, nursery=nursery) as r:
        with pytest.raises(RequestRejected) as caught:
            await call(r.group)
        assert caught.value.field == field
        assert r.sent(0) == []


async def test_ranks_that_fail_after_they_have_paused_are_known_to_be_paused_and_can_be_resumed(
    nursery: trio.Nursery,
) -> None:
    async with rig(2, nursery=nursery) as r:
        paused = Doing(nursery, r.group.pause)
        await rest()
        for rank in (0, 1):  # as if a cache could not be cleared
            answer(r, rank, "Failed to reset the KV connector cache.")
        await rest()
        for rank in (0, 1):
            answer(r, rank, result=True)
        await rest()
        assert isinstance(paused.error, UtilityFailed)
        assert set(paused.error.failures) == {0, 1}
        assert r.group.statistics().state.pause is PausePhase.PAUSED
        resumed = Doing(nursery, r.group.resume)
        await rest()
        assert r.kinds(0)[-1] == "Resume"
        for rank in (0, 1):
            answer(r, rank)
        await rest()
        assert resumed.over
        assert r.group.statistics().state.pause is PausePhase.WORKING


async def test_a_lockstep_rank_that_failed_but_says_that_it_is_paused_is_in_step(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        paused = Doing(nursery, r.group.pause)
        await rest()
        answer(r, 0)
        answer(r, 1, "something else went wrong")
        await rest()
        answer(r, 1, result=True)
        await rest()
        assert paused.over
        assert paused.error is None
        assert r.group.statistics().state.pause is PausePhase.PAUSED


@pytest.mark.parametrize("said", [None, "perhaps"])
async def test_ranks_whose_state_cannot_be_found_out_are_lost(nursery: trio.Nursery, said: object) -> None:
    async with rig(2, nursery=nursery) as r:
        paused = Doing(nursery, r.group.pause)
        await rest()
        for rank in (0, 1):
            answer(r, rank, "no")
        await rest()
        for rank in (0, 1):
            answer(r, rank, result=said)
        await rest()
        assert isinstance(paused.error, GroupFailed)
        assert paused.error.fault.kind is FaultKind.DISAGREED


async def test_an_unreadable_message_of_an_independent_rank_is_not_taken_for_a_refusal(nursery: trio.Nursery) -> None:
    async with rig(1, nursery=nursery, lockstep=False) as r:
        paused = Doing(nursery, r.group.pause)
        await rest()
        r.sim.ports[0].send((b"\xc1",))
        await r.settle()  # it does pause, and says so when it is asked
        assert r.group.statistics().state.pause is PausePhase.PAUSED
        assert isinstance(paused.error, UtilityFailed)
        resumed = Doing(nursery, r.group.resume)
        await r.settle()
        assert resumed.over
        assert resumed.error is None


async def test_an_independent_rank_that_shuts_down_need_not_pause(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery, lockstep=False) as r:
        reader = await followed(r, nursery, 3, rank=1)
        paused = Doing(nursery, r.group.pause)
        await rest()
        answer(r, 1, "Server shutting down")
        await r.settle()
        assert paused.over
        assert paused.error is None
        assert r.group.fault is None
        assert reader.error is None


async def test_submits_that_were_cancelled_while_they_waited_hold_no_place(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery, max_in_flight=2) as r:
        Doing(nursery, r.group.pause)
        await r.settle()
        for _ in range(2):
            waiting = Doing(nursery, lambda: r.group.submit(ask(1)))
            await rest()
            waiting.scope.cancel()
            await rest()
        last = Doing(nursery, lambda: r.group.submit(ask(1)))
        await rest()
        assert last.error is None
        Doing(nursery, r.group.resume)
        await r.settle()
        assert await read(last.value) == tokens(1)


async def test_a_lost_group_says_so_instead_of_having_nothing_to_do(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        r.sim.kill(0)
        await rest()
        for call in (r.group.resume, r.group.wake_up, r.group.pause):
            with pytest.raises(GroupFailed):
                await call()


async def test_the_ranks_that_answered_are_not_blamed_for_the_loss_of_another(nursery: trio.Nursery) -> None:
    async with rig(3, nursery=nursery) as r:
        stream = await r.group.submit(ask(9, rank=2))
        paused = Doing(nursery, r.group.pause)
        await rest()
        answer(r, 0)
        await rest()
        r.sim.kill(1)
        await rest()
        assert isinstance(paused.error, GroupFailed)
        assert paused.error.fault.rank == 1
        assert [each.fault is not None for each in r.coordinator.drivers] == [False, True, False]
        assert r.kinds(2)[-1] == "Drop"
        await stream.aclose()


async def test_after_a_partial_refusal_nothing_more_is_sent(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        calls = []
        for each in (r.group.pause, r.group.resume):
            calls.append(Doing(nursery, each))
            await rest()
        waiting = Doing(nursery, lambda: r.group.submit(ask(1)))
        await rest()
        answer(r, 0)
        answer(r, 1, "no")
        await rest()
        answer(r, 1, result=False)
        await rest()
        assert all(isinstance(each.error, GroupFailed) for each in (*calls, waiting))
        assert not any(isinstance(each, Add | Resume) for rank in (0, 1) for each in r.sent(rank))


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
async def test_a_time_limit_that_is_none_begins_nothing(nursery: trio.Nursery, limit: float) -> None:
    async with rig(2, nursery=nursery) as r:
        with pytest.raises(ValueError, match=r"timeout|nan|NaN|non-negative"):
            await r.group.pause(timeout=limit)
        await rest()
        assert r.sent(0) == []


async def test_who_sleeps_already_is_not_told_again(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        for _ in range(2):
            asleep = Doing(nursery, lambda: r.group.sleep(1))
            await r.settle()
            assert asleep.over
        assert r.kinds(0).count("Pause") == 1
