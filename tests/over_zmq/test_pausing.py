"""Pauses under load, with ranks as processes."""

from __future__ import annotations

import random
from itertools import count

import pytest
import trio

from lockstep_trio.engines.protocol import PauseMode
from lockstep_trio.testing.engine_rank import tokens_of
from over_zmq.driven import Requests, ask, serve

pytestmark = pytest.mark.trio

MODES: tuple[PauseMode, ...] = ("keep", "wait", "abort")


async def keep_asking(group: Requests, seed: int, ends: list[bool]) -> None:
    """Requests without end. What ends by itself has every token that it should; what a pause aborted has fewer."""
    draw = random.Random(seed)
    for _ in count():
        steps = draw.randrange(1, 30)
        tokens: list[int] = []
        async with await group.submit(ask(steps)) as stream:
            async for output in stream:
                tokens += output.token_ids
        assert tokens == tokens_of(7, steps)[: len(tokens)]
        ends.append(len(tokens) == steps)


@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize("mode", MODES)
async def test_requests_that_arrive_and_run_while_the_group_pauses_and_resumes_are_all_served(
    lockstep: bool, mode: PauseMode
) -> None:
    ends: list[bool] = []
    async with serve(2, lockstep=lockstep, step_time=0.001) as (group, _):
        async with trio.open_nursery() as nursery:
            for seed in range(8):
                nursery.start_soon(keep_asking, group, seed, ends)
            for _ in range(10):
                before = len(ends)
                while len(ends) < before + 8:
                    await trio.sleep(0.002)  # nobody announces it
                await group.pause(mode)
                assert await group.call_utility("is_sleeping") == {0: True, 1: True}
                await group.resume()
                assert await group.call_utility("is_sleeping") == {0: False, 1: False}
            nursery.cancel_scope.cancel()
        await group.wait_parked()
        if mode != "abort":
            assert all(ends)
        states = (await group.call_utility("mock_state")).values()
        assert all(isinstance(state, dict) and not state["running"] and not state["held"] for state in states)


async def test_an_idle_group_pauses_and_resumes_and_serves() -> None:
    async with serve(3) as (group, _):
        for _ in range(3):
            await group.pause("keep")
            await group.resume()
            async with await group.submit(ask(2, rank=1)) as stream:
                assert [token async for output in stream for token in output.token_ids] == tokens_of(7, 2)


async def test_a_request_that_is_frozen_can_be_left() -> None:
    async with serve(2, step_time=0.001) as (group, _):
        async with await group.submit(ask(4000, rank=0)) as stream:
            await stream.receive()
            await group.pause("keep")
        await group.resume()
        await group.wait_parked()


async def test_a_paused_group_can_be_left_in_no_time() -> None:
    with trio.fail_after(30):
        async with serve(2, close_grace=20.0, step_time=0.001) as (group, _):
            stream = await group.submit(ask(4000))
            await stream.receive()
            await group.pause("keep")
            begun = trio.current_time()
        assert trio.current_time() - begun < 15
        await stream.aclose()
