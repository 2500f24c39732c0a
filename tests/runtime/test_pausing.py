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
from lockstep_trio.testing.rank_model import Add, Pause, Resume, StartWave
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


def answer_pause(r: Rig, rank: int, failure: str | None) -> None:
    """A rank answers the pause without having paused."""
    [call_id] = [each.call_id for each in r.sent(rank) if isinstance(each, Pause)]
    r.sim.ranks[rank].arrived.clear()
    r.say(rank, utility=[call_id, failure, None if failure else [None, None]])


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
            answer_pause(r, rank, "no")
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
        answer_pause(r, 0, None)
        answer_pause(r, 1, "no")
        await rest()
        assert isinstance(paused.error, GroupFailed)
        assert (paused.error.fault.rank, paused.error.fault.kind) == (1, FaultKind.DISAGREED)
        assert isinstance(waiting.error, GroupFailed)


async def test_an_independent_rank_that_refuses_alone_is_lost_alone(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery, lockstep=False) as r:
        paused = Doing(nursery, r.group.pause)
        await rest()
        answer_pause(r, 1, "no")
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
