"""Silent ranks, over a link in memory and with a clock that jumps: when is one probed, mended, given up."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import trio
import trio.testing

from lockstep_trio.errors import FaultKind, GroupFailed, RankFailed
from lockstep_trio.testing.rank_model import Call
from runtime.kit import NOT_STEP_1, Outcome, Rig, Stream, ask, follow, read, rest, rig, tokens

LIMITS: dict[str, Any] = {"stall_timeout": 10.0, "probe_timeout": 4.0}


async def fails_after(r: Rig, begun: float, seconds: float) -> None:
    with trio.fail_after(100):
        await r.group.wait_failed()
    assert trio.current_time() - begun == pytest.approx(seconds)


async def test_a_frozen_group_with_work_is_probed_and_then_fails_as_stalled(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(nursery=nursery, **LIMITS) as r:
        await trio.sleep(1000)  # idle, it may be as silent as it likes
        outcome = Outcome()
        nursery.start_soon(follow, await r.group.submit(ask(5, rank=1, name="mine")), outcome)
        await fails_after(r, trio.current_time(), 14.0)
        await rest()
        assert isinstance(outcome.error, GroupFailed)
        assert (outcome.error.rank, outcome.error.fault.kind) == (1, FaultKind.STALLED)
        with pytest.raises(GroupFailed, match="rank 1 stalled"):
            await r.group.submit(ask(1))
        assert [type(each) for each in r.sent(0)].count(Call) == [type(each) for each in r.sent(1)].count(Call) == 1
        assert r.group.post_mortem is not None
        assert "mine#" in r.group.post_mortem
        assert "(nothing came back)" in r.group.post_mortem
        assert r.group.post_mortem in caplog.text


async def test_a_long_step_is_not_a_stall(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    async with rig(nursery=nursery, **LIMITS) as r:
        stream = await r.group.submit(ask(3, rank=0))
        for _ in range(3):
            await trio.sleep(13.5)  # the probe is under way, and nobody can answer it in the middle of a step
            await r.move()
        await r.settle()
        assert await read(stream) == tokens(3)
        r.assert_nothing_left()


async def test_whatever_a_rank_says_is_a_sign_of_life(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async with rig(nursery=nursery, **LIMITS) as r:
        stream = await r.group.submit(ask(1, rank=0))
        for _ in range(10):
            await trio.sleep(13.5)
            r.say(0, stats={"num_running_reqs": 1})
        await r.settle()
        assert await read(stream) == tokens(1)


async def test_a_rank_that_answers_its_probe_but_brings_no_token_is_alive(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async with rig(lockstep=False, nursery=nursery, **LIMITS) as r:
        stream = await r.group.submit(ask(1, rank=0))
        answered = 0
        for _ in range(100):  # ten times the limit
            await trio.sleep(1)
            calls = [each for each in r.sent(0) if isinstance(each, Call)]
            for call in calls[answered:]:
                r.say(0, utility=[call.call_id, None, [None, False]])
            answered = len(calls)
        assert answered == 9  # a second after each, the limit begins anew
        await r.settle()
        assert await read(stream) == tokens(1)


async def test_an_independent_rank_that_stalls_fails_alone(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async with rig(3, lockstep=False, nursery=nursery, **LIMITS) as r:
        frozen = await r.group.submit(ask(1, rank=2))
        with pytest.raises(RankFailed) as caught:
            await frozen.receive()
        assert (caught.value.rank, caught.value.fault.kind) == (2, FaultKind.STALLED)
        assert r.kinds(0) == r.kinds(1) == []  # nobody else was bothered
        stream = await r.group.submit(ask(2, rank=0))
        r.sim.alive[2] = False
        await r.settle()
        assert await read(stream) == tokens(2)
        with pytest.raises(RankFailed, match="stalled"):
            await r.group.submit(ask(1, rank=2))
        with pytest.raises(RankFailed, match="stalled"):
            await r.group.call_utility("is_sleeping")


async def test_a_wake_that_never_arrived_is_made_up_for_once_the_group_is_found_to_be_split(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(nursery=nursery, **LIMITS) as r:
        stream = await r.group.submit(ask(2, rank=1))
        assert len(r.sim.ports[0].inbound) == 1
        r.sim.ports[0].inbound.clear()  # its START, which no network may lose, but somebody's bug may
        begun = trio.current_time()
        output = None
        with trio.fail_after(100):
            while output is None:
                await r.settle()
                with trio.move_on_after(1):
                    output = await stream.receive()
        assert trio.current_time() - begun == pytest.approx(14.0)
        await r.settle()
        assert [*output.token_ids, *await read(stream)] == tokens(2)
        (record,) = [each for each in caplog.records if "the wave is started again" in each.message]
        assert record.levelno == logging.ERROR
        assert "ranks [0] answer a probe, [1] do not" in record.message
        assert "last START(0)" in record.message
        r.assert_nothing_left()


async def test_a_split_that_cannot_be_mended_fails_the_group_and_tells_who_answered(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async with rig(nursery=nursery, **LIMITS) as r:
        stream = await r.group.submit(ask(2, rank=1))
        begun = trio.current_time()
        r.sim.ports[0].inbound.clear()
        r.sim.deliver(1)
        r.sim.poll(1)  # into the collective

        async def answer_but_never_start() -> None:
            answered = 0
            while True:
                calls = [each for each in r.sent(0) if isinstance(each, Call)]
                for call in calls[answered:]:
                    r.say(0, utility=[call.call_id, None, [None, False]])
                answered = len(calls)
                await trio.sleep(0.5)

        nursery.start_soon(answer_but_never_start)
        await fails_after(r, begun, 18.0)
        with pytest.raises(GroupFailed, match=r"rank 1 stalled.*answered by ranks 0"):
            await stream.receive()


async def test_a_thread_that_was_blocked_for_long_is_no_reason_to_blame_a_rank(nursery: trio.Nursery) -> None:
    clock = trio.testing.MockClock()

    async def main() -> None:
        async with trio.open_nursery() as inner, rig(nursery=inner, **LIMITS) as r:
            stream = await r.group.submit(ask(1, rank=0))
            await rest()
            clock.jump(10.0)
            await rest()  # the probe is sent
            r.sim.deliver(0)
            r.sim.deliver(1)
            for _ in range(2):
                r.sim.advance()  # answered, and unread ...
            clock.jump(50.0)  # ... while somebody blocks the thread
            await rest()
            assert r.group.fault is None
            await r.settle()
            assert await read(stream) == tokens(1)
            inner.cancel_scope.cancel()

    await trio.to_thread.run_sync(lambda: trio.run(main, clock=clock))


async def test_without_a_limit_a_group_may_be_silent_for_ever(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async with rig(nursery=nursery, stall_timeout=None) as r:
        stream = await r.group.submit(ask(1, rank=0))
        await trio.sleep(80_000)
        await r.settle()
        assert await read(stream) == tokens(1)


@pytest.mark.parametrize("wait", ["drain", "wait_parked"])
async def test_a_group_that_freezes_between_its_last_output_and_its_done_is_not_waited_for_in_vain(
    wait: str, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async with rig(sync=NOT_STEP_1, nursery=nursery, **LIMITS) as r:
        stream = await r.group.submit(ask(1, rank=0))
        assert await one_move_at_a_time(r, stream) == tokens(1)
        assert r.group.statistics().state.stepping
        with trio.fail_after(100), pytest.raises(GroupFailed, match="stalled"):
            await getattr(r.group, wait)()


async def one_move_at_a_time(r: Rig, stream: Stream) -> list[int]:
    """Everything of a stream, and not a step of the ranks more."""
    got: list[int] = []
    while True:
        await r.move()
        if stream._buffer.unread:
            output = await stream.receive()
            got += output.token_ids
            if output.finished:
                return got


async def test_a_rank_gets_its_probe_in_time_while_another_one_is_being_probed(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async with rig(lockstep=False, nursery=nursery, stall_timeout=10.0, probe_timeout=100.0) as r:
        streams = [await r.group.submit(ask(1, rank=0))]
        await trio.sleep(11)
        streams.append(await r.group.submit(ask(1, rank=1)))
        begun = trio.current_time()
        while Call not in map(type, r.sent(1)):
            await trio.sleep(0.5)
        assert trio.current_time() - begun <= 20
        await r.settle()
        assert [await read(stream) for stream in streams] == [tokens(1)] * 2
