"""The one nursery: what outlives what, and in which shape errors leave."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from lockstep_trio.runtime.background import Background, open_background
from runtime.kit import rest


async def test_tasks_run_until_the_block_is_left_and_then_end() -> None:
    seen: list[str] = []

    async def task() -> None:
        try:
            await trio.sleep_forever()
        finally:
            seen.append("ended")

    async with open_background() as background:
        background.start(task)
        await rest()
        assert not seen
    assert seen == ["ended"]


async def test_a_task_that_had_no_turn_yet_is_stopped_all_the_same() -> None:
    async with open_background() as background:
        background.start(trio.sleep_forever)


async def test_a_task_may_end_by_itself() -> None:
    async with open_background() as background:
        background.start(trio.lowlevel.checkpoint)
        await rest()


async def test_what_the_block_raises_leaves_as_it_is() -> None:
    mistake = ValueError("the block's own")
    with pytest.raises(ValueError, match="the block's own") as caught:
        async with open_background() as background:
            background.start(trio.sleep_forever)
            raise mistake
    assert caught.value is mistake


async def test_cancelling_the_block_leaves_the_tasks_alive_for_its_clean_up() -> None:
    alive: list[bool] = []

    async def task() -> None:
        alive.append(True)
        try:
            await trio.sleep_forever()
        finally:
            alive[0] = False

    with trio.CancelScope() as scope:
        async with open_background() as background:
            background.start(task)
            await rest()
            scope.cancel()
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    await rest()
                assert alive == [True]
    assert scope.cancelled_caught
    assert alive == [False]


async def test_stopping_waits_for_the_tasks_although_the_block_is_cancelled() -> None:
    ended = False

    async def slow_to_end() -> None:
        nonlocal ended
        try:
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await rest()
            ended = True

    with trio.CancelScope() as scope:
        async with open_background() as background:
            background.start(slow_to_end)
            await rest()
            scope.cancel()
    assert ended


async def crash() -> None:
    raise ZeroDivisionError("a bug")


async def test_a_bug_in_a_task_cancels_the_block_and_leaves_in_a_group() -> None:
    cancelled = False
    with pytest.raises(ExceptionGroup) as caught:
        async with open_background() as background:
            background.start(crash)
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                cancelled = True
                raise
    assert cancelled
    assert background.crashed
    (bug,) = caught.value.exceptions
    assert isinstance(bug, ZeroDivisionError)


async def test_what_the_block_raises_beside_a_bug_is_not_lost() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with open_background() as background:
            background.start(crash)
            try:
                await trio.sleep_forever()
            finally:
                raise ValueError("the block's own")
    assert {type(each) for each in caught.value.exceptions} == {ZeroDivisionError, ValueError}


async def test_whoever_waits_shielded_is_told_of_a_bug() -> None:
    scope = trio.CancelScope(shield=True)
    with pytest.raises(ExceptionGroup):
        async with open_background() as background:
            background.on_crash = scope.cancel
            background.start(crash)
            with scope:
                await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_stopping_is_no_bug() -> None:
    told: list[None] = []
    async with open_background() as background:
        background.on_crash = lambda: told.append(None)
        background.start(trio.sleep_forever)
        await rest()
    assert not told


async def test_a_keyboard_interrupt_never_lands_in_a_task() -> None:
    protected: list[bool] = []

    async def look() -> None:
        await trio.lowlevel.checkpoint()
        protected.append(trio.lowlevel.currently_ki_protected())

    async with open_background() as background:
        background.start(look)
        await rest()
    assert protected == [True]


async def test_stop_without_tasks_returns_at_once() -> None:
    async with trio.open_nursery() as nursery:
        with trio.testing.assert_no_checkpoints():
            await Background(nursery).stop()
