"""A result handed from one task to another exactly once, or not at all."""

from __future__ import annotations

import pytest
import trio

from lockstep_trio.runtime.waiting import Slot
from runtime.kit import rest


async def test_a_result_that_is_already_there_is_returned() -> None:
    slot = Slot[str]()
    slot.deliver("here")
    assert await slot.wait() == "here"
    assert slot.filled


async def test_a_task_that_waits_is_woken_by_the_result(nursery: trio.Nursery) -> None:
    slot = Slot[str]()
    got: list[str] = []

    async def wait() -> None:
        got.append(await slot.wait())

    nursery.start_soon(wait)
    await rest()
    slot.deliver("here")
    assert not got
    await rest()
    assert got == ["here"]


async def test_only_the_first_delivery_counts() -> None:
    slot = Slot[str]()
    slot.deliver("first")
    slot.deliver("second")
    slot.fail(ValueError)
    assert await slot.wait() == "first"


async def test_none_is_a_result_too() -> None:
    slot = Slot[None]()
    slot.deliver(None)
    assert await slot.wait() is None  # type: ignore[func-returns-value]


async def test_an_error_is_raised_in_the_waiting_task_and_made_there() -> None:
    made: list[ValueError] = []

    def make() -> ValueError:
        made.append(ValueError("no"))
        return made[-1]

    slot = Slot[str]()
    slot.fail(make)
    assert not made
    with pytest.raises(ValueError, match="no") as caught:
        await slot.wait()
    assert caught.value is made[0]


async def test_cancelled_before_the_result_means_abandoned_in_the_same_instant(nursery: trio.Nursery) -> None:
    slot = Slot[str]()
    scope = trio.CancelScope()

    async def wait() -> None:
        with scope:
            await slot.wait()

    nursery.start_soon(wait)
    await rest()
    assert not slot.abandoned
    scope.cancel()
    assert slot.abandoned
    slot.deliver("too late")  # harms nobody
    await rest()
    assert scope.cancelled_caught


async def test_once_the_result_is_there_cancellation_comes_too_late(nursery: trio.Nursery) -> None:
    slot = Slot[str]()
    scope = trio.CancelScope()
    got: list[str] = []

    async def wait() -> None:
        with scope:
            got.append(await slot.wait())

    nursery.start_soon(wait)
    await rest()
    slot.deliver("in time")
    scope.cancel()
    assert not slot.abandoned
    await rest()
    assert got == ["in time"]


async def test_a_result_delivered_before_the_wait_is_not_lost_to_a_cancelled_scope() -> None:
    slot = Slot[str]()
    slot.deliver("in time")
    with trio.CancelScope() as scope:
        scope.cancel()
        assert await slot.wait() == "in time"
    assert not slot.abandoned
