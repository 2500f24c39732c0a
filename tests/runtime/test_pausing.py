"""Pausing and resuming a group: to all ranks at once, one call at a time, whoever goes away meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from lockstep_trio.core import Abort, GroupMachine, PausePhase
from lockstep_trio.errors import (
    FaultKind,
    GroupClosed,
    GroupFailed,
    Overloaded,
    RankFailed,
    RequestRejected,
    UtilityFailed,
)
from lockstep_trio.runtime import Group
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


async def fail(r: Rig, words: Mapping[int, str | None]) -> None:
    """These ranks say why they have not done what they were told; None: they have."""
    for rank, each in words.items():
        answer(r, rank, each)
    await rest()


async def tell(r: Rig, results: Mapping[int, object]) -> None:
    """These ranks return something."""
    for rank, each in results.items():
        answer(r, rank, result=each)
    await rest()


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
    async with rig(2, nursery=nursery, max_in_flight=2) as r:
        frozen = await followed(r, nursery, 2)
        await r.move()
        Doing(nursery, lambda: r.group.pause("keep"))
        await r.settle()
        waiting = Doing(nursery, lambda: r.group.submit(ask(1)))
        await rest()
        refused = Doing(nursery, lambda: r.group.submit(ask(1)))
        await rest()
        assert isinstance(refused.error, Overloaded)
        assert refused.error.limit_name == "max_in_flight"
        Doing(nursery, r.group.resume)
        await r.settle()
        assert frozen.tokens == tokens(2)
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
        await fail(r, {0: "no", 1: "no"})
        await tell(r, {0: False, 1: False})  # whether it is paused
        assert isinstance(paused.error, UtilityFailed)
        assert r.group.statistics().state.pause is PausePhase.WORKING
        reader = await followed(r, nursery, 2)
        await r.settle()
        assert reader.tokens == tokens(2)


@pytest.mark.parametrize(
    ("words", "failed"),
    [
        ({0: "a cache could not be cleared", 1: "nor here"}, {0, 1}),
        ({0: None, 1: "a cache could not be cleared"}, None),
    ],
)
async def test_ranks_that_fail_and_say_that_they_are_paused_are_paused_and_can_be_resumed(
    nursery: trio.Nursery, words: dict[int, str | None], failed: set[int] | None
) -> None:
    async with rig(2, nursery=nursery) as r:
        paused = Doing(nursery, r.group.pause)
        await rest()
        await fail(r, words)
        await tell(r, {rank: True for rank, each in words.items() if each})
        assert paused.over
        assert failed == (paused.error.failures.keys() if isinstance(paused.error, UtilityFailed) else paused.error)
        assert r.group.statistics().state.pause is PausePhase.PAUSED
        resumed = Doing(nursery, r.group.resume)
        await rest()
        assert r.kinds(0)[-1] == "Resume"
        await tell(r, {0: None, 1: None})
        assert resumed.over
        assert r.group.statistics().state.pause is PausePhase.WORKING


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({0: None, 1: "no"}, {1: False}),
        ({0: "no", 1: "no"}, {0: True, 1: False}),
        ({0: "no", 1: "no"}, {0: True, 1: None}),
        ({0: "no", 1: "no"}, {0: True, 1: "perhaps"}),
        ({0: "no", 1: "no"}, {0: None, 1: None}),
    ],
)
async def test_lockstep_ranks_that_are_not_known_to_be_in_one_state_are_lost_and_sent_nothing_more(
    nursery: trio.Nursery, words: dict[int, str | None], said: dict[int, object]
) -> None:
    async with rig(2, nursery=nursery) as r:
        calls = []
        for each in (r.group.pause, r.group.resume, lambda: r.group.submit(ask(1))):
            calls.append(Doing(nursery, each))
            await rest()
        await fail(r, words)
        await tell(r, said)
        assert all(isinstance(each.error, GroupFailed) for each in calls)
        assert r.group.fault is not None
        assert r.group.fault.kind is FaultKind.DISAGREED
        assert said.get(r.group.fault.rank, True) is not True, "one that has paused is not to blame"
        assert not any(isinstance(each, Add | Resume) for rank in (0, 1) for each in r.sent(rank))


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


async def test_an_independent_rank_that_does_not_resume_gets_none_of_the_requests_that_waited(
    nursery: trio.Nursery,
) -> None:
    async with rig(2, nursery=nursery, lockstep=False) as r:
        Doing(nursery, r.group.pause)
        await r.settle()
        pinned = Doing(nursery, lambda: r.group.submit(ask(1, rank=1)))
        others = [Doing(nursery, lambda: r.group.submit(ask(1))) for _ in range(2)]
        await rest()
        resumed = Doing(nursery, r.group.resume)
        await rest()
        await fail(r, {1: "no"})
        await tell(r, {1: True})  # it is still paused
        await r.settle()
        assert resumed.over
        assert resumed.error is None
        assert isinstance(pinned.error, RankFailed)
        assert [await read(each.value) for each in others] == [tokens(1)] * 2


async def test_the_loss_of_an_independent_rank_does_not_hold_up_the_pause(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery, lockstep=False) as r:
        paused = Doing(nursery, r.group.pause)
        await rest()
        r.sim.kill(1)
        await r.settle()
        assert paused.over
        assert paused.error is None


async def test_what_a_rank_said_before_it_was_lost_does_not_count(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery, lockstep=False) as r:
        Doing(nursery, r.group.sleep)
        await r.settle()
        woken = Doing(nursery, r.group.wake_up)
        await rest()
        await tell(r, {1: False})
        r.sim.kill(1)
        await r.settle()
        assert woken.value is True
        assert r.group.statistics().state.pause is PausePhase.WORKING


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


async def test_leaving_the_block_ends_a_pause_that_is_under_way_and_all_calls_behind_it(nursery: trio.Nursery) -> None:
    async with rig(2) as r:
        calls = []
        for each in (r.group.pause, r.group.resume):
            calls.append(Doing(nursery, each))
            await rest()
    await rest()
    assert all(isinstance(each.error, GroupClosed) for each in calls)


async def test_leaving_the_block_ends_what_waits_for_a_paused_group(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        Doing(nursery, r.group.pause)
        await r.settle()
        waiting = Doing(nursery, lambda: r.group.submit(ask(1)))
        await rest()
    await rest()
    assert isinstance(waiting.error, GroupClosed)


async def test_leaving_the_block_ends_what_waits_for_a_paused_group_even_if_the_machine_cannot_be_told(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ExceptionGroup):
        async with rig(2, nursery=nursery) as r:
            Doing(nursery, r.group.pause)
            await r.settle()
            waiting = Doing(nursery, lambda: r.group.submit(ask(1)))
            await rest()
            monkeypatch.setattr(GroupMachine, "handle", lambda *_: 1 // 0)
    await rest()
    assert isinstance(waiting.error, GroupClosed)


async def test_what_waits_for_a_paused_group_is_told_of_a_loss_that_nobody_has_come_to(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        Doing(nursery, r.group.pause)
        await r.settle()
        waiting = Doing(nursery, lambda: r.group.submit(ask(1)))
        await rest()
        r.coordinator.post(Abort(()))  # wakes the coordinator, so the next one waits for its turn
        r.coordinator.drivers[0].lose(FaultKind.DIED, "the engine said so")
        r.coordinator.finish()
        await rest()
        assert isinstance(waiting.error, GroupFailed)


async def test_draining_a_paused_group_ends_the_submits_that_wait(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        Doing(nursery, r.group.pause)
        await r.settle()
        waiting = Doing(nursery, lambda: r.group.submit(ask(1)))
        await rest()
        Doing(nursery, r.group.drain)
        await rest()
        assert isinstance(waiting.error, GroupClosed)


async def test_a_group_that_drains_can_be_paused_and_drains_on_after_the_resume(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery) as r:
        reader = await followed(r, nursery, 4)
        drained = Doing(nursery, r.group.drain)
        await r.move()
        for call in (lambda: r.group.pause("keep"), r.group.resume):
            assert not drained.over
            done = Doing(nursery, call)
            await r.settle()
            assert done.over
            assert done.error is None
        assert drained.over
        assert reader.tokens == tokens(4)


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


@pytest.mark.parametrize("awake", [{0: False, 1: False}, {0: True, 1: False}])
async def test_while_a_rank_misses_memory_the_group_stays_paused_and_asleep(
    nursery: trio.Nursery, awake: dict[int, bool]
) -> None:
    async with rig(2, nursery=nursery) as r:
        Doing(nursery, r.group.sleep)
        await r.settle()
        submitted = Doing(nursery, lambda: r.group.submit(ask(1)))
        woken = Doing(nursery, lambda: r.group.wake_up(["weights"]))
        await rest()
        await tell(r, awake)
        assert woken.value is False
        assert not submitted.over
        assert r.group.statistics().state.pause is PausePhase.PAUSED
        with pytest.raises(RequestRejected, match="wake-up"):
            await r.group.resume()
        woken = Doing(nursery, r.group.wake_up)
        await r.settle()
        assert woken.value is True
        assert await read(submitted.value) == tokens(1)


@pytest.mark.parametrize(
    "calls",
    [
        (lambda group: group.sleep(0), Group.resume),
        (lambda group: group.sleep(1), Group.wake_up, Group.pause, Group.resume),
    ],
)
async def test_who_kept_all_memory_or_was_woken_can_be_resumed(
    nursery: trio.Nursery, calls: Sequence[Callable[[Any], Awaitable[Any]]]
) -> None:
    async with rig(2, nursery=nursery) as r:
        for call in calls:
            done = Doing(nursery, partial(call, r.group))
            await r.settle()
            assert done.over
            assert done.error is None
        assert r.group.statistics().state.pause is PausePhase.WORKING


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


LIMITS: dict[str, Any] = {"stall_timeout": 10.0, "probe_timeout": 4.0}


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda group: group.pause("keep"), True),
        (lambda group: group.sleep(0, mode="keep"), True),
        (lambda group: group.sleep(1, mode="keep"), False),
        (lambda group: group.sleep(2, mode="keep"), False),
    ],
)
async def test_a_rank_with_requests_that_falls_silent_while_it_pauses_is_found_unless_it_lets_go_of_memory(
    nursery: trio.Nursery,
    autojump_clock: trio.testing.MockClock,
    call: Callable[[Any], Awaitable[Any]],
    found: bool,
) -> None:
    async with rig(2, nursery=nursery, **LIMITS) as r:
        stream = await r.group.submit(ask(5, rank=1))
        pausing = Doing(nursery, lambda: call(r.group))
        await trio.sleep(1000)
        assert pausing.over is found
        assert isinstance(pausing.error, GroupFailed) is found
        assert (r.group.fault is not None) is found
        await stream.aclose()


@pytest.mark.parametrize("resumes", [True, False])
async def test_a_rank_that_held_requests_while_it_was_paused_is_watched_again_from_the_next_call_on(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, resumes: bool
) -> None:
    async with rig(2, nursery=nursery, **LIMITS) as r:
        stream = await r.group.submit(ask(5, rank=1))
        await r.move()
        await r.move()
        Doing(nursery, lambda: r.group.pause("keep"))
        await r.settle()
        await trio.sleep(1000)
        assert r.group.fault is None
        begun = trio.current_time()
        Doing(nursery, r.group.resume if resumes else lambda: r.group.sleep(0, mode="keep"))
        await rest()
        if resumes:
            await tell(r, {0: None, 1: None})
        with trio.fail_after(100):
            fault = await r.group.wait_failed()
        assert (fault.rank, fault.kind) == (1, FaultKind.STALLED)
        assert trio.current_time() - begun == pytest.approx(14.0)
        await stream.aclose()


async def test_what_a_rank_said_of_its_state_counts_no_more_once_it_is_lost(nursery: trio.Nursery) -> None:
    async with rig(2, nursery=nursery, lockstep=False) as r:
        Doing(nursery, r.group.pause)
        await r.settle()
        Doing(nursery, r.group.resume)
        await rest()
        await fail(r, {0: "no", 1: "no"})
        await tell(r, {0: True, 1: False})  # the first is paused still and is given up; the other one works
        assert [driver.fault is not None for driver in r.coordinator.drivers] == [True, False]
        assert r.group.statistics().state.pause is PausePhase.WORKING
